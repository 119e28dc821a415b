package qcow2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// file is a file in memory that grows when it is written beyond its end.
type file []byte

func (f *file) WriteAt(p []byte, at int64) (int, error) {
	if end := int(at) + len(p); end > len(*f) {
		*f = append(*f, make([]byte, end-len(*f))...)
	}
	return copy((*f)[at:], p), nil
}

func (f *file) put32(at int, v uint32) { binary.BigEndian.PutUint32((*f)[at:], v) }
func (f *file) put64(at int, v uint64) { binary.BigEndian.PutUint64((*f)[at:], v) }

// Offsets of header fields, and of the tables of an image that Create made.
const (
	atVersion, atBacking, atBackingSize, atClusterBits, atSize, atCrypt = 4, 8, 16, 20, 24, 32
	atL1Size, atL1, atRefTable, atRefClusters, atSnapshots              = 36, 40, 48, 56, 60
	atIncompatible, atRefcountOrder, atHeaderLength, atCompression      = 72, 96, 100, 104
	atExtensions                                                        = 112
	cluster                                                             = 1 << CreateClusterBits
	l1Table                                                             = 3 * cluster
)

// good returns a valid image of 10 GiB (20 L1 entries), with one L2 table and one cluster of data at the end.
func good(t testing.TB) *file {
	var f file
	length, err := Create(&f, 10<<30)
	require.NoError(t, err)
	require.EqualValues(t, len(f), length)
	l2 := uint64(length)
	_, err = f.WriteAt(make([]byte, 2*cluster), length)
	require.NoError(t, err)
	f.put64(l1Table, l2|1<<63)
	f.put64(int(l2), (l2+cluster)|1<<63)
	return &f
}

func inspect(f *file) (Info, error) { return Inspect(bytes.NewReader(*f), int64(len(*f))) }

func TestInspectAccepts(t *testing.T) {
	info, err := inspect(good(t))
	require.NoError(t, err)
	require.Equal(t, Info{Version: 3, VirtualSize: 10 << 30, ClusterBits: 16, Allocated: 1}, info)
}

func TestInspectRefuses(t *testing.T) {
	l2 := l1Table + cluster
	for _, tc := range []struct {
		name string
		harm func(f *file)
		says string
	}{
		{"empty file", func(f *file) { *f = nil }, "too short"},
		{"cut header", func(f *file) { *f = (*f)[:80] }, "cut short"},
		{"other magic", func(f *file) { copy(*f, "KDMV") }, "magic"},
		{"version 1", func(f *file) { f.put32(atVersion, 1) }, "version 1"},
		{"version 4", func(f *file) { f.put32(atVersion, 4) }, "version 4"},
		{"backing file", func(f *file) { f.put64(atBacking, 200); f.put32(atBackingSize, 11); copy((*f)[200:], "/etc/shadow") }, "backing file"},
		{"length of a backing file name without an offset", func(f *file) { f.put32(atBackingSize, 11) }, "backing file"},
		{"encrypted (AES)", func(f *file) { f.put32(atCrypt, 1) }, "encrypted"},
		{"encrypted (LUKS)", func(f *file) { f.put32(atCrypt, 2) }, "encrypted"},
		{"snapshots", func(f *file) { f.put32(atSnapshots, 3) }, "3 internal snapshots"},
		{"clusters of 256 bytes", func(f *file) { f.put32(atClusterBits, 8) }, "cluster bits are 8"},
		{"clusters of 4 MiB", func(f *file) { f.put32(atClusterBits, 22) }, "cluster bits are 22"},
		{"cluster bits of 2^32-1", func(f *file) { f.put32(atClusterBits, 0xffffffff) }, "cluster bits"},
		{"no size", func(f *file) { f.put64(atSize, 0) }, "virtual size is 0"},
		{"size that is not a multiple of 512", func(f *file) { f.put64(atSize, 1000) }, "multiple of 512"},
		{"65 TiB", func(f *file) { f.put64(atSize, 65<<40) }, "exceeds 64 TiB"},
		{"2^64-512", func(f *file) { f.put64(atSize, 1<<64-512) }, "exceeds 64 TiB"},
		{"dirty bit", func(f *file) { f.put64(atIncompatible, 1) }, "not closed properly"},
		{"corrupt", func(f *file) { f.put64(atIncompatible, 2) }, "corrupt"},
		{"data file bit", func(f *file) { f.put64(atIncompatible, 4) }, "another file"},
		{"unknown feature", func(f *file) { f.put64(atIncompatible, 1<<40) }, "unknown features (bits 0x10000000000)"},
		{"zstd without its bit", func(f *file) { (*f)[atCompression] = 1 }, "contradict"},
		{"compression bit without type", func(f *file) { f.put64(atIncompatible, 8) }, "contradict"},
		{"unknown compression", func(f *file) { f.put64(atIncompatible, 8); (*f)[atCompression] = 2 }, "compression type 2"},
		{"extended L2 with small clusters", func(f *file) { f.put64(atIncompatible, 16); f.put32(atClusterBits, 12) }, "16 KiB"},
		{"refcount order", func(f *file) { f.put32(atRefcountOrder, 7) }, "refcount order"},
		{"header shorter than version 3", func(f *file) { f.put32(atHeaderLength, 96) }, "header's length"},
		{"header longer than a cluster", func(f *file) { f.put32(atHeaderLength, cluster+8) }, "header's length"},
		{"header length unaligned", func(f *file) { f.put32(atHeaderLength, 109) }, "header's length"},
		{"LUKS extension", func(f *file) { f.put32(atExtensions, extLUKS) }, "encrypted"},
		{"data file name", func(f *file) { f.put32(atExtensions, extDataFile) }, "another file"},
		{"bitmaps", func(f *file) { f.put32(atExtensions, extBitmaps) }, "bitmaps"},
		{"long extension", func(f *file) { f.put32(atExtensions, 0x6803f857); f.put32(atExtensions+4, 1<<31) }, "out of the first cluster"},
		{"endless extensions", func(f *file) {
			for i := range 100 {
				f.put32(atExtensions+8*i, 0x11111111)
			}
		}, "more than 64"},
		{"L1 too small", func(f *file) { f.put32(atL1Size, 19) }, "its virtual size needs 20"},
		{"L1 huge", func(f *file) { f.put32(atL1Size, 1<<31) }, "more than QEMU reads"},
		{"L1 outside", func(f *file) { f.put64(atL1, 1<<40) }, "L1 table at 0x10000000000 reaches out"},
		{"L1 near 2^64", func(f *file) { f.put64(atL1, 1<<64-cluster) }, "reaches out"},
		{"L1 that exceeds the file", func(f *file) { f.put32(atL1Size, 1<<20) }, "reaches out"},
		{"L1 unaligned", func(f *file) { f.put64(atL1, l1Table+8) }, "not aligned"},
		{"L1 at the offset of the header", func(f *file) { f.put64(atL1, 0) }, "lies on the header"},
		{"refcount table outside", func(f *file) { f.put64(atRefTable, 1<<30) }, "refcount table"},
		{"refcount table unaligned", func(f *file) { f.put64(atRefTable, 77) }, "not aligned"},
		{"no refcount table", func(f *file) { f.put32(atRefClusters, 0) }, "refcount table has 0"},
		{"refcount table huge", func(f *file) { f.put32(atRefClusters, 1<<20) }, "refcount table has"},
		{"L2 outside", func(f *file) { f.put64(l1Table, 1<<50|1<<63) }, "L1 entry 0"},
		{"L2 that begins at the end of the file", func(f *file) { f.put64(l1Table, uint64(len(*f))|1<<63) }, "reaches out"},
		{"L2 unaligned", func(f *file) { f.put64(l1Table, uint64(l2)+512) }, "not aligned"},
		{"L1 entry reserved bits", func(f *file) { f.put64(l1Table, uint64(l2)|1) }, "reserved"},
		{"L2 that two L1 entries share", func(f *file) { f.put64(l1Table+8, uint64(l2)|1<<63) }, "share"},
		{"data outside", func(f *file) { f.put64(l2, 1<<50|1<<63) }, "entry 0 of the L2 table"},
		{"data unaligned", func(f *file) { f.put64(l2+8*77, cluster+512) }, "entry 77"},
		{"L2 entry reserved bits", func(f *file) { f.put64(l2, 1<<57) }, "reserved"},
		{"compressed outside", func(f *file) { f.put64(l2+8, 1<<62|uint64(len(*f))) }, "compressed data"},
		{"compressed data beyond the end", func(f *file) { f.put64(l2+8, 1<<62|255<<54|uint64(len(*f)-4096)) }, "compressed data"},
		{"zero flag in version 2", func(f *file) {
			f.put32(atVersion, 2)
			f.put64(72, 0) // the header of version 2 ends here, and extensions begin
			f.put64(l2, 1)
		}, "zero flag"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := good(t)
			tc.harm(f)
			_, err := inspect(f)
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, tc.says)
		})
	}
}

func TestInspectTooMuchWork(t *testing.T) {
	// A sparse image with clusters of 2 MiB and 600 L2 tables, whose 1.2 GiB exceed maxWalk, is refused.
	var f file
	_, err := Create(&f, 1<<30)
	require.NoError(t, err)
	const big = 1 << 21
	f.put32(atClusterBits, 21)
	f.put64(atRefTable, big)
	f.put64(atL1, 2*big)
	f.put32(atL1Size, 600)
	_, err = f.WriteAt([]byte{0}, 3*big-1)
	require.NoError(t, err)
	for i := range 600 {
		f.put64(2*big+8*i, uint64(3+i)*big|1<<63)
	}
	_, err = Inspect(bytes.NewReader(f), 700*big)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "600 L2 tables")
}

type broken struct{ io.ReaderAt }

func (b broken) ReadAt(p []byte, at int64) (int, error) {
	if at == l1Table {
		return 0, errors.New("bad sector")
	}
	return b.ReaderAt.ReadAt(p, at)
}

func TestInspectReadError(t *testing.T) {
	f := good(t)
	_, err := Inspect(broken{bytes.NewReader(*f)}, int64(len(*f)))
	require.EqualError(t, err, "read L1 table: bad sector")
	require.NotErrorIs(t, err, ErrRefused)
}

func TestCreateRefuses(t *testing.T) {
	for _, size := range []uint64{0, 1, 511, 1000, 64<<40 + 512, 1<<64 - 512} {
		var f file
		_, err := Create(&f, size)
		require.Error(t, err, "%d", size)
		require.Empty(t, f)
	}
}

func TestDetect(t *testing.T) {
	for first, want := range map[string]Format{
		"":                                    Raw,
		"Q":                                   Raw,
		strings.Repeat("\x00", 512):           Raw,
		"QFI\xfb\x00\x00\x00\x03":             QCOW2,
		"KDMV\x01":                            VMDK,
		"# Disk DescriptorFile\nversion=1":    VMDK,
		"conectix\x00\x00":                    VHD,
		"vhdxfile":                            VHDX,
		"<<< Oracle VM VirtualBox Disk Image": Raw, // too short to contain the signature at offset 64
		"<<< Oracle VM VirtualBox Disk Image >>>\n" + strings.Repeat("\x00", 24) + "\x7f\x10\xda\xbe": VDI,
		"LUKS\xba\xbe\x00\x01": LUKS,
		"\x1f\x8b\x08\x00":     Gzip,
	} {
		require.Equal(t, want, Detect([]byte(first)), "%q", first)
	}
	require.True(t, IsQCOW2([]byte("QFI\xfb")))
	require.False(t, IsQCOW2([]byte("QFI")))
}

// FuzzInspect checks that Inspect panics for no input, and that accepted images are within the documented limits.
func FuzzInspect(f *testing.F) {
	// The seed is a small image, so that the fuzzer's changes are likely to affect tables: 512-byte clusters, one L2
	// table, one data cluster.
	small := make(file, 6*512)
	copy(small, (*good(f))[:atExtensions+8])
	small.put32(atClusterBits, 9)
	small.put64(atSize, 4096)
	small.put64(atRefTable, 512)
	small.put64(atL1, 3*512)
	small.put32(atL1Size, 1)
	small.put64(3*512, 4*512|1<<63)
	small.put64(4*512, 5*512|1<<63)
	small.put64(4*512+8, 1<<62|5*512+7)
	f.Add([]byte(small))
	two := bytes.Clone(small)
	two[7] = 2
	f.Add(two)
	_, err := inspect(&small)
	require.NoError(f, err)

	f.Fuzz(func(t *testing.T, data []byte) {
		info, err := Inspect(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			require.ErrorIs(t, err, ErrRefused)
			return
		}
		require.True(t, IsQCOW2(data))
		require.LessOrEqual(t, info.VirtualSize, uint64(MaxVirtualSize))
		require.NotZero(t, info.VirtualSize)
		require.LessOrEqual(t, info.Allocated, uint64(len(data)))
		// Accepted images have no backing file name: bytes 8 to 20 are zero.
		require.Equal(t, make([]byte, 12), data[8:20])
	})
}
