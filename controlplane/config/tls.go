package config

import (
	"errors"
	"fmt"
	"net"
	"slices"
)

// TLS is the certificate of tenants' ports, REST and gRPC. The ports of members and agents use certificates of the
// cluster's own authority, and the ports for etcd's clients use kv.etcd_cert.
type TLS struct {
	// Cert is the file with the certificate and its intermediate certificates. Key is the file with its private key, which
	// only its owner may read. Both are set or neither is. The member reads the files again when they change.
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
}

// Enabled reports whether tenants' ports serve TLS.
func (t TLS) Enabled() bool { return t.Cert != "" }

// Scheme returns the scheme of the URLs of tenants' ports: https or http.
func (t TLS) Scheme() string {
	if t.Enabled() {
		return "https"
	}
	return "http"
}

// ValidateTLS returns an error if tokens and passwords would cross a network in plaintext, unless InsecurePlaintext is set.
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

// PlaintextBeyondLoopback reports whether tenants' ports are plaintext on an address that other hosts can reach.
func (c *Config) PlaintextBeyondLoopback() bool {
	return !c.TLS.Enabled() && !net.ParseIP(c.Listen).IsLoopback()
}

// PlaintextAddress returns the first address of EtcdListen that is plaintext and that other hosts can reach, or "".
func (k *KV) PlaintextAddress() string {
	if i := slices.IndexFunc(k.EtcdListen, func(a string) bool { return !loopback(a) }); i >= 0 && k.EtcdCert == "" {
		return k.EtcdListen[i]
	}
	return ""
}

// loopback reports whether host:port can be reached from this host only.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && (host == "localhost" || net.ParseIP(host).IsLoopback())
}
