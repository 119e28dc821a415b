package uplink

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// identity holds the host's key and the credential that the control plane issued for it.
type identity struct {
	dir string
	key ed25519.PrivateKey

	mu      sync.Mutex // guards current
	current *credential
}

// credential holds a node certificate with its authority, the ids of the cluster and the node, and the members'
// addresses. It is immutable.
type credential struct {
	cert      *tls.Certificate
	authority *x509.Certificate
	cluster   string
	node      cloud.NodeID
	members   []string
}

// openIdentity loads the key, or makes one if there is none, and the credential if there is one.
func openIdentity(dir string) (*identity, error) {
	key, err := mtls.LoadOrMakeKey(filepath.Join(dir, keyFile))
	if err != nil {
		return nil, fmt.Errorf("node key: %w", err)
	}
	id := &identity{dir: dir, key: key}
	var c agentv1.Credential
	ok, err := load(dir, credentialFile, &c)
	if err != nil || !ok {
		return id, err
	}
	if id.current, err = id.parse(&c); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w", filepath.Join(dir, credentialFile), err)
	}
	return id, nil
}

// request returns a CSR for the host's key. The control plane ignores its subject.
func (id *identity) request() ([]byte, error) {
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, id.key)
	if err != nil {
		return nil, fmt.Errorf("make certificate request: %w", err)
	}
	return csr, nil
}

func (id *identity) credential() *credential {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.current
}

// verify returns the credential that the control plane has issued, or an error if it is not valid. If pin is not empty,
// it must be the fingerprint of the credential's authority.
func (id *identity) verify(c *agentv1.Credential, pin string) (*credential, error) {
	if pin != "" {
		if _, err := mtls.ParsePinned(c.GetAuthority(), pin); err != nil {
			return nil, err
		}
	}
	verified, err := id.parse(c)
	if err != nil {
		return nil, fmt.Errorf("the control plane issued an invalid certificate: %w", err)
	}
	return verified, nil
}

// accept verifies a credential from the control plane, like verify, and stores it.
func (id *identity) accept(c *agentv1.Credential, pin string) error {
	accepted, err := id.verify(c, pin)
	if err != nil {
		return err
	}
	if err := store(id.dir, credentialFile, c); err != nil {
		return err
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	id.current = accepted
	return nil
}

func (id *identity) parse(c *agentv1.Credential) (*credential, error) {
	leaf, err := x509.ParseCertificate(c.GetCertificate())
	if err != nil {
		return nil, fmt.Errorf("parse certificate: %w", err)
	}
	authority, err := x509.ParseCertificate(c.GetAuthority())
	if err != nil {
		return nil, fmt.Errorf("parse authority: %w", err)
	}
	if err := leaf.CheckSignatureFrom(authority); err != nil {
		return nil, fmt.Errorf("check certificate: %w", err)
	}
	if public, ok := leaf.PublicKey.(ed25519.PublicKey); !ok || !public.Equal(id.key.Public()) {
		return nil, errors.New("it is for another key")
	}
	subject, err := mtls.IDOf(leaf)
	if err != nil {
		return nil, err
	}
	if subject.Kind != mtls.Node || subject.Name != c.GetNodeId() {
		return nil, fmt.Errorf("it names %s, want node %s", subject, c.GetNodeId())
	}
	return &credential{
		cert:      &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: id.key, Leaf: leaf},
		authority: authority, cluster: subject.Cluster, node: cloud.NodeID(c.GetNodeId()), members: c.GetMembers(),
	}, nil
}

// expired reports whether the certificate has expired.
func (c *credential) expired(now time.Time) bool { return now.After(c.cert.Leaf.NotAfter) }

// renewAt returns the time at which half of the certificate's lifetime is over.
func (c *credential) renewAt() time.Time {
	leaf := c.cert.Leaf
	return leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 2)
}

// client returns the TLS configuration with which this host connects to a member of its cluster.
func (c *credential) client() *tls.Config { return c.clientReporting(func(string) {}) }

// clientReporting returns the same TLS configuration as client, with a callback. If the server's certificate was signed
// by another authority, the handshake fails, and the callback foreign is called with the cluster id in that
// certificate. The id is not verified, so it may only be used in messages.
func (c *credential) clientReporting(foreign func(cluster string)) *tls.Config {
	own := func() (*tls.Certificate, error) { return c.cert, nil }
	config := mtls.Client(own, c.authority, mtls.OnlyKind(mtls.Member))
	verify := config.VerifyConnection
	config.VerifyConnection = func(state tls.ConnectionState) error {
		err := verify(state)
		var unknown x509.UnknownAuthorityError
		if !errors.As(err, &unknown) {
			return err
		}
		if id, ok := mtls.PeerID(state); ok && id.Kind == mtls.Member {
			foreign(id.Cluster)
		}
		return err
	}
	return config
}

// matchesPin reports whether pin is the fingerprint of this credential's authority.
func (c *credential) matchesPin(pin string) bool { return mtls.Pin(c.authority) == pin }

// pinOf returns the fingerprint of the cluster's authority, which is the third part of a join token.
func pinOf(token string) (string, error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 || parts[0] == "" || parts[1] == "" || len(parts[2]) != 64 {
		return "", errors.New("the join token is not of the form that `trivet host token` prints")
	}
	return parts[2], nil
}
