package image

import (
	"bytes"
	"compress/gzip"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/image/websource"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// hostileImages returns damaged images, and images that refer to the file secret. The keys of the map describe the
// images. No image may be accepted in any format.
func hostileImages(t *testing.T, secret string) map[string][]byte {
	be, le := binary.BigEndian, binary.LittleEndian
	name := func(b []byte, at int) { copy(b[at:], secret) }
	vmdk := func(edit func(string) string) []byte {
		b := bomb(t, 4)
		text := edit(string(bytes.TrimRight(b[512:1536], "\x00")))
		clear(b[512:1536])
		require.LessOrEqual(t, copy(b[512:1536], text), 1024)
		return b
	}
	vhd := qemuImage(t, "vpc")
	footer := vhd[len(vhd)-512:]
	be.PutUint32(footer[60:], 4) // a differencing disk
	be.PutUint32(footer[64:], 0)
	sum := uint32(0)
	for _, b := range footer {
		sum += uint32(b)
	}
	be.PutUint32(footer[64:], ^sum)
	vhdx := qemuImage(t, "vhdx")
	region := bytes.Index(vhdx, []byte("\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e"))
	require.Positive(t, region, "the entry of the metadata in the region table")
	metadata := vhdx[le.Uint64(vhdx[region+16:]):]
	le.PutUint32(metadata[le.Uint32(metadata[32+16:])+4:], 2) // the disk has a parent
	return map[string][]byte{
		"qcow2 with a backing file": blank(t, func(b []byte) {
			name(b, 1024)
			be.PutUint64(b[8:], 1024)
			be.PutUint32(b[16:], uint32(len(secret)))
		}),
		"qcow2 with a data file": blank(t, func(b []byte) {
			b[79] |= 4
			be.PutUint32(b[104:], 0x44415441)
			be.PutUint32(b[108:], uint32(len(secret)))
			name(b, 112)
		}),
		"qcow2 of 2^63 bytes": blank(t, func(b []byte) { be.PutUint64(b[24:], 1<<63) }),
		"qcow2 with a loop of tables": blank(t, func(b []byte) {
			l1 := be.Uint64(b[40:])
			for i := range uint64(2) {
				be.PutUint64(b[l1+i*8:], 1<<63|l1)
			}
		}),
		"qcow2, truncated": blank(t, nil)[:3<<16],
		"VMDK descriptor without data": []byte("# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n" +
			"createType=\"monolithicFlat\"\nRW 2048 FLAT \"" + secret + "\" 0\n"),
		"VMDK with a flat extent": vmdk(func(s string) string { return s + "RW 2048 FLAT \"" + secret + "\" 0\n" }),
		"VMDK with a parent": vmdk(func(s string) string {
			return strings.Replace(s, "parentCID=ffffffff", "parentCID=00000001\nparentFileNameHint=\""+secret+"\"", 1)
		}),
		"VMDK, truncated":    bomb(t, 4)[:2000],
		"VMDK of 2^63 bytes": append([]byte("KDMV\x01\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x40\x00"), make([]byte, 1024)...),
		"VHD with a parent":  vhd,
		"VHDX with a parent": vhdx,
		"an empty file":      {},
	}
}

// qemuImage returns an image that qemu-img made. Without qemu-img the test is skipped.
func qemuImage(t *testing.T, format string) []byte {
	t.Helper()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("qemu-img is not installed")
	}
	path := filepath.Join(t.TempDir(), format)
	out, err := exec.Command("qemu-img", "create", "-f", format, path, "8M").CombinedOutput()
	require.NoError(t, err, "%s", out)
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return data
}

// imageSource imports an image into a member, and returns its record when it is AVAILABLE or ERROR.
type imageSource func(t *testing.T, name string, data []byte, declared cloud.ImageFormat) *cloud.Image

// imageSources returns an imageSource for each kind of import, by the name of the kind.
func (w *world) imageSources(s *Service) map[string]imageSource {
	var mu sync.Mutex
	served := map[string][]byte{}
	server := httptest.NewTLSServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		mu.Lock()
		data := served[r.URL.Path]
		mu.Unlock()
		out.Header().Set("Content-Type", "application/octet-stream")
		http.ServeContent(out, r, "", time.Unix(1, 0), bytes.NewReader(data))
	}))
	w.t.Cleanup(server.Close)
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	s.opts.Web = websource.New(websource.Options{
		Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, MaxBytes: 1 << 30, Roots: roots, Pause: time.Millisecond,
	})
	create := func(t *testing.T, url string, declared cloud.ImageFormat) *cloud.Image {
		i := described(url)
		i.Format = declared
		made, err := s.Create(member(t), i, [32]byte{})
		require.NoError(t, err)
		return w.settled(made.Image.ID)
	}
	return map[string]imageSource{
		"file": func(t *testing.T, _ string, data []byte, declared cloud.ImageFormat) *cloud.Image {
			return create(t, w.write("image", data), declared)
		},
		"https": func(t *testing.T, name string, data []byte, declared cloud.ImageFormat) *cloud.Image {
			path := "/" + strings.ReplaceAll(name, " ", "-")
			mu.Lock()
			served[path] = data
			mu.Unlock()
			return create(t, server.URL+path, declared)
		},
		"upload": func(t *testing.T, _ string, data []byte, declared cloud.ImageFormat) *cloud.Image {
			i := described("")
			i.Format = declared
			u := begin(t, s, i)
			for n, p := range cut(data, MinPartBytes) {
				_, err := s.UploadPart(member(t), u, uint32(n+1), p)
				require.NoError(t, err)
			}
			if len(data) == 0 {
				_, err := s.AbortUpload(member(t), u, [32]byte{})
				require.NoError(t, err, "an upload without parts cannot be completed")
				return &cloud.Image{Status: cloud.ImageError, Metadata: map[string]string{cloud.ImageReason: "aborted"}}
			}
			done, err := s.CompleteUpload(member(t), u)
			require.NoError(t, err)
			return done
		},
	}
}

// TestHostileImages imports each hostile image from a file, from an https source and by an upload, declared as each
// format. Each import must end in ERROR with a reason that does not reveal the host, must leave no file, and must open
// no file of the host apart from the imported one and those in the member's image directory.
func TestHostileImages(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, bytes.Repeat([]byte("secret"), 1<<20), 0o600))
	hostile := hostileImages(t, secret)
	w := newWorld(t, 1)
	s := w.member(1)
	sources := w.imageSources(s)
	w.run(s)
	opened := watchOpens(t)
	for _, declared := range []cloud.ImageFormat{
		cloud.FormatUnspecified, cloud.FormatRaw, cloud.FormatQCOW2, cloud.FormatVMDK, cloud.FormatVHD,
	} {
		for name, data := range hostile {
			for from, bring := range sources {
				at := fmt.Sprintf("%s, declared %v, from %s", name, declared, from)
				i := bring(t, name, data, declared)
				require.Equal(t, cloud.ImageError, i.Status, at)
				require.NotEmpty(t, i.Metadata[cloud.ImageReason], at)
				require.NotContains(t, i.Metadata[cloud.ImageReason], "secret", at)
				require.NotContains(t, i.Metadata[cloud.ImageReason], "/", at)
				require.NotContains(t, i.Metadata[cloud.ImageReason], "the import failed", at)
				require.Empty(t, i.SHA256, at)
			}
		}
	}
	require.NoError(t, s.Settle(t.Context()))
	require.Eventually(t, func() bool {
		for _, name := range w.kept(1) {
			if strings.HasPrefix(name, partPrefix) {
				return false
			}
		}
		return true
	}, 30*time.Second, time.Millisecond, "unfinished files: %v", w.kept(1))
	w.age(1) // parts of uploads are removed after a while
	require.NoError(t, s.sweep(t.Context()))
	require.Empty(t, w.kept(1), "all disk space is given back")
	for path := range opened() {
		require.True(t, strings.HasPrefix(path, w.dirs[1]+"/") || path == w.dirs[1] || strings.HasPrefix(path, w.imports+"/") || path == w.imports,
			"the member opened %s", path)
	}
}

// TestHarmlessImages imports images that must stay as they are: a raw disk is never examined for other formats within
// it, and compressed data is never decompressed.
func TestHarmlessImages(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	sources := w.imageSources(s)
	w.run(s)
	inner := append(make([]byte, 1<<20), blank(t, func(b []byte) { b[79] |= 4 })...)
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, err := z.Write(make([]byte, 32<<20))
	require.NoError(t, err)
	require.NoError(t, z.Close())
	for name, data := range map[string][]byte{"qcow2 within a raw disk": inner, "gzip bomb": packed.Bytes()} {
		for from, bring := range sources {
			i := bring(t, name, data, cloud.FormatRaw)
			require.Equal(t, cloud.ImageAvailable, i.Status, "%s from %s: %v", name, from, i.Metadata)
			require.Equal(t, []any{cloud.FormatRaw, uint64(len(data)), sumOf(data)}, []any{i.Format, i.VirtualSize, i.SHA256}, "%s from %s", name, from)
		}
	}
}
