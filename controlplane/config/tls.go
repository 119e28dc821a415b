package config

import (
	"errors"
	"fmt"
	"net"
	"slices"
)

// TLS is the certificate of the REST and gRPC ports for tenants. The ports for members and agents use certificates of
// the cluster's own authority, and the ports for etcd's clients use kv.etcd_cert.
type TLS struct {
	// Cert is the path of the certificate, followed by its intermediate certificates. Key is the path of the private
	// key, which only its owner may read. Either both are set or none. The member reads the files again when they
	// change.
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
}

// Enabled reports whether the ports for tenants use TLS.
func (t TLS) Enabled() bool { return t.Cert != "" }

// Scheme returns the URL scheme of the ports for tenants: https or http.
func (t TLS) Scheme() string {
	if t.Enabled() {
		return "https"
	}
	return "http"
}

// ValidateTLS returns an error if only one of TLS.Cert and TLS.Key is set. It also returns an error if tokens and
// passwords would be sent over a network in plaintext, unless InsecurePlaintext is set.
func (c *Config) ValidateTLS() error {
	if (c.TLS.Cert == "") != (c.TLS.Key == "") {
		return errors.New("tls: cert and key go together")
	}
	if c.InsecurePlaintext {
		return nil
	}
	if c.PlaintextBeyondLoopback() {
		return fmt.Errorf("listen: tokens and passwords of tenants would cross the network of %s in plaintext: give --tls-cert and --tls-key "+
			"(trivet-controlplane tenant-cert makes them), or --insecure-plaintext to do it all the same", c.Listen)
	}
	if address := c.KV.PlaintextAddress(); address != "" {
		return fmt.Errorf("kv.etcd_listen: keys and passwords would cross the network of %s in plaintext: give --kv-etcd-cert and "+
			"--kv-etcd-key, or --insecure-plaintext to do it all the same", address)
	}
	return nil
}

// PlaintextBeyondLoopback reports whether the ports for tenants are plaintext on an address that other hosts can reach.
func (c *Config) PlaintextBeyondLoopback() bool {
	return !c.TLS.Enabled() && !net.ParseIP(c.Listen).IsLoopback()
}

// PlaintextAddress returns the first address of EtcdListen that other hosts can reach in plaintext, or "" if there is
// none.
func (k *KV) PlaintextAddress() string {
	if i := slices.IndexFunc(k.EtcdListen, func(a string) bool { return !loopback(a) }); i >= 0 && k.EtcdCert == "" {
		return k.EtcdListen[i]
	}
	return ""
}

// loopback reports whether address, a host:port, can be reached only from this host.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && (host == "localhost" || net.ParseIP(host).IsLoopback())
}
