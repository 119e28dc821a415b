package image

import (
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/images"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// publisher starts a server that takes the place of all publishers in the catalog, and returns a client that connects
// to this server whatever host a URL names. The content of each image is its URL. Each list of checksums has the format
// that its publisher uses.
func publisher(t *testing.T, all []entry) *http.Client {
	lists := map[string]string{}
	for _, e := range all {
		u, err := url.Parse(e.Checksums)
		require.NoError(t, err)
		file := path.Base(e.URL)
		at := u.Host + u.Path
		switch name := path.Base(u.Path); {
		case name == "SHA512SUMS":
			lists[at] += fmt.Sprintf("%x  %s\n", sha512.Sum512([]byte(e.URL)), file)
		case name == "SHA256SUMS":
			lists[at] += fmt.Sprintf("%x *%s\n", sha256.Sum256([]byte(e.URL)), file)
		case strings.HasSuffix(name, ".CHECKSUM"):
			lists[at] += fmt.Sprintf("# %s: 5 bytes\nSHA256 (%s) = %x\n", file, file, sha256.Sum256([]byte(e.URL)))
		default:
			lists[at] += fmt.Sprintf("%x  other-%s\n%x  %s\n", sha256.Sum256(nil), file, sha256.Sum256([]byte(e.URL)), file)
		}
	}
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		list, ok := lists[r.Host+r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, list)
	}))
	t.Cleanup(s.Close)
	client := s.Client()
	transport := client.Transport.(*http.Transport)
	transport.TLSClientConfig.ServerName = "example.com" // the name in the certificate of package httptest
	transport.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, s.Listener.Addr().String())
	}
	return client
}

// TestCatalog checks that the built-in catalog is valid, and that findChecksum finds the checksum of each image in a
// list of its publisher's format.
func TestCatalog(t *testing.T) {
	all, err := parseCatalog(images.Catalog)
	require.NoError(t, err)
	require.NotEmpty(t, all)
	client := publisher(t, all)
	for _, e := range all {
		f := importFlags{os: e.OS, arch: e.Architecture, format: "qcow2"}
		_, err := f.request(e.Name, e.URL)
		require.NoError(t, err, e.Name)
		key, sum, err := e.checksum(t.Context(), client)
		require.NoError(t, err, e.Name)
		want := fmt.Sprintf("%x", sha256.Sum256([]byte(e.URL)))
		if key == cloud.SourceSHA512 {
			want = fmt.Sprintf("%x", sha512.Sum512([]byte(e.URL)))
		}
		require.Equal(t, want, sum, e.Name)
	}
	missing := all[0]
	missing.URL += ".old"
	_, _, err = missing.checksum(t.Context(), client)
	require.ErrorContains(t, err, "has no checksum")
	missing.Checksums += ".old"
	_, _, err = missing.checksum(t.Context(), client)
	require.ErrorContains(t, err, "404")
}

func TestInvalidCatalogs(t *testing.T) {
	for text, says := range map[string]string{
		"images: [{name: a, url: 'http://h/a', checksums: 'https://h/b'}]":                                                           "not an https URL",
		"images: [{name: a, url: 'https://h/a'}]":                                                                                    "not an https URL",
		"images: [{name: A, url: 'https://h/a', checksums: 'https://h/b'}]":                                                          "name",
		"images: [{name: a, url: 'https://h/a', checksums: 'https://h/b'}, {name: a, url: 'https://h/a', checksums: 'https://h/b'}]": "twice",
		"images: [{name: a, link: x}]":                                                                                               "link",
		"[":                                                                                                                          "parse the catalog",
	} {
		_, err := parseCatalog([]byte(text))
		require.ErrorContains(t, err, says, text)
	}
}

func TestFindChecksum(t *testing.T) {
	long := strings.Repeat("ab", 64)
	for list, want := range map[string]string{
		"":                               "",
		long[:64] + "  disk.img":         long[:64],
		long[:64] + " *disk.img\r\n":     long[:64],
		long[:64] + "  ./disk.img":       long[:64],
		long + "  disk.img":              long,
		"SHA256 (disk.img) = " + long:    long,
		"MD5 (disk.img) = " + long[:32]:  "",
		long[:40] + "  disk.img":         "",
		long[:64] + "  disk.img.old":     "",
		long[:64] + "  other/disk.img\n": "",
	} {
		_, sum := findChecksum(list, "disk.img")
		require.Equal(t, want, sum, list)
	}
}
