// Package mtls provides the certificates and TLS configurations with which Trivet's programs authenticate each other.
// Each cluster has one certificate authority. A certificate names its owner's kind and ID as
// spiffe://<cluster>/<kind>/<id>. The TLS 1.3 configurations accept only the kinds that the caller allows. Host names
// are not verified, except in certificates for tenants' ports, which arbitrary clients verify.
//
// The package opens no sockets, and the only files that it accesses are those of [LoadOrMakeKey]. The URI form follows
// the SPIFFE ID and X.509-SVID standards.
package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Kind is the type of the owner of a certificate.
type Kind string

const (
	Member Kind = "member"
	Node   Kind = "node"
	// Tenants is the kind of the server certificates for the ports that serve tenants. Such a certificate contains host
	// names and identifies no member or node. No Trivet listener accepts one from a client.
	Tenants Kind = "tenants"
)

// ID identifies the party that a certificate names: its cluster, its kind, and its name within the kind.
type ID struct {
	Cluster string
	Kind    Kind
	Name    string
}

func (id ID) uri() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: id.Cluster, Path: "/" + string(id.Kind) + "/" + id.Name}
}

func (id ID) String() string { return id.uri().String() }

// IDOf returns the party that a certificate names. The certificate must have exactly one URI, of the form
// spiffe://<cluster>/<kind>/<id>.
func IDOf(cert *x509.Certificate) (ID, error) {
	if len(cert.URIs) != 1 {
		return ID{}, fmt.Errorf("certificate names %d URIs, want one", len(cert.URIs))
	}
	u := cert.URIs[0]
	kind, name, ok := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	if u.Scheme != "spiffe" || u.Host == "" || !ok || name == "" || strings.Contains(name, "/") {
		return ID{}, fmt.Errorf("certificate names %q, want spiffe://<cluster>/<kind>/<id>", u)
	}
	return ID{Cluster: u.Host, Kind: Kind(kind), Name: name}, nil
}

// Accept is a function that decides by the ID in a peer's certificate whether the connection is allowed. It is called
// after the certificate's signature, dates and key usage were verified. If it returns an error, the connection is
// rejected.
type Accept func(ID) error

// OnlyKind returns an Accept function that accepts only certificates of one kind.
func OnlyKind(kind Kind) Accept {
	return func(id ID) error {
		if id.Kind != kind && !mutant.On(mutant.AnyCertificate) {
			return fmt.Errorf("certificate is of a %s, want a %s", id.Kind, kind)
		}
		return nil
	}
}

// Source is a function that returns the certificate to present in a handshake. It is called for each handshake, so a
// renewed certificate is used in the next handshake.
type Source func() (*tls.Certificate, error)

// Server returns the TLS configuration of a listener that requires client certificates. A certificate must be signed by
// the cluster's authority, and the function accept must return nil for its ID.
func Server(own Source, authority *x509.Certificate, accept Accept) *tls.Config {
	return server(own, authority, accept, 0)
}

func server(own Source, authority *x509.Certificate, accept Accept, grace time.Duration) *tls.Config {
	c := baseConfig(authority, x509.ExtKeyUsageClientAuth, accept, grace)
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return own() }
	c.ClientAuth = tls.RequireAnyClientCert
	return c
}

// ServerOptional returns a configuration like that of Server, which also accepts two other sorts of clients, so that
// they can request a certificate: clients without a certificate, and clients whose certificate expired at most grace
// ago. The caller must restrict what such clients may call (see Expired).
func ServerOptional(own Source, authority *x509.Certificate, accept Accept, grace time.Duration) *tls.Config {
	c := server(own, authority, accept, grace)
	c.ClientAuth = tls.RequestClientCert
	verify := c.VerifyConnection
	c.VerifyConnection = func(state tls.ConnectionState) error {
		if len(state.PeerCertificates) == 0 {
			return nil
		}
		return verify(state)
	}
	return c
}

// Client returns the TLS configuration of a client. It accepts a server if the cluster's authority signed the server's
// certificate and the function accept returns nil for its ID. own is nil if the client has no certificate yet.
func Client(own Source, authority *x509.Certificate, accept Accept) *tls.Config {
	c := baseConfig(authority, x509.ExtKeyUsageServerAuth, accept, 0)
	if own != nil {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own() }
	}
	return c
}

// baseConfig returns a TLS configuration that verifies the certificate chain in VerifyConnection. Go's own verification
// requires host names, which these certificates do not contain. The current time is that of the configuration's field
// Time, if the caller sets it before the first connection.
func baseConfig(authority *x509.Certificate, usage x509.ExtKeyUsage, accept Accept, grace time.Duration) *tls.Config {
	roots := x509.NewCertPool()
	roots.AddCert(authority)
	var c *tls.Config
	c = &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // VerifyConnection below verifies the chain, the key usage and the ID
		// Session tickets would let a peer resume a session after accept has begun to reject the peer.
		SessionTicketsDisabled: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 {
				return errors.New("no certificate was presented")
			}
			leaf := state.PeerCertificates[0]
			at := time.Now()
			if c.Time != nil {
				at = c.Time()
			}
			if late := at.Sub(leaf.NotAfter); late > 0 && late <= grace {
				at = leaf.NotAfter
			}
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}, CurrentTime: at}); err != nil {
				return fmt.Errorf("verify certificate: %w", err)
			}
			id, err := IDOf(leaf)
			if err != nil {
				return err
			}
			own, err := clusterOf(authority)
			if err != nil {
				return err
			}
			if id.Cluster != own {
				return fmt.Errorf("certificate is of cluster %s, this is %s", id.Cluster, own)
			}
			return accept(id)
		},
	}
	return c
}

// Expired reports whether a certificate has expired at the time now. A listener with the configuration of
// ServerOptional needs this check, because it also accepts recently expired certificates.
func Expired(cert *x509.Certificate, now time.Time) bool { return now.After(cert.NotAfter) }

// PeerID returns the ID in the peer's certificate. It returns false if the peer presented no certificate, or one
// without a valid ID. It does not verify the certificate: the configurations of this package do that during the
// handshake.
func PeerID(state tls.ConnectionState) (ID, bool) {
	if len(state.PeerCertificates) == 0 {
		return ID{}, false
	}
	id, err := IDOf(state.PeerCertificates[0])
	return id, err == nil
}

// Hosts returns the TLS configuration for either end of a connection between two hosts. Hosts have only client
// certificates, so the client also accepts such a certificate from the server. accept decides which host is accepted.
func Hosts(own Source, authority *x509.Certificate, accept Accept) *tls.Config {
	c := server(own, authority, accept, 0)
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own() }
	return c
}

// OnlyNode returns an Accept function that accepts only the certificate of the node with this ID.
func OnlyNode(node string) Accept {
	return func(id ID) error {
		if err := OnlyKind(Node)(id); err != nil {
			return err
		}
		if id.Name != node {
			return fmt.Errorf("certificate is of node %s, want node %s", id.Name, node)
		}
		return nil
	}
}
