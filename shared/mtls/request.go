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

// ParseRequest parses a certificate request (DER) and verifies that the sender has the private key. It accepts only
// Ed25519 and ECDSA keys: anyone may send requests, and signatures with these keys are cheap to verify. The subject of
// the request is ignored. The result key is the SHA-256 of the public key, as returned by KeyOf.
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

// KeyOf returns the identifier of a public key, which is the SHA-256 of its SubjectPublicKeyInfo.
func KeyOf(public any) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return nil, fmt.Errorf("has a key of an unknown kind: %w", err)
	}
	sum := sha256.Sum256(der)
	return sum[:], nil
}

// Issued returns the time at which an Authority signed a certificate. It is the certificate's NotBefore plus backdate,
// and is in whole seconds.
func Issued(cert *x509.Certificate) time.Time { return cert.NotBefore.Add(backdate) }
