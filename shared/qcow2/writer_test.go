package qcow2

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWriter writes random data with holes, and requires that Inspect and QEMU accept the image, that QEMU reads the
// same bytes from it, and that holes take no space.
func TestWriter(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	dir := t.TempDir()
	for _, size := range []uint64{512, 65536, 65536 + 512, 3<<20 + 1024, 600 << 20, 5<<30 + 512} {
		raw, err := os.Create(filepath.Join(dir, "raw"))
		require.NoError(t, err)
		require.NoError(t, raw.Truncate(int64(size)))
		f, err := os.Create(filepath.Join(dir, "disk.qcow2"))
		require.NoError(t, err)
		w, err := NewWriter(f, size)
		require.NoError(t, err)
		written := uint64(0)
		for offset := uint64(0); offset < size; {
			data := make([]byte, min(size-offset, random.Uint64N(200000)))
			if random.IntN(3) > 0 { // else it is zero
				for i := range data {
					data[i] = byte(random.Uint32())
				}
				written += uint64(len(data)) + 2*WriterCluster
			}
			require.NoError(t, w.Write(offset, data))
			_, err := raw.WriteAt(data, int64(offset))
			require.NoError(t, err)
			offset += uint64(len(data)) + random.Uint64N(1+size/8)
		}
		length, err := w.Close()
		require.NoError(t, err)
		info, err := f.Stat()
		require.NoError(t, err)
		require.Equal(t, length, info.Size())
		require.LessOrEqual(t, uint64(length), written+20*WriterCluster)
		require.LessOrEqual(t, length, MaxLength(size, min(written, size)/WriterCluster+1))
		got, err := Inspect(f, length)
		require.NoError(t, err)
		require.Equal(t, size, got.VirtualSize)
		require.NoError(t, f.Close())
		require.NoError(t, raw.Close())
		qemuImg(t, "check", "-f", "qcow2", f.Name())
		qemuImg(t, "compare", "-f", "raw", "-F", "qcow2", raw.Name(), f.Name())
	}
}

// TestWriterWithManyRefcounts requires that QEMU accepts an image with several refcount blocks. The test writes only a
// part of the data, so that the file is sparse in the file system.
func TestWriterWithManyRefcounts(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "disk.qcow2"))
	require.NoError(t, err)
	defer f.Close()
	w, err := NewWriter(sparse{f}, 5<<30)
	require.NoError(t, err)
	data := make([]byte, 1<<20)
	for i := uint64(0); i < len64(data); i += WriterCluster {
		data[i+7] = 1
	}
	for offset := uint64(0); offset < 5<<30; offset += len64(data) {
		require.NoError(t, w.Write(offset, data))
	}
	length, err := w.Close()
	require.NoError(t, err)
	require.Greater(t, length, int64(5<<30))
	require.LessOrEqual(t, length, MaxLength(5<<30, 5<<30/WriterCluster))
	require.Less(t, MaxLength(5<<30, 5<<30/WriterCluster), int64(5<<30+1<<22))
	qemuImg(t, "check", "-f", "qcow2", f.Name())
}

func len64(b []byte) uint64 { return uint64(len(b)) }

// sparse writes only the first eight bytes of a cluster of the test's data.
type sparse struct{ *os.File }

func (s sparse) WriteAt(b []byte, at int64) (int, error) {
	if len(b) == int(WriterCluster) && b[7] == 1 && isZero(b[8:]) && isZero(b[:7]) {
		_, err := s.File.WriteAt(b[:8], at)
		return len(b), err
	}
	return s.File.WriteAt(b, at)
}

func TestWriterRefuses(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "disk.qcow2"))
	require.NoError(t, err)
	defer f.Close()
	for _, size := range []uint64{0, 511, 513, MaxVirtualSize + 512} {
		_, err := NewWriter(f, size)
		require.ErrorContains(t, err, "is not possible")
	}
	w, err := NewWriter(f, 1<<20)
	require.NoError(t, err)
	require.NoError(t, w.Write(4096, []byte("x")))
	require.ErrorIs(t, w.Write(4096, []byte("x")), errOrder)
	require.ErrorContains(t, w.Write(1<<20-1, []byte("xx")), "outside the disk")
	require.ErrorContains(t, w.Write(1<<40, nil), "outside the disk")
	require.NoError(t, w.Write(1<<20-1, []byte("x")))

	full := errors.New("the disk is full")
	w, err = NewWriter(failing{full}, 1<<20)
	require.NoError(t, err)
	require.NoError(t, w.Write(0, []byte("x")))
	_, err = w.Close()
	require.ErrorIs(t, err, full)
}

type failing struct{ err error }

func (f failing) WriteAt([]byte, int64) (int, error) { return 0, f.err }
