package disk

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// cacheOf returns a cache with a limit in bytes. The keys of used are the SHA-256 checksums of the images that are in
// use.
func cacheOf(t *testing.T, dir string, s *source, bytes int64, used map[string]bool) *Images {
	images := openImages(t, dir, s)
	images.SetLimit(Limit{
		Bytes: func(int64) (int64, error) { return bytes, nil },
		Used:  func() (map[string]bool, error) { return used, nil },
	})
	return images
}

// notUsedSince sets the time of an image's last use, as a new agent finds it, to ago before now.
func notUsedSince(t *testing.T, dir string, img Image, ago time.Duration) {
	at := time.Now().Add(-ago)
	require.NoError(t, os.Chtimes(filepath.Join(dir, img.SHA256), at, at))
}

const blockSize = 64 << 10 // a multiple of the block size of file systems

// fill adds an image of blockSize bytes to a source, all with the same byte.
func (s *source) fill(b byte) Image { return s.add(bytes.Repeat([]byte{b}, blockSize), qcow2.Raw) }

// TestTrim fills a cache with more images than its limit. The unused image that was used first must be removed first,
// and an image in use must be kept even if the images in use exceed the limit. Files that are not images must stay.
func TestTrim(t *testing.T) {
	s, dir := newSource(), t.TempDir()
	used := map[string]bool{}
	var all []Image
	before := openImages(t, dir, s)
	for n := range 5 {
		img := s.fill(byte(n))
		require.NoError(t, before.Ensure(t.Context(), img))
		notUsedSince(t, dir, img, time.Duration(10-n)*time.Hour)
		all = append(all, img)
	}
	for name, age := range map[string]time.Duration{"0" + all[0].SHA256[1:] + ".part": 20 * time.Hour, "keep.me": 30 * time.Hour} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), make([]byte, blockSize), 0o600))
		require.NoError(t, os.Chtimes(filepath.Join(dir, name), time.Time{}, time.Now().Add(-age)))
	}
	cached := func(images *Images) (out []int) {
		for n, img := range all {
			if images.checkCached(img) == nil {
				out = append(out, n)
			}
		}
		return out
	}
	used[all[0].SHA256], used[all[1].SHA256] = true, true

	images := cacheOf(t, dir, s, 6*blockSize, used)
	require.NoError(t, images.Trim())
	require.Equal(t, []int{0, 1, 2, 3, 4}, cached(images), "the cache is not larger than its limit")

	open, err := before.Open(all[2])
	require.NoError(t, err)
	defer open.Close()
	notUsedSince(t, dir, all[2], 8*time.Hour)
	images = cacheOf(t, dir, s, 3*blockSize, used)
	require.NoError(t, images.Trim())
	require.Contains(t, cached(images), 0, "an image in use was removed")
	require.Equal(t, []int{0, 1, 4}, cached(images), "partial content, and the images whose last use is oldest, are removed")
	data, err := io.ReadAll(open)
	require.NoError(t, err)
	require.Equal(t, s.images[all[2].SHA256], data, "a removed image must stay readable through an open file")

	images = cacheOf(t, dir, s, blockSize, used)
	require.NoError(t, images.Trim())
	require.Equal(t, []int{0, 1}, cached(images), "the images in use exceed the limit")
	require.FileExists(t, filepath.Join(dir, "keep.me"))
	require.NoFileExists(t, filepath.Join(dir, "0"+all[0].SHA256[1:]+".part"))
	stats, err := images.Stats()
	require.NoError(t, err)
	require.Equal(t, Stats{Images: 2, Bytes: 2 * blockSize, Limit: blockSize, Evictions: 1}, stats)
}

// TestFetchMakesRoom checks that a fetch removes an unused image first, and that nothing is removed if Limit.Used
// returns an error.
func TestFetchMakesRoom(t *testing.T) {
	s, dir := newSource(), t.TempDir()
	a, b, c := s.fill('a'), s.fill('b'), s.fill('c')
	images := cacheOf(t, dir, s, 2*blockSize, nil)
	require.NoError(t, images.Ensure(t.Context(), a))
	require.NoError(t, images.Ensure(t.Context(), b))
	require.NoError(t, images.Ensure(t.Context(), a), "a is now the image that was used last")
	var during []string
	s.wrap = func(_ context.Context, r io.Reader) io.ReadCloser {
		during, _ = images.List()
		return io.NopCloser(r)
	}
	require.NoError(t, images.Ensure(t.Context(), c))
	require.Equal(t, []string{a.SHA256}, during, "b was removed before c was fetched")

	images = openImages(t, dir, s)
	failure := errors.New("the disks cannot be listed")
	images.SetLimit(Limit{
		Bytes: func(int64) (int64, error) { return 0, nil },
		Used:  func() (map[string]bool, error) { return nil, failure },
	})
	require.ErrorIs(t, images.Trim(), failure)
	require.NoError(t, images.Ensure(t.Context(), b), "a VM need not wait until the cache can be trimmed")
	list, err := images.List()
	require.NoError(t, err)
	require.Len(t, list, 3)
}

// TestUseDuringTrim uses an image while Trim determines which images are in use. The image must stay, although
// Trim may not have found this use.
func TestUseDuringTrim(t *testing.T) {
	s := newSource()
	a, b := s.fill('a'), s.fill('b')
	images := openImages(t, t.TempDir(), s)
	images.SetLimit(Limit{
		Bytes: func(int64) (int64, error) { return 0, nil },
		Used: func() (map[string]bool, error) {
			if images.checkCached(a) == nil {
				require.NoError(t, images.useCached(a))
			}
			return nil, nil
		},
	})
	require.NoError(t, images.Ensure(t.Context(), b))
	require.NoError(t, images.Ensure(t.Context(), a))
	require.NoError(t, images.Trim())
	require.NoError(t, images.checkCached(a))
	require.Error(t, images.checkCached(b))
}

// TestManyDisksFetchOnce builds the disks of 20 VMs of one image at once. The image must be fetched once.
func TestManyDisksFetchOnce(t *testing.T) {
	const vms = 20
	s, dir := newSource(), t.TempDir()
	img := s.fill('x')
	images := cacheOf(t, filepath.Join(dir, "images"), s, 0, map[string]bool{img.SHA256: true})
	errs := make(chan error, vms)
	for n := range vms {
		go func() {
			home := filepath.Join(dir, string(rune('a'+n)))
			errs <- Build(t.Context(), images, home, os.Getuid(), []Disk{{ID: "root", Size: blockSize, Image: &img}})
		}()
	}
	for range vms {
		require.NoError(t, <-errs)
	}
	require.EqualValues(t, 1, s.calls.Load())
	stats, err := images.Stats()
	require.NoError(t, err)
	require.Equal(t, []uint64{1, blockSize}, []uint64{stats.Fetches, stats.FetchedBytes})
}
