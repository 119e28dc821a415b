package disk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// source supplies images to the cache and counts the fetches. wrap may replace the reader of a fetch by one that fails.
type source struct {
	images map[string][]byte
	calls  atomic.Int32
	from   atomic.Int64 // offset of the last call
	wrap   func(ctx context.Context, r io.Reader) io.ReadCloser
}

func newSource() *source { return &source{images: map[string][]byte{}} }

func (s *source) add(data []byte, format qcow2.Format) Image {
	sum := sha256.Sum256(data)
	img := Image{SHA256: hex.EncodeToString(sum[:]), Size: int64(len(data)), Format: format}
	s.images[img.SHA256] = data
	return img
}

func (s *source) fetch(ctx context.Context, sum string, offset int64) (io.ReadCloser, error) {
	s.calls.Add(1)
	s.from.Store(offset)
	data, ok := s.images[sum]
	if !ok {
		return nil, errors.New("no member has it")
	}
	r := bytes.NewReader(data[offset:])
	if s.wrap != nil {
		return s.wrap(ctx, r), nil
	}
	return io.NopCloser(r), nil
}

// cut is a source.wrap: the reader returns the first n bytes and then an error.
func cut(n int64) func(context.Context, io.Reader) io.ReadCloser {
	return func(_ context.Context, r io.Reader) io.ReadCloser {
		return io.NopCloser(io.MultiReader(io.LimitReader(r, n), broken{}))
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("connection reset") }

func openImages(t *testing.T, dir string, s *source) *Images {
	t.Helper()
	images, err := OpenImages(dir, s.fetch)
	require.NoError(t, err)
	t.Cleanup(images.Close)
	return images
}

func content(t *testing.T, images *Images, img Image) []byte {
	t.Helper()
	f, err := images.Open(img)
	require.NoError(t, err)
	defer f.Close()
	data, err := io.ReadAll(f)
	require.NoError(t, err)
	return data
}

func TestEnsure(t *testing.T) {
	s, dir := newSource(), t.TempDir()
	img := s.add(bytes.Repeat([]byte("trivet"), 100_000), qcow2.Raw)
	images := openImages(t, dir, s)
	_, err := images.Open(img)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, images.Ensure(t.Context(), img))
	require.NoError(t, images.Ensure(t.Context(), img))
	require.EqualValues(t, 1, s.calls.Load())
	require.Equal(t, s.images[img.SHA256], content(t, images, img))
	st, err := os.Stat(filepath.Join(dir, img.SHA256))
	require.NoError(t, err)
	require.EqualValues(t, 0o444, st.Mode().Perm())

	// After a restart the image is found without a fetch, and files that are not images are not listed.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o600))
	again := openImages(t, dir, s)
	require.NoError(t, again.Ensure(t.Context(), img))
	require.EqualValues(t, 1, s.calls.Load())
	list, err := again.List()
	require.NoError(t, err)
	require.Equal(t, []string{img.SHA256}, list)
}

func TestEnsureResumes(t *testing.T) {
	s, dir := newSource(), t.TempDir()
	img := s.add(bytes.Repeat([]byte("0123456789"), 50_000), qcow2.Raw)
	images := openImages(t, dir, s)
	s.wrap = cut(123_456)
	require.ErrorContains(t, images.Ensure(t.Context(), img), "connection reset")
	require.EqualValues(t, 0, s.from.Load())
	_, err := images.Open(img)
	require.ErrorIs(t, err, fs.ErrNotExist, "an incomplete image must not be listed")

	s.wrap = func(_ context.Context, r io.Reader) io.ReadCloser { return io.NopCloser(io.LimitReader(r, 1000)) }
	require.ErrorIs(t, openImages(t, dir, s).Ensure(t.Context(), img), io.ErrUnexpectedEOF, "an early end of the stream must be an error")
	require.EqualValues(t, 123_456, s.from.Load())

	s.wrap = nil
	images = openImages(t, dir, s)
	require.NoError(t, images.Ensure(t.Context(), img))
	require.EqualValues(t, 124_456, s.from.Load())
	require.Equal(t, s.images[img.SHA256], content(t, images, img))
}

func TestEnsureVerifies(t *testing.T) {
	s, dir := newSource(), t.TempDir()
	img := s.add(bytes.Repeat([]byte("good"), 1000), qcow2.Raw)
	good := s.images[img.SHA256]
	images := openImages(t, dir, s)

	s.images[img.SHA256] = bytes.Repeat([]byte("evil"), 1000)
	require.ErrorIs(t, images.Ensure(t.Context(), img), ErrChecksum)
	// Bytes beyond the image's size are not read.
	s.images[img.SHA256] = bytes.Repeat([]byte("long"), 1_000_000)
	require.ErrorIs(t, images.Ensure(t.Context(), img), ErrChecksum)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries, "no file of the wrong image may be left")

	// A damaged .part file is detected by its checksum, removed, and fetched again.
	s.images[img.SHA256] = good
	part := filepath.Join(dir, img.SHA256+".part")
	require.NoError(t, os.WriteFile(part, []byte("spoilt"), 0o600))
	require.ErrorIs(t, images.Ensure(t.Context(), img), ErrChecksum)
	require.NoError(t, os.WriteFile(part, make([]byte, 5000), 0o600))
	require.NoError(t, images.Ensure(t.Context(), img), "a .part file that is too long must be replaced")
	require.Equal(t, good, content(t, images, img))
}

func TestEnsureRefuses(t *testing.T) {
	s, dir := newSource(), t.TempDir()
	img := s.add([]byte("x"), qcow2.Raw)
	images := openImages(t, dir, s)
	for _, bad := range []Image{
		{},
		{SHA256: "../../../../etc/shadow", Size: 1, Format: qcow2.Raw},
		{SHA256: img.SHA256[:63] + "G", Size: 1, Format: qcow2.Raw},
		{SHA256: img.SHA256, Size: 0, Format: qcow2.Raw},
		{SHA256: img.SHA256, Size: 1, Format: qcow2.VMDK},
	} {
		require.ErrorIs(t, images.Ensure(t.Context(), bad), ErrRefused, "%+v", bad)
		_, err := images.Open(bad)
		require.ErrorIs(t, err, ErrRefused)
	}
	require.Zero(t, s.calls.Load())

	require.NoError(t, images.Ensure(t.Context(), img))
	require.ErrorIs(t, images.Ensure(t.Context(), Image{SHA256: img.SHA256, Size: 2, Format: qcow2.Raw}), ErrRefused)
	// A symbolic link or a writable file in the cache is not accepted as an image.
	path := filepath.Join(dir, img.SHA256)
	require.NoError(t, os.Chmod(path, 0o644))
	require.ErrorContains(t, images.Ensure(t.Context(), img), "mode")
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Symlink("/etc/hostname", path))
	_, err := images.Open(img)
	require.ErrorContains(t, err, "mode")
}

// hang is a reader whose Read blocks until Close.
type hang struct{ closed chan struct{} }

func (h hang) Read([]byte) (int, error) { <-h.closed; return 0, fs.ErrClosed }
func (h hang) Close() error             { close(h.closed); return nil }

func TestEnsureIsShared(t *testing.T) {
	s := newSource()
	img := s.add(bytes.Repeat([]byte("shared"), 1000), qcow2.Raw)
	images := openImages(t, t.TempDir(), s)
	started, release := make(chan struct{}), make(chan struct{})
	s.wrap = func(_ context.Context, r io.Reader) io.ReadCloser {
		close(started)
		<-release
		return io.NopCloser(r)
	}
	const callers = 10
	errs := make(chan error, callers)
	first, leave := context.WithCancel(t.Context())
	gone := make(chan error)
	go func() { gone <- images.Ensure(first, img) }()
	<-started
	for range callers {
		go func() { errs <- images.Ensure(t.Context(), img) }()
	}
	waiting := func() int {
		images.mu.Lock()
		defer images.mu.Unlock()
		return images.flights[img.SHA256].waiting
	}
	require.Eventually(t, func() bool { return waiting() == callers+1 }, waitFor, tick)
	// The caller that started the fetch stops waiting. The other callers must still get the image.
	leave()
	require.ErrorIs(t, <-gone, context.Canceled)
	close(release)
	for range callers {
		require.NoError(t, <-errs)
	}
	require.EqualValues(t, 1, s.calls.Load())
}

func TestEnsureCanceledByLastCaller(t *testing.T) {
	s := newSource()
	img := s.add(bytes.Repeat([]byte("slow"), 1000), qcow2.Raw)
	images := openImages(t, t.TempDir(), s)
	started := make(chan struct{})
	h := hang{make(chan struct{})}
	s.wrap = func(context.Context, io.Reader) io.ReadCloser { close(started); return h }
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error)
	go func() { gone <- images.Ensure(ctx, img) }()
	<-started
	cancel()
	require.ErrorIs(t, <-gone, context.Canceled)
	<-h.closed // the fetch closed its reader, although Read was blocked

	// The cancellation is not returned to the next caller.
	s.wrap = nil
	require.NoError(t, images.Ensure(t.Context(), img))
}

func TestCloseEndsFetches(t *testing.T) {
	s := newSource()
	img := s.add([]byte("x"), qcow2.Raw)
	images := openImages(t, t.TempDir(), s)
	started := make(chan struct{})
	s.wrap = func(context.Context, io.Reader) io.ReadCloser { close(started); return hang{make(chan struct{})} }
	gone := make(chan error)
	go func() { gone <- images.Ensure(t.Context(), img) }()
	<-started
	images.Close()
	require.ErrorIs(t, <-gone, context.Canceled)
	require.ErrorIs(t, images.Ensure(t.Context(), img), context.Canceled)
}
