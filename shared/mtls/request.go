package mtls

import (
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// MaxRequest is the limit of a certificate request in bytes.
const MaxRequest = 8 << 10

// ParseRequest reads a certificate request (DER) and proves that its sender holds the key, which is of Ed25519 or ECDSA:
// what anybody may send is cheap to check. Its subject is ignored. key is what KeyOf says of the public key.
func ParseRequest(der []byte) (csr *x509.CertificateRequest, key []byte, err error) {
	if len(der) > MaxRequest {
		return nil, nil, fmt.Errorf("at most %d bytes", MaxRequest)
	}
	if csr, err = x509.ParseCertificateRequest(der); err != nil {
		return nil, nil, fmt.Errorf("is not a certificate request: %w", err)
	}
	if csr.PublicKeyAlgorithm != x509.Ed25519 && csr.PublicKeyAlgorithm != x509.ECDSA {
		return nil, nil, errors.New("the key must be of Ed25519 or ECDSA")
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, nil, fmt.Errorf("is not signed by its own key: %w", err)
	}
	key, err = KeyOf(csr.PublicKey)
	return csr, key, err
}

// KeyOf is by what a public key is known: SHA-256 of its SubjectPublicKeyInfo.
func KeyOf(public any) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return nil, fmt.Errorf("has a key of an unknown kind: %w", err)
	}
	sum := sha256.Sum256(der)
	return sum[:], nil
}

// Issued is when a certificate was signed, to the second.
func Issued(cert *x509.Certificate) time.Time { return cert.NotBefore.Add(backdate) }
