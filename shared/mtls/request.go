package mtls

import (
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// MaxRequest is the maximum size of a certificate request, in bytes.
const MaxRequest = 8 << 10

// ParseRequest parses a certificate request (DER) and verifies that the sender holds the private key. It accepts only
// Ed25519 and ECDSA keys, because unauthenticated clients may send requests and these keys are cheap to verify. The
// subject is ignored. key is the result of KeyOf for the public key.
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

// KeyOf returns the identifier of a public key: SHA-256 of its SubjectPublicKeyInfo.
func KeyOf(public any) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return nil, fmt.Errorf("has a key of an unknown kind: %w", err)
	}
	sum := sha256.Sum256(der)
	return sum[:], nil
}

// Issued returns the time at which an Authority signed a certificate: NotBefore plus backdate, in whole seconds.
func Issued(cert *x509.Certificate) time.Time { return cert.NotBefore.Add(backdate) }
