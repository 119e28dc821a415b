package qcow2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// sampleDisk returns 3 MiB and a few sectors with data, zeros, and data that can be compressed.
func sampleDisk() []byte {
	b := make([]byte, 3<<20+5*sector)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(b[1<<20-700 : 1<<20+300_000])
	for i := 2 << 20; i < len(b); i++ {
		b[i] = byte(i / 1000)
	}
	return b
}

// TestReader reads images that qemu-img wrote in all forms that Inspect accepts.
func TestReader(t *testing.T) {
	data := sampleDisk()
	raw := filepath.Join(t.TempDir(), "raw")
	require.NoError(t, os.WriteFile(raw, data, 0o600))
	for name, args := range map[string][]string{
		"version 2":         {"-o", "compat=0.10"},
		"version 3":         {},
		"small clusters":    {"-o", "cluster_size=512"},
		"large clusters":    {"-o", "cluster_size=2M"},
		"zlib":              {"-c"},
		"zlib, version 2":   {"-c", "-o", "compat=0.10"},
		"zstd":              {"-c", "-o", "compression_type=zstd"},
		"zstd, 4 KiB":       {"-c", "-o", "compression_type=zstd,cluster_size=4k"},
		"extended L2":       {"-o", "extended_l2=on,cluster_size=128k"},
		"extended L2, zlib": {"-c", "-o", "extended_l2=on"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "image")
			qemuImg(t, slices.Concat([]string{"convert", "-f", "raw", "-O", "qcow2"}, args, []string{raw, path})...)
			f, err := os.Open(path)
			require.NoError(t, err)
			defer f.Close()
			st, err := f.Stat()
			require.NoError(t, err)
			d, err := NewReader(f, st.Size())
			require.NoError(t, err)
			require.EqualValues(t, len(data), d.Size())
			got, err := io.ReadAll(io.NewSectionReader(d, 0, 1<<40))
			require.NoError(t, err)
			require.True(t, bytes.Equal(data, got), "the content differs")
			piece := make([]byte, 100_001)
			n, err := d.ReadAt(piece, 1<<20-77)
			require.NoError(t, err)
			require.Equal(t, data[1<<20-77:1<<20-77+n], piece)
			n, err = d.ReadAt(piece, int64(len(data)-10))
			require.Equal(t, []any{10, io.EOF}, []any{n, err})
		})
	}
}

// TestReaderOfOverlay checks what a Reader returns for clusters that are not in the image.
func TestReaderOfOverlay(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "overlay"))
	require.NoError(t, err)
	defer f.Close()
	length, err := Create(f, 1<<40)
	require.NoError(t, err)
	d, err := NewReader(f, length)
	require.NoError(t, err)
	b := make([]byte, d.ClusterSize())
	content, err := d.ReadCluster(12345, b)
	require.NoError(t, err)
	require.Equal(t, Unallocated, content)
	require.EqualValues(t, 1<<40/d.ClusterSize(), d.NextMapped(7), "nothing is in the image")
	content, err = d.ReadCluster(1<<50, b)
	require.NoError(t, err)
	require.Equal(t, Unallocated, content)
}

// TestReaderRefuses changes the tables of an image after NewReader has accepted the header. The read must fail, and
// must not read outside the file.
func TestReaderRefuses(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	require.NoError(t, err)
	defer f.Close()
	w, err := NewWriter(f, 1<<30)
	require.NoError(t, err)
	require.NoError(t, w.Write(0, bytes.Repeat([]byte{1}, 100)))
	length, err := w.Close()
	require.NoError(t, err)
	good := make([]byte, length)
	_, err = f.ReadAt(good, 0)
	require.NoError(t, err)
	l1 := binary.BigEndian.Uint64(good[40:])
	l2 := binary.BigEndian.Uint64(good[l1:]) & offsetMask
	for name, edit := range map[string]struct {
		at    uint64
		entry uint64
	}{
		"an L2 table outside":            {l1, 1 << 40},
		"an L2 table that is no cluster": {l1, 512},
		"reserved bits of L1":            {l1, 1 << 60},
		"a cluster outside":              {l2, 1 << 40},
		"a cluster that is no cluster":   {l2, 512},
		"reserved bits of L2":            {l2, 1 << 60},
		"compressed data outside":        {l2, flagCompressed | 1<<40},
		"compressed data that is none":   {l2, flagCompressed},
	} {
		t.Run(name, func(t *testing.T) {
			bad := bytes.Clone(good)
			binary.BigEndian.PutUint64(bad[edit.at:], edit.entry)
			d, err := NewReader(bytes.NewReader(bad), int64(len(bad)))
			require.NoError(t, err)
			_, err = d.ReadAt(make([]byte, 10), 0)
			require.ErrorIs(t, err, ErrRefused)
		})
	}
	encrypted := bytes.Clone(good)
	encrypted[35] = 2 // LUKS
	_, err = NewReader(bytes.NewReader(encrypted), length)
	require.ErrorIs(t, err, ErrRefused)
	tables, err := NewTableReader(bytes.NewReader(encrypted), length)
	require.NoError(t, err)
	content, err := tables.Lookup(0)
	require.NoError(t, err)
	require.Equal(t, Data, content)
	_, err = tables.ReadAt(make([]byte, 10), 0)
	require.ErrorContains(t, err, "only the tables")
	_, err = NewReader(bytes.NewReader(good[:100]), 100)
	require.ErrorIs(t, err, ErrRefused)
	d, err := NewReader(failingFrom{bytes.NewReader(good), int64(l2)}, length)
	require.NoError(t, err)
	_, err = d.ReadAt(make([]byte, 10), 0)
	require.ErrorIs(t, err, errBroken)
}

var errBroken = errors.New("read error")

// failingFrom is an io.ReaderAt whose reads from an offset on fail.
type failingFrom struct {
	io.ReaderAt
	from int64
}

func (f failingFrom) ReadAt(b []byte, at int64) (int, error) {
	if at >= f.from {
		return 0, errBroken
	}
	return f.ReaderAt.ReadAt(b, at)
}
