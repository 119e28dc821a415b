package mtls

import (
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"time"
)

// The authority's certificate has fixed validity dates, so that every member derives the same bytes from the same key.
var (
	authorityFrom  = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	authorityUntil = time.Date(2126, 1, 1, 0, 0, 0, 0, time.UTC)
)

// backdate is how long before its issue a certificate becomes valid. A party whose clock is behind by less than this
// can still connect, and receives an error that its clock is wrong.
const backdate = time.Hour

// Authority is the certificate authority of one cluster: its name, private key and certificate.
type Authority struct {
	cluster string
	key     ed25519.PrivateKey
	cert    *x509.Certificate
}

// NewAuthority derives the authority of a cluster from a 32-byte seed. The same seed gives the same certificate.
func NewAuthority(cluster string, seed []byte) (*Authority, error) {
	if len(seed) != ed25519.SeedSize {
		return nil, fmt.Errorf("authority seed is %d bytes, want %d", len(seed), ed25519.SeedSize)
	}
	key := ed25519.NewKeyFromSeed(seed)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "Trivet cluster " + cluster},
		NotBefore:             authorityFrom,
		NotAfter:              authorityUntil,
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign,
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: cluster}},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("sign authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("parse authority: %w", err)
	}
	return &Authority{cluster: cluster, key: key, cert: cert}, nil
}

// Certificate returns the authority's self-signed certificate, with which clients and servers verify the certificates
// that it signed.
func (a *Authority) Certificate() *x509.Certificate { return a.cert }

// Cluster returns the ID of the cluster whose authority this is.
func (a *Authority) Cluster() string { return a.cluster }

// Issue signs a certificate for the public key of a member or node. The certificate is valid from now-backdate to
// now+lifetime. A member's certificate can be used by servers and clients, a node's only by clients.
func (a *Authority) Issue(kind Kind, name string, public crypto.PublicKey, now time.Time, lifetime time.Duration) (*x509.Certificate, error) {
	usages := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	switch kind {
	case Member:
		usages = append(usages, x509.ExtKeyUsageServerAuth)
	case Node:
	default:
		return nil, fmt.Errorf("certificates of kind %q are not issued by name", kind)
	}
	return a.sign(ID{a.cluster, kind, name}, &x509.Certificate{ExtKeyUsage: usages}, public, now, lifetime)
}

// sign completes the template with a serial number, the validity, the key usage and the URI, and signs the certificate.
func (a *Authority) sign(id ID, template *x509.Certificate, public crypto.PublicKey, now time.Time, lifetime time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("draw serial: %w", err)
	}
	template.SerialNumber = serial
	template.NotBefore, template.NotAfter = now.Add(-backdate), now.Add(lifetime)
	template.BasicConstraintsValid, template.KeyUsage = true, x509.KeyUsageDigitalSignature
	template.URIs = []*url.URL{id.uri()}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, public, a.key)
	if err != nil {
		return nil, fmt.Errorf("sign certificate of %s %s: %w", id.Kind, id.Name, err)
	}
	return x509.ParseCertificate(der)
}

// IssueFor generates an Ed25519 key. It returns the key with a certificate that was made by Issue.
func (a *Authority) IssueFor(kind Kind, name string, now time.Time, lifetime time.Duration) (*tls.Certificate, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	leaf, err := a.Issue(kind, name, public, now, lifetime)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: private, Leaf: leaf}, nil
}

// Pin returns the fingerprint of an authority's certificate: the SHA-256 of its public key in hex. Join tokens contain
// it.
func Pin(authority *x509.Certificate) string {
	sum := sha256.Sum256(authority.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// ParsePinned parses an authority's certificate (DER). It returns an error if the fingerprint of the certificate (see
// Pin) does not equal pin.
func ParsePinned(der []byte, pin string) (*x509.Certificate, error) {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("parse authority: %w", err)
	}
	if Pin(cert) != pin {
		return nil, errors.New("the control plane has another certificate authority than the join token names")
	}
	if _, err := clusterOf(cert); err != nil {
		return nil, err
	}
	return cert, nil
}

// ClientPinned returns the TLS configuration of a client that knows only the fingerprint of the authority, from a join
// token. The server must present a member's certificate, followed by the certificate of the authority with this
// fingerprint.
func ClientPinned(pin string) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // VerifyConnection verifies the chain against the pin
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) != 2 {
				return errors.New("the control plane sent no certificate authority with its certificate")
			}
			authority, err := ParsePinned(state.PeerCertificates[1].Raw, pin)
			if err != nil {
				return err
			}
			leafOnly := state
			leafOnly.PeerCertificates = state.PeerCertificates[:1]
			return baseConfig(authority, x509.ExtKeyUsageServerAuth, OnlyKind(Member), 0).VerifyConnection(leafOnly)
		},
	}
}

// WithAuthority returns a copy of the certificate leaf with the authority's certificate added to the chain. Clients
// that know only the authority's fingerprint require this (see ClientPinned).
func WithAuthority(leaf *tls.Certificate, authority *x509.Certificate) *tls.Certificate {
	c := *leaf
	c.Certificate = [][]byte{leaf.Certificate[0], authority.Raw}
	return &c
}

func clusterOf(authority *x509.Certificate) (string, error) {
	if !authority.IsCA || len(authority.URIs) != 1 || authority.URIs[0].Host == "" {
		return "", errors.New("not the certificate of a Trivet authority")
	}
	return authority.URIs[0].Host, nil
}
