package config

import (
	"errors"
	"fmt"
	"net"
	"slices"
)

// TLS is what tenants' ports show, REST and gRPC alike. Members and agents have certificates of their own on theirs, and
// the ports for etcd's clients have those of kv.etcd_cert.
type TLS struct {
	// Cert is the file with the certificate and those between it and its authority, Key that with its key, which only its
	// owner may read. Both or neither; they are read again when they change.
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
}

// Enabled says whether tenants speak TLS with this member.
func (t TLS) Enabled() bool { return t.Cert != "" }

// Scheme is how a URL of a tenants' port begins.
func (t TLS) Scheme() string {
	if t.Enabled() {
		return "https"
	}
	return "http"
}

// validateTLS refuses to serve what would carry tokens and passwords over a network in plaintext, unless that is forced.
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

// loopback says whether host:port is reached from this host alone.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && (host == "localhost" || net.ParseIP(host).IsLoopback())
}
