package websource

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// serve starts a TLS server on loopback, and returns its URL and a client that may connect to it.
func serve(t *testing.T, h http.HandlerFunc) (string, Options) {
	t.Helper()
	s := httptest.NewTLSServer(h)
	t.Cleanup(s.Close)
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	return s.URL, Options{
		Allow: prefixes("127.0.0.0/8"), MaxBytes: 1 << 20, Roots: roots, Stall: 10 * time.Second, Pause: time.Millisecond,
	}
}

func read(t *testing.T, c *Client, url string) ([]byte, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b, err := c.Open(ctx, url)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	got, err := io.ReadAll(b)
	if err == nil {
		require.EqualValues(t, len(got), b.Size())
	}
	return got, err
}

func file(data []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"v1"`)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
	}
}

func random(n int) []byte { b := make([]byte, n); rand.Read(b); return b }

// TestAddresses checks which addresses a client connects to.
func TestAddresses(t *testing.T) {
	c := New(Options{})
	for _, a := range []string{
		"127.0.0.1", "127.255.0.9", "::1", "0.0.0.0", "::", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "fe80::1", "fd00:ec2::254",
		"100.64.0.1", "224.0.0.1", "ff02::1", "255.255.255.255", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::a00:1", "2002:a00:1::",
		"2001::1", "192.0.0.192", "198.18.0.1", "240.0.0.1", "0.1.2.3", "fe80::1%eth0", "fec0::1",
	} {
		require.False(t, c.permits(netip.MustParseAddr(a)), a)
	}
	for _, a := range []string{"8.8.8.8", "151.101.2.132", "2a04:4e42::644", "::ffff:8.8.8.8", "172.32.0.1", "100.128.0.1"} {
		require.True(t, c.permits(netip.MustParseAddr(a)), a)
	}
	c = New(Options{Allow: prefixes("10.0.0.0/8", "fd00::/8")})
	require.True(t, c.permits(netip.MustParseAddr("10.1.2.3")))
	require.True(t, c.permits(netip.MustParseAddr("::ffff:10.1.2.3")))
	require.True(t, c.permits(netip.MustParseAddr("fd00:ec2::254")))
	require.False(t, c.permits(netip.MustParseAddr("192.168.1.1")))
}

// TestRefusedAddress checks that a client refuses a server on loopback, which is named by its address, by a host name
// and in a redirect. The server must receive no request.
func TestRefusedAddress(t *testing.T) {
	var requests atomic.Int32
	url, opts := serve(t, func(http.ResponseWriter, *http.Request) { requests.Add(1) })
	port := url[strings.LastIndex(url, ":"):]
	opts.Allow = nil
	for _, u := range []string{url, "https://localhost" + port, "https://[::ffff:127.0.0.1]" + port, "https://2130706433" + port} {
		_, err := read(t, New(opts), u+"/disk.img")
		require.Error(t, err)
		var fatal *Error
		require.ErrorAs(t, err, &fatal, u)
		require.NotContains(t, err.Error(), "127.0.0.1")
	}
	require.Zero(t, requests.Load(), "a refused address got a request")

	// The client may connect to the first server, which is on 127.0.0.1, but not to the address of the redirect.
	moved, movedOpts := serve(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "https://127.0.0.2"+port, http.StatusFound)
	})
	movedOpts.Allow = prefixes("127.0.0.1/32")
	_, err := read(t, New(movedOpts), moved)
	require.ErrorContains(t, err, "must not be fetched from")
	require.Zero(t, requests.Load())
}

// TestRefusals checks which responses a client refuses.
func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		says   string
	}{
		"not found":  {http.NotFound, "404"},
		"too long":   {file(make([]byte, 1<<20+1)), "larger than 1048576"},
		"endless":    {func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush(); w.Write(make([]byte, 100)) }, "how long"},
		"plain http": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "http://"+r.Host, http.StatusFound) }, "only https"},
		"a password": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://a:b@"+r.Host, http.StatusFound)
		}, "user name"},
		"redirects for ever": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path+"a", http.StatusFound) }, "redirects"},
		"gzip": {func(w http.ResponseWriter, _ *http.Request) {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			z.Write(make([]byte, 1<<20))
			z.Close()
			w.Header().Set("Content-Encoding", "gzip")
			w.Write(b.Bytes())
		}, "compressed"},
		"overloaded":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, "cannot be reached"},
		"another part": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusPartialContent) }, "not asked for"},
	} {
		url, opts := serve(t, c.answer)
		_, err := read(t, New(opts), url+"/x")
		var fatal *Error
		require.ErrorAs(t, err, &fatal, name)
		require.ErrorContains(t, err, c.says, name)
	}
	for _, url := range []string{"http://example.org/x", "ftp://example.org", "https:///x", "https://a@example.org/", "%zz"} {
		_, err := read(t, New(Options{MaxBytes: 1}), url)
		var fatal *Error
		require.ErrorAs(t, err, &fatal, url)
	}
	url, opts := serve(t, file([]byte("x")))
	opts.Roots = x509.NewCertPool()
	_, err := read(t, New(opts), url)
	require.ErrorContains(t, err, "certificate")
}

// broken serves data, and breaks each of the first connections after some bytes.
func broken(data []byte, times int32, change func(http.Header)) http.HandlerFunc {
	var calls atomic.Int32
	return func(w http.ResponseWriter, r *http.Request) {
		n := calls.Add(1)
		if n > 1 && change != nil {
			change(w.Header())
		}
		if w.Header().Get("ETag") == "" {
			w.Header().Set("ETag", `"v1"`)
		}
		if n <= times {
			w = &cut{w, len(data) / 10}
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
	}
}

// cut breaks the connection after left bytes.
type cut struct {
	http.ResponseWriter
	left int
}

func (c *cut) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p[:min(len(p), c.left)])
	if c.left -= n; c.left <= 0 {
		c.ResponseWriter.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	return n, err
}

// TestResume breaks the connection several times. The body must be complete, and the server must not send bytes twice.
func TestResume(t *testing.T) {
	data := random(1 << 20)
	url, opts := serve(t, broken(data, 7, nil))
	got, err := read(t, New(opts), url)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))

	url, opts = serve(t, broken(data, 2, func(h http.Header) { h.Set("ETag", `"v2"`) }))
	_, err = read(t, New(opts), url)
	require.ErrorContains(t, err, "changed")

	// A server that does not know ranges cannot continue.
	url, opts = serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(data)))
		w.Header().Set("ETag", `"v1"`)
		c := &cut{w, 1000}
		c.Write(data)
	})
	_, err = read(t, New(opts), url)
	require.ErrorContains(t, err, "cannot continue")
}

// TestStall checks that the client continues a download on another connection when the server stops sending.
func TestStall(t *testing.T) {
	data := random(1000)
	var calls atomic.Int32
	ended := make(chan struct{})
	url, opts := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"v1"`)
		if calls.Add(1) == 1 {
			w.Header().Set("Content-Length", "1000")
			w.Write(data[:500])
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
			case <-ended:
			}
			return
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
	})
	defer close(ended)
	opts.Stall = 50 * time.Millisecond
	got, err := read(t, New(opts), url)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
}

// TestEndsWithContext checks that a download ends with its context.
func TestEndsWithContext(t *testing.T) {
	url, opts := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(t.Context())
	b, err := New(opts).Open(ctx, url)
	require.NoError(t, err)
	defer b.Close()
	time.AfterFunc(10*time.Millisecond, cancel)
	_, err = io.ReadAll(b)
	require.ErrorIs(t, err, context.Canceled)
}

// TestResumeWithoutVersion breaks the connection to servers that would continue a download with the bytes of another
// version of the file: one that ignores If-Range, and one that names no version.
func TestResumeWithoutVersion(t *testing.T) {
	versions := [][]byte{random(1 << 20), random(1 << 20)}
	for _, c := range []struct{ tag, says string }{{"ETag", "changed"}, {"Last-Modified", "changed"}, {"", "names no version"}} {
		var calls atomic.Int32
		url, opts := serve(t, func(w http.ResponseWriter, r *http.Request) {
			n := calls.Add(1)
			r.Header.Del("If-Range")
			data := versions[min(n, 2)-1]
			switch c.tag {
			case "ETag":
				w.Header().Set("ETag", fmt.Sprintf(`"v%d"`, n))
			case "Last-Modified":
				w.Header().Set("Last-Modified", time.Unix(int64(n), 0).UTC().Format(http.TimeFormat))
			}
			if n == 1 {
				w = &cut{w, len(data) / 10}
			}
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
		})
		_, err := read(t, New(opts), url)
		require.ErrorContains(t, err, c.says, c.tag)
	}
}
