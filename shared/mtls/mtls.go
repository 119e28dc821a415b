// Package mtls is how Trivet's programs prove to each other who they are: one authority a cluster, certificates that
// name a kind and an id as spiffe://<cluster>/<kind>/<id>, and TLS 1.3 configurations that accept only the kinds that a
// port is for. Host names play no part, but in certificates for tenants' ports, which clients of any make verify.
//
// It keeps no files and opens no sockets; keys come in as values. Source of the form: the SPIFFE ID and X.509-SVID
// standards.
package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"
)

// Kind is what sort of party a certificate names.
type Kind string

const (
	Member Kind = "member"
	Node   Kind = "node"
	// Tenants is what tenants' ports show. It names hosts, proves nobody, and no port of ours lets it in.
	Tenants Kind = "tenants"
)

// ID is the party that a certificate names.
type ID struct {
	Cluster string
	Kind    Kind
	Name    string
}

func (id ID) uri() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: id.Cluster, Path: "/" + string(id.Kind) + "/" + id.Name}
}

func (id ID) String() string { return id.uri().String() }

// Of reads the party from a certificate: exactly one URI, of our form.
func Of(cert *x509.Certificate) (ID, error) {
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

// Accept judges the party at the other end, after its certificate proved to be of our authority and for this use.
type Accept func(ID) error

// OnlyKind accepts one kind.
func OnlyKind(kind Kind) Accept {
	return func(id ID) error {
		if id.Kind != kind {
			return fmt.Errorf("certificate is of a %s, want a %s", id.Kind, kind)
		}
		return nil
	}
}

// Source gives the certificate to show now; it may change between calls.
type Source func() (*tls.Certificate, error)

// Server is the configuration of a listener that demands a client certificate of our authority.
func Server(own Source, authority *x509.Certificate, accept Accept) *tls.Config {
	return server(own, authority, accept, 0)
}

func server(own Source, authority *x509.Certificate, accept Accept, grace time.Duration) *tls.Config {
	c := base(authority, x509.ExtKeyUsageClientAuth, accept, grace)
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return own() }
	c.ClientAuth = tls.RequireAnyClientCert
	return c
}

// ServerOptional is Server that also lets in clients without a certificate, and those whose certificate expired within
// grace, so that they can ask for one. What they may call is the caller's affair: see Expired.
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

// Client is the configuration of a dialler. own may be nil when there is no certificate yet.
func Client(own Source, authority *x509.Certificate, accept Accept) *tls.Config {
	c := base(authority, x509.ExtKeyUsageServerAuth, accept, 0)
	if own != nil {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own() }
	}
	return c
}

// base verifies the chain itself: Go's own check wants host names, which our certificates do not carry. It goes by the
// clock that the caller sets as the configuration's Time, if it does before anybody connects.
func base(authority *x509.Certificate, usage x509.ExtKeyUsage, accept Accept, grace time.Duration) *tls.Config {
	roots := x509.NewCertPool()
	roots.AddCert(authority)
	var c *tls.Config
	c = &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // VerifyConnection below verifies the chain, the use and the party
		// Tickets would let a resumed session outlive what accept says now.
		SessionTicketsDisabled: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 {
				return errors.New("no certificate shown")
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
			id, err := Of(leaf)
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

// Expired reports whether a certificate that was let in is over at now.
func Expired(cert *x509.Certificate, now time.Time) bool { return now.After(cert.NotAfter) }

// PeerID reads the verified party from a connection's state; ok is false without a certificate.
func PeerID(state tls.ConnectionState) (ID, bool) {
	if len(state.PeerCertificates) == 0 {
		return ID{}, false
	}
	id, err := Of(state.PeerCertificates[0])
	return id, err == nil
}
