// Package certfile is a certificate and its key in two files that somebody else renews: a [Pair] shows what the files
// hold now, without a restart.
//
// It knows TLS and files; not which ports there are, nor who issues certificates. Decisions:
//
//   - The files are read again every few seconds, and at once when told to. What counts is what they hold, not when they
//     were written: it does not matter whether a renewer writes them in place, renames them or moves a link.
//   - They cannot be replaced at one moment. A new pair is used once both halves fit each other, are good now and for
//     servers, and the key is its owner's alone; until then, and if that never comes, the old pair goes on. What is wrong
//     is logged once, not at every look.
//   - A program starts with a pair that has expired, and says so: what else it does may matter more than its certificate.
//     In the place of another an expired pair is refused.
//   - Connections that stand keep the certificate that they began with.
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

// maxFile bounds what is read of a file, in bytes. A chain has a few KiB.
const maxFile = 1 << 20

// Options of a pair. All are required but where it says otherwise.
type Options struct {
	// Cert is the file with the certificate and those between it and its authority, Key that with its key, both in PEM.
	Cert, Key string
	Log       *slog.Logger
	// Now is time.Now unless set.
	Now func() time.Time
}

// Pair is a certificate with its key, as the files have it.
type Pair struct {
	opts    Options
	current atomic.Pointer[tls.Certificate]
	// Run alone has these: the sum of the files when they were last looked at, and when a warning was last given.
	seen   [sha256.Size]byte
	warned time.Time
}

// Open reads a pair. A pair that is not good now is logged, any other flaw is an error.
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
		return nil, p.named(err)
	}
	p.seen = sum(cert, key, nil)
	p.current.Store(c)
	p.warn()
	return p, nil
}

// Config is the configuration of a listener that shows the pair, from TLS 1.2 on. Protocols are offered to clients
// (ALPN); none are for gRPC, which adds its own.
func (p *Pair) Config(protocols ...string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: protocols,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current.Load(), nil },
	}
}

// Leaf is the certificate that is shown now.
func (p *Pair) Leaf() *x509.Certificate { return p.current.Load().Leaf }

// named says which files an error is about.
func (p *Pair) named(err error) error { return fmt.Errorf("%s, %s: %w", p.opts.Cert, p.opts.Key, err) }

// read gives what the files hold.
func (p *Pair) read() (cert, key []byte, err error) {
	if cert, err = readFile(p.opts.Cert, false); err != nil {
		return nil, nil, fmt.Errorf("read certificate: %w", err)
	}
	if key, err = readFile(p.opts.Key, true); err != nil {
		return nil, nil, fmt.Errorf("read key of the certificate: %w", err)
	}
	return cert, key, nil
}

// readFile reads a file, of which the descriptor is asked who may read it.
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

// sum tells one state of the files from another. A failure to read them is a state as well.
func sum(cert, key []byte, err error) [sha256.Size]byte {
	text := ""
	if err != nil {
		text = err.Error()
	}
	a, b := sha256.Sum256(cert), sha256.Sum256(key)
	return sha256.Sum256(slices.Concat(a[:], b[:], []byte(text)))
}

// parse checks what does not depend on the time: that the halves belong together, and that clients could accept them.
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

// dated says whether a certificate is good at a time.
func dated(leaf *x509.Certificate, now time.Time) error {
	switch {
	case now.Before(leaf.NotBefore):
		return fmt.Errorf("the certificate is not good before %s", leaf.NotBefore.Format(time.RFC3339))
	case now.After(leaf.NotAfter):
		return fmt.Errorf("the certificate has expired on %s", leaf.NotAfter.Format(time.RFC3339))
	}
	return nil
}
