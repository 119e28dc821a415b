// Package certfile loads a TLS certificate and its key from two files that an external tool renews. Servers that use a
// [Pair] get the renewed certificate without a restart.
//
// Decisions:
//
//   - The files are polled every few seconds, and read at once on a signal. A change is recognized by the content and
//     not by the modification time, because tools may write in place, rename files or move a symbolic link.
//   - Two files cannot be replaced atomically. So a new pair is used only when key and certificate match, the
//     certificate is valid now and for servers, and only the owner of the key file can read it. Until then the old pair
//     is used. An error is logged once, not at every poll.
//   - A program starts even with an expired certificate, and logs an error, because its other functions may matter more
//     than the certificate. An expired certificate never replaces the one in use.
//   - A connection keeps the certificate with which it was established.
//
// The package uses TLS and files. It must not depend on listeners or on the issuer of the certificates.
package certfile

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"
	"time"
)

// maxFile is the maximum size in bytes of the certificate file and of the key file. A certificate chain has a few KiB.
const maxFile = 1 << 20

// Options has the arguments of Open. Cert, Key and Log are required.
type Options struct {
	// Cert is the path of the certificate with its intermediates. Key is the path of its private key. Both files are
	// PEM.
	Cert, Key string
	Log       *slog.Logger
	// Now returns the current time; default: time.Now.
	Now func() time.Time
}

// Pair holds the certificate and its key that TLS servers use now. They were last loaded from the two files.
type Pair struct {
	opts    Options
	current atomic.Pointer[tls.Certificate]
	// seen and warned need no lock, because only Open and then only Run use them. seen is the hash of the files when
	// they were last read. warned is the time of the last warning about expiry.
	seen   [sha256.Size]byte
	warned time.Time
}

// Open loads a certificate and its key. If the certificate is expired or not yet valid, Open logs that and still
// returns the pair. For any other defect it returns an error.
func Open(opts Options) (*Pair, error) {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	p := &Pair{opts: opts}
	cert, key, err := p.read()
	if err != nil {
		return nil, err
	}
	c, err := parse(cert, key)
	if err != nil {
		return nil, p.withPaths(err)
	}
	p.seen = sum(cert, key, nil)
	p.current.Store(c)
	p.warn()
	return p, nil
}

// Config returns the TLS configuration of a server that always uses the newest loaded certificate. It allows TLS 1.2
// and later, and offers the given protocols by ALPN. For gRPC pass no protocols, because gRPC adds its own.
func (p *Pair) Config(protocols ...string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: protocols,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current.Load(), nil },
	}
}

// Leaf returns the certificate that servers use now, without its intermediates.
func (p *Pair) Leaf() *x509.Certificate { return p.current.Load().Leaf }

// withPaths wraps err so that its message names the certificate file and the key file.
func (p *Pair) withPaths(err error) error {
	return fmt.Errorf("%s, %s: %w", p.opts.Cert, p.opts.Key, err)
}

// read returns the content of the certificate file and of the key file.
func (p *Pair) read() (cert, key []byte, err error) {
	if cert, err = readFile(p.opts.Cert, false); err != nil {
		return nil, nil, fmt.Errorf("read certificate: %w", err)
	}
	if key, err = readFile(p.opts.Key, true); err != nil {
		return nil, nil, fmt.Errorf("read key of the certificate: %w", err)
	}
	return cert, key, nil
}

// readFile reads a regular file of at most maxFile bytes. If secret is true, it returns an error if the file's group or
// others have any permission. The check uses the open file descriptor, so the file cannot be replaced between the check
// and the reading.
func readFile(path string, secret bool) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file", path)
	}
	if secret && info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s can be read by others (mode %04o): chmod 600 it", path, info.Mode().Perm())
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("%s is longer than %d bytes", path, maxFile)
	}
	return text, err
}

// sum returns a hash of the content of both files and of the error of reading them. If the hash differs from the
// previous one, a file has changed.
func sum(cert, key []byte, err error) [sha256.Size]byte {
	text := ""
	if err != nil {
		text = err.Error()
	}
	a, b := sha256.Sum256(cert), sha256.Sum256(key)
	return sha256.Sum256(slices.Concat(a[:], b[:], []byte(text)))
}

// parse checks that the key belongs to the certificate, that the certificate names a host, and that servers may use it.
// It does not check the validity period.
func parse(cert, key []byte) (*tls.Certificate, error) {
	if bytes.Contains(cert, []byte("PRIVATE KEY")) {
		return nil, errors.New("the certificate's file holds a private key, which belongs into the other")
	}
	c, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	leaf := c.Leaf
	if len(leaf.DNSNames)+len(leaf.IPAddresses) == 0 {
		return nil, errors.New("the certificate names no host: clients want a subjectAltName")
	}
	uses := leaf.ExtKeyUsage
	if len(uses)+len(leaf.UnknownExtKeyUsage) > 0 && !slices.Contains(uses, x509.ExtKeyUsageServerAuth) && !slices.Contains(uses, x509.ExtKeyUsageAny) {
		return nil, errors.New("the certificate is not for servers: its extendedKeyUsage has no serverAuth")
	}
	return &c, nil
}

// checkValidity returns an error if now is outside the validity period of the certificate.
func checkValidity(leaf *x509.Certificate, now time.Time) error {
	switch {
	case now.Before(leaf.NotBefore):
		return fmt.Errorf("the certificate is not valid before %s", leaf.NotBefore.Format(time.RFC3339))
	case now.After(leaf.NotAfter):
		return fmt.Errorf("the certificate has expired on %s", leaf.NotAfter.Format(time.RFC3339))
	}
	return nil
}
