package image

import (
	"bytes"
	"crypto/sha512"
	"crypto/x509"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/image/websource"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestWebSource imports an image from an https source. Sources with other bytes, of another format or on a refused
// address must end in ERROR with the reason.
func TestWebSource(t *testing.T) {
	data := noise(3 << 20)
	files := http.NewServeMux()
	serve := func(path string, data []byte) {
		files.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			http.ServeContent(w, r, "", time.Unix(1, 0), bytes.NewReader(data))
		})
	}
	serve("/disk.img", data)
	serve("/evil.vmdk", append([]byte("KDMV"), noise(1000)...))
	server := httptest.NewTLSServer(files)
	defer server.Close()
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	w := newWorld(t, 1)
	s := w.member(1)
	web := func(allow ...netip.Prefix) *websource.Client {
		return websource.New(websource.Options{Allow: allow, MaxBytes: 1 << 30, Roots: roots, Pause: time.Millisecond})
	}
	s.opts.Web = web(netip.MustParsePrefix("127.0.0.0/8"))
	stop := w.run(s)
	create := func(path string, metadata map[string]string) *cloud.Image {
		i := described(server.URL + path)
		i.Metadata = metadata
		made, err := s.Create(member(t), i, [32]byte{})
		require.NoError(t, err)
		require.Equal(t, cloud.ImagePending, made.Image.Status)
		return w.settled(made.Image.ID)
	}
	i := create("/disk.img", map[string]string{cloud.SourceSHA256: sumOf(data)})
	require.Equal(t, cloud.ImageAvailable, i.Status, i.Metadata)
	require.Equal(t, sumOf(data), i.SHA256)
	require.Equal(t, []string{sumOf(data)}, w.kept(1))
	long := sha512.Sum512(data)
	i = create("/disk.img", map[string]string{cloud.SourceSHA512: hex.EncodeToString(long[:])})
	require.Equal(t, cloud.ImageAvailable, i.Status, i.Metadata)
	i = create("/disk.img", map[string]string{cloud.SourceSHA512: strings.Repeat("0", 128)})
	require.Contains(t, i.Metadata[cloud.ImageReason], "its SHA-512 is not")
	for _, c := range []struct{ path, sum, says string }{
		{"/disk.img", sumOf(nil), "its SHA-256 is"},
		{"/evil.vmdk", "", "disk image refused"},
		{"/none", "", "the source cannot be fetched: the server answered 404"},
	} {
		i := create(c.path, map[string]string{cloud.SourceSHA256: c.sum})
		require.Equal(t, cloud.ImageError, i.Status, c.path)
		require.Contains(t, i.Metadata[cloud.ImageReason], c.says)
	}
	stop()
	s.opts.Web = web()
	w.run(s)
	i = create("/disk.img", nil)
	require.Equal(t, cloud.ImageError, i.Status)
	require.Contains(t, i.Metadata[cloud.ImageReason], "must not be fetched from")

	for _, url := range []string{"https:///x", "https://user@example.org/x"} {
		_, err := s.Create(member(t), described(url), [32]byte{})
		require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
	}
}

// TestSlowServers imports images from a server that sends nothing. They must not delay the import of another org, and
// the deletion of such an image must end its import.
func TestSlowServers(t *testing.T) {
	data := noise(1000)
	began, ended := make(chan string, 10), make(chan string, 10)
	files := http.NewServeMux()
	files.HandleFunc("/disk.img", func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "", time.Unix(1, 0), bytes.NewReader(data))
	})
	files.HandleFunc("/slow/", func(w http.ResponseWriter, r *http.Request) {
		began <- r.URL.Path
		w.Header().Set("Content-Length", "1000")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		ended <- r.URL.Path
	})
	server := httptest.NewTLSServer(files)
	defer server.Close()
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	w := newWorld(t, 1)
	s := w.member(1)
	s.opts.Web = websource.New(websource.Options{
		Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, MaxBytes: 1 << 30, Roots: roots, Stall: time.Hour,
	})
	stop := w.run(s)
	defer stop() // before the server is closed, which waits for the requests
	slow := map[string]cloud.ImageID{}
	for n := range maxFetches + 1 {
		path := "/slow/" + string(rune('a'+n))
		made, err := s.Create(member(t), described(server.URL+path), [32]byte{})
		require.NoError(t, err)
		slow[path] = made.Image.ID
	}
	running := []string{receive(t, began), receive(t, began)}
	other := described(server.URL + "/disk.img")
	other.Org = "other"
	made, err := s.Create(admin(t), other, [32]byte{})
	require.NoError(t, err)
	require.Equal(t, cloud.ImageAvailable, w.settled(made.Image.ID).Status)
	require.Empty(t, began, "an org has more imports than maxFetchesOf")

	require.NoError(t, s.Delete(member(t), "acme", slow[running[0]], [32]byte{}))
	require.Equal(t, running[0], receive(t, ended))
	require.NotContains(t, running, receive(t, began))
}

// receive returns the next value of a channel.
func receive(t *testing.T, from chan string) string {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(30 * time.Second):
		require.Fail(t, "nothing was received within 30 seconds")
		return ""
	}
}
