package certfile

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

var began = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// fixture is a Pair with its two files, a settable clock and a log buffer.
type fixture struct {
	t         *testing.T
	cert, key string
	now       time.Time
	log       logBuffer
	serial    int64
	pair      *Pair
}

type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// drain returns the log output since the last call of drain.
func (l *logBuffer) drain() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.text.Reset()
	return l.text.String()
}

func newFixture(t *testing.T) *fixture {
	dir := t.TempDir()
	return &fixture{t: t, cert: filepath.Join(dir, "tls.crt"), key: filepath.Join(dir, "tls.key"), now: began}
}

// issue returns a new self-signed certificate, valid for 90 days from d.now unless change modifies it, and its key.
func (d *fixture) issue(change ...func(*x509.Certificate)) (cert, key string) {
	d.serial++
	template := &x509.Certificate{
		SerialNumber: big.NewInt(d.serial), NotBefore: d.now.Add(-time.Hour), NotAfter: d.now.Add(90 * 24 * time.Hour),
		Subject: pkix.Name{CommonName: "cloud"}, DNSNames: []string{"cloud.example.org"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, f := range change {
		f(template)
	}
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(d.t, err)
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	require.NoError(d.t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(d.t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}

func (d *fixture) write(path, text string) {
	require.NoError(d.t, os.WriteFile(path+".new", []byte(text), 0o600))
	require.NoError(d.t, os.Rename(path+".new", path))
}

func (d *fixture) open() error {
	var err error
	d.pair, err = Open(Options{Cert: d.cert, Key: d.key, Log: slog.New(slog.NewTextHandler(&d.log, nil)), Now: func() time.Time { return d.now }})
	return err
}

// openFixture returns a fixture whose Pair has loaded a valid certificate with serial number 1.
func openFixture(t *testing.T) *fixture {
	d := newFixture(t)
	cert, key := d.issue()
	d.write(d.cert, cert)
	d.write(d.key, key)
	require.NoError(t, d.open())
	require.Empty(t, d.log.drain())
	return d
}

// shift writes a certificate whose validity period is moved by a duration, and makes the Pair read it.
func (d *fixture) shift(by time.Duration) {
	cert, key := d.issue(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(by), c.NotAfter.Add(by) })
	d.write(d.cert, cert)
	d.write(d.key, key)
	d.pair.look()
}

// servedSerial returns the serial number of the certificate that a client gets from a TLS server with the Pair.
func (d *fixture) servedSerial() int64 {
	here, there := net.Pipe()
	defer here.Close()
	done := make(chan struct{})
	go func() { defer close(done); defer there.Close(); _ = tls.Server(there, d.pair.Config()).Handshake() }()
	c := tls.Client(here, &tls.Config{InsecureSkipVerify: true})
	require.NoError(d.t, c.Handshake())
	serial := c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	_ = here.Close()
	<-done
	return serial
}

func TestReplacedOneFileAtATime(t *testing.T) {
	for _, certFirst := range []bool{true, false} {
		d := openFixture(t)
		require.EqualValues(t, 1, d.servedSerial())
		cert, key := d.issue()
		halves := [][2]string{{d.cert, cert}, {d.key, key}}
		if !certFirst {
			halves[0], halves[1] = halves[1], halves[0]
		}
		d.write(halves[0][0], halves[0][1])
		d.pair.look()
		require.EqualValues(t, 1, d.servedSerial(), "a new certificate without its key, or the reverse, is not used")
		require.Contains(t, d.log.drain(), "the previous one stays in use")
		d.pair.look()
		require.Empty(t, d.log.drain(), "the error is logged once")
		d.write(halves[1][0], halves[1][1])
		d.pair.look()
		require.EqualValues(t, 2, d.servedSerial())
		require.Contains(t, d.log.drain(), "using a certificate")
		d.pair.look()
		require.Empty(t, d.log.drain())
	}
}

// TestInvalidPairsAreRefused checks that Open refuses an invalid pair with the reason. If the files become invalid
// later, the reason must be logged, without the key, and the previous pair must stay in use.
func TestInvalidPairsAreRefused(t *testing.T) {
	usage := func(u ...x509.ExtKeyUsage) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.ExtKeyUsage = u }
	}
	for says, spoil := range map[string]func(d *fixture){
		"read certificate: open":            func(d *fixture) { require.NoError(d.t, os.Remove(d.cert)) },
		"read key of the certificate: open": func(d *fixture) { require.NoError(d.t, os.Remove(d.key)) },
		"is not a file": func(d *fixture) {
			require.NoError(d.t, os.Remove(d.cert))
			require.NoError(d.t, os.Mkdir(d.cert, 0o700))
		},
		"chmod 600":              func(d *fixture) { require.NoError(d.t, os.Chmod(d.key, 0o640)) },
		"find any PEM data":      func(d *fixture) { d.write(d.cert, "") },
		"malformed certificate":  func(d *fixture) { d.write(d.cert, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n") },
		"in key input":           func(d *fixture) { d.write(d.key, "half a k") },
		"does not match":         func(d *fixture) { _, key := d.issue(); d.write(d.key, key) },
		"longer than":            func(d *fixture) { d.write(d.cert, strings.Repeat("#", maxFile+1)) },
		"belongs into the other": func(d *fixture) { cert, key := d.issue(); d.write(d.cert, cert+key); d.write(d.key, key) },
		"names no host": func(d *fixture) {
			cert, key := d.issue(func(c *x509.Certificate) { c.DNSNames = nil })
			d.write(d.cert, cert)
			d.write(d.key, key)
		},
		"not for servers": func(d *fixture) {
			cert, key := d.issue(usage(x509.ExtKeyUsageClientAuth))
			d.write(d.cert, cert)
			d.write(d.key, key)
		},
	} {
		t.Run(says, func(t *testing.T) {
			d := openFixture(t)
			spoil(d)
			d.pair.look()
			require.EqualValues(t, 1, d.servedSerial())
			output := d.log.drain()
			require.Contains(t, output, says)
			require.NotContains(t, output, "BEGIN")
			require.ErrorContains(t, d.open(), says)

			// Open accepts a certificate without extended key usages.
			require.NoError(t, os.RemoveAll(d.cert))
			cert, key := d.issue(usage())
			d.write(d.cert, cert)
			d.write(d.key, key)
			require.NoError(t, d.open())
		})
	}
}

func TestExpiryIsLogged(t *testing.T) {
	d := openFixture(t)
	day := 24 * time.Hour
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(d.pair)
	families, err := registry.Gather()
	require.NoError(t, err)
	require.Equal(t, float64(began.Add(90*day).Unix()), families[0].GetMetric()[0].GetGauge().GetValue())

	d.now = began.Add(75 * day)
	d.pair.look()
	require.Empty(t, d.log.drain())
	d.now = began.Add(77 * day)
	d.pair.look()
	require.Contains(t, d.log.drain(), "about to expire")
	d.pair.look()
	require.Empty(t, d.log.drain(), "the warning is not repeated at each check")
	d.now = d.now.Add(13 * time.Hour)
	d.pair.look()
	require.Contains(t, d.log.drain(), "about to expire")
	d.now = began.Add(91 * day)
	d.pair.look()
	require.Contains(t, d.log.drain(), "has expired")
	require.EqualValues(t, 1, d.servedSerial(), "an expired certificate stays in use if there is no other")
	require.NoError(t, d.open(), "a member can start with an expired certificate")
	require.Contains(t, d.log.drain(), "has expired")

	// A certificate that has expired, or is not valid yet, does not replace another.
	for says, shift := range map[string]time.Duration{"has expired": -100 * day, "is not valid before": 100 * day} {
		d.shift(shift)
		require.Contains(t, d.log.drain(), says)
		require.EqualValues(t, 1, d.servedSerial())
	}
	cert, key := d.issue(func(c *x509.Certificate) { c.NotAfter = d.now.Add(10 * time.Hour) })
	d.write(d.cert, cert)
	d.write(d.key, key)
	d.pair.look()
	output := d.log.drain()
	require.Contains(t, output, "using a certificate")
	require.NotContains(t, output, "about to expire", "a new certificate with a short validity period causes no warning")
	d.now = d.now.Add(9 * time.Hour)
	d.pair.look()
	require.Contains(t, d.log.drain(), "about to expire")
}

// TestSignalReloads checks that a signal makes Run reload the files at once, and that an established connection
// continues with the old certificate.
func TestSignalReloads(t *testing.T) {
	d := openFixture(t)
	hurry := make(chan os.Signal) // unbuffered: the second signal is received after the first was handled
	ctx, done := t.Context(), make(chan struct{})
	go func() { defer close(done); d.pair.Run(ctx, hurry) }()
	t.Cleanup(func() { <-done })

	here, there := net.Pipe()
	defer here.Close()
	go func() {
		s := tls.Server(there, d.pair.Config("http/1.1"))
		_, _ = io.Copy(s, s)
	}()
	c := tls.Client(here, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
	echo := func() {
		_, err := c.Write([]byte("x"))
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 1))
		require.NoError(t, err)
	}
	echo()
	require.Equal(t, "http/1.1", c.ConnectionState().NegotiatedProtocol)
	cert, key := d.issue()
	d.write(d.cert, cert)
	d.write(d.key, key)
	hurry <- syscall.SIGHUP
	hurry <- syscall.SIGHUP
	require.EqualValues(t, 2, d.servedSerial())
	echo()
}

func TestOldVersionsAreRefused(t *testing.T) {
	d := openFixture(t)
	for version, works := range map[uint16]bool{tls.VersionTLS11: false, tls.VersionTLS12: true, tls.VersionTLS13: true} {
		here, there := net.Pipe()
		done := make(chan struct{})
		go func() { defer close(done); defer there.Close(); _ = tls.Server(there, d.pair.Config()).Handshake() }()
		err := tls.Client(here, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: version}).Handshake()
		require.Equal(t, works, err == nil, "%x: %v", version, err)
		here.Close()
		<-done
	}
}
