package vdisk

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// qemuImg runs qemu-img with args. Without qemu-img it skips the test.
func qemuImg(t testing.TB, args ...string) {
	t.Helper()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("qemu-img is not installed")
	}
	out, err := exec.Command("qemu-img", args...).CombinedOutput()
	require.NoError(t, err, "qemu-img %v: %s", args, out)
}

// images are the kinds of images that qemu-img can make and that Open accepts.
var images = map[string]struct {
	format qcow2.Format
	args   []string
}{
	"VMDK":                          {qcow2.VMDK, []string{"-O", "vmdk"}},
	"VMDK, streamOptimized":         {qcow2.VMDK, []string{"-O", "vmdk", "-o", "subformat=streamOptimized"}},
	"VMDK, grains that may be zero": {qcow2.VMDK, []string{"-O", "vmdk", "-o", "zeroed_grain=on"}},
	"VHD, dynamic":                  {qcow2.VHD, []string{"-O", "vpc", "-o", "force_size=on"}},
	"VHD, fixed":                    {qcow2.Raw, []string{"-O", "vpc", "-o", "subformat=fixed,force_size=on"}},
	"VHDX, dynamic":                 {qcow2.VHDX, []string{"-O", "vhdx"}},
	"VHDX, fixed":                   {qcow2.VHDX, []string{"-O", "vhdx", "-o", "subformat=fixed"}},
	"VHDX, small blocks":            {qcow2.VHDX, []string{"-O", "vhdx", "-o", "block_size=1M"}},
}

// open opens an image file.
func open(t testing.TB, path string, format qcow2.Format) (*Disk, error) {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return Open(bytes.NewReader(data), int64(len(data)), format, Options{MaxData: 1 << 30})
}

// convert writes the disk to a QCOW2 file.
func convert(d *Disk, path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	w, err := qcow2.NewWriter(f, d.Size())
	if err != nil {
		return err
	}
	if err := d.Read(w.Write); err != nil {
		return err
	}
	_, err = w.Close()
	return err
}

// TestConvert converts disks of several sizes in each format, and requires that the QCOW2 files have the same bytes.
func TestConvert(t *testing.T) {
	for _, size := range []int{65536, 3<<20 + 512, 40 << 20} {
		dir := t.TempDir()
		raw := filepath.Join(dir, "raw")
		require.NoError(t, os.WriteFile(raw, randomDisk(size), 0o600))
		for name, kind := range images {
			t.Run(name, func(t *testing.T) {
				source, converted := filepath.Join(dir, "source"), filepath.Join(dir, "converted")
				qemuImg(t, append(append([]string{"convert", "-f", "raw"}, kind.args...), raw, source)...)
				first, err := os.ReadFile(source)
				require.NoError(t, err)
				require.Equal(t, kind.format, qcow2.Detect(first[:qcow2.DetectLength]))
				d, err := open(t, source, kind.format)
				require.NoError(t, err)
				require.GreaterOrEqual(t, d.Size(), uint64(size))
				require.Less(t, d.Size(), uint64(size)+1<<20, "qemu-img makes the disk larger, because of its block size")
				require.NoError(t, convert(d, converted))
				info, err := os.Stat(converted)
				require.NoError(t, err)
				require.LessOrEqual(t, info.Size(), qcow2.MaxLength(d.Size(), d.Units(qcow2.WriterCluster)))
				qemuImg(t, "check", "-f", "qcow2", converted)
				qemuImg(t, "compare", "-f", "raw", "-F", "qcow2", raw, converted)
			})
		}
	}
}

// randomDisk returns bytes of which some ranges are zero.
func randomDisk(size int) []byte {
	random := rand.New(rand.NewPCG(uint64(size), 0))
	data := make([]byte, size)
	for at := 0; at < size; {
		n := min(size-at, random.IntN(300000))
		if random.IntN(2) == 0 {
			for i := range data[at : at+n] {
				data[at+i] = byte(random.Uint32() >> random.IntN(32))
			}
		}
		at += n
	}
	return data
}

// TestVMDKFooter converts an image whose header is incomplete, because it was written as a stream: a footer has the
// final header.
func TestVMDKFooter(t *testing.T) {
	disk := randomDisk(3 << 20)
	data, err := os.ReadFile(makeImage(t, "VMDK, streamOptimized", disk))
	require.NoError(t, err)
	header := bytes.Clone(data[:512])
	put(le, 56, ^uint64(0))(data)
	data = slices.Concat(data, make([]byte, 512), header, make([]byte, 512))
	d, err := Open(bytes.NewReader(data), int64(len(data)), qcow2.VMDK, Options{MaxData: 1 << 30})
	require.NoError(t, err)
	require.Equal(t, disk, readAll(t, d))

	put(le, len(data)-1024+56, ^uint64(0))(data)
	_, err = Open(bytes.NewReader(data), int64(len(data)), qcow2.VMDK, Options{MaxData: 1 << 30})
	require.ErrorContains(t, err, "its footer has no grain directory")
}

// readAll returns all bytes of a disk.
func readAll(t *testing.T, d *Disk) []byte {
	got := make([]byte, d.Size())
	require.NoError(t, d.Read(func(offset uint64, data []byte) error {
		copy(got[offset:], data)
		return nil
	}))
	return got
}

// TestBitmap requires that sectors of a VHD's block that its bitmap marks as unused are zero.
func TestBitmap(t *testing.T) {
	path := makeImage(t, "VHD, dynamic", bytes.Repeat([]byte{7}, 65536))
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	d, err := open(t, path, qcow2.VHD)
	require.NoError(t, err)
	data[d.blocks[0].bitmap] = 0x7f // the first sector
	d, err = Open(bytes.NewReader(data), int64(len(data)), qcow2.VHD, Options{MaxData: 1 << 30})
	require.NoError(t, err)
	got := readAll(t, d)
	require.Equal(t, append(make([]byte, 512), bytes.Repeat([]byte{7}, 65536-512)...), got[:65536])
}

// makeImage returns the path of an image of a kind with the given data.
func makeImage(t testing.TB, kind string, data []byte, more ...string) string {
	t.Helper()
	dir := t.TempDir()
	raw, path := filepath.Join(dir, "raw"), filepath.Join(dir, "image")
	require.NoError(t, os.WriteFile(raw, data, 0o600))
	qemuImg(t, append(append(append([]string{"convert", "-f", "raw"}, images[kind].args...), more...), raw, path)...)
	return path
}

// TestRefusesUnsupportedImagesOfQEMU requires that images of qemu-img that need other files, or have unsupported types,
// are refused.
func TestRefusesUnsupportedImagesOfQEMU(t *testing.T) {
	dir := t.TempDir()
	raw, base := filepath.Join(dir, "raw"), filepath.Join(dir, "base.vmdk")
	require.NoError(t, os.WriteFile(raw, randomDisk(1<<20), 0o600))
	qemuImg(t, "convert", "-f", "raw", "-O", "vmdk", raw, base)
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"flat data in another file": {[]string{"convert", "-O", "vmdk", "-o", "subformat=monolithicFlat", raw, "NAME"}, "data in other files"},
		"sparse data in another file": {[]string{"convert", "-O", "vmdk", "-o", "subformat=twoGbMaxExtentSparse", raw, "NAME"},
			"data in other files"},
		"backing file": {[]string{"create", "-f", "vmdk", "-b", base, "-F", "vmdk", "NAME"}, "needs a parent"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "image.vmdk")
			for i := range test.args {
				test.args[i] = strings.ReplaceAll(test.args[i], "NAME", path)
			}
			qemuImg(t, test.args...)
			_, err := open(t, path, qcow2.VMDK)
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, test.want)
		})
	}
}

func TestLimits(t *testing.T) {
	for name := range images {
		data, err := os.ReadFile(makeImage(t, name, bytes.Repeat([]byte{7}, 5<<20)))
		require.NoError(t, err)
		_, err = Open(bytes.NewReader(data), int64(len(data)), images[name].format, Options{MaxData: 4 << 20})
		require.ErrorContains(t, err, "more than 4194304 bytes of data", name)

		// Errors of reading the file do not wrap ErrRefused.
		broken := errors.New("the disk is broken")
		for n := range 6 {
			d, err := Open(&breaking{bytes.NewReader(data), n, broken}, int64(len(data)), images[name].format, Options{MaxData: 1 << 30})
			if err == nil {
				d.r = &breaking{bytes.NewReader(data), n, broken}
				err = d.Read(func(uint64, []byte) error { return nil })
			}
			if err != nil {
				require.ErrorIs(t, err, broken, "%s: read %d", name, n)
				require.NotErrorIs(t, err, ErrRefused)
			}
		}
		d, err := Open(bytes.NewReader(data), int64(len(data)), images[name].format, Options{MaxData: 1 << 30})
		require.NoError(t, err)
		require.ErrorIs(t, d.Read(func(uint64, []byte) error { return broken }), broken)
	}
}

// breaking is a reader that fails after some reads.
type breaking struct {
	io.ReaderAt
	left int
	err  error
}

func (b *breaking) ReadAt(p []byte, at int64) (int, error) {
	if b.left == 0 {
		return 0, b.err
	}
	b.left--
	return b.ReaderAt.ReadAt(p, at)
}

// FuzzOpen requires that no image causes a panic, or data outside the disk or above the limit.
func FuzzOpen(f *testing.F) {
	formats := []qcow2.Format{qcow2.VMDK, qcow2.VHD, qcow2.VHDX}
	for name := range images {
		data, err := os.ReadFile(makeImage(f, name, bytes.Repeat([]byte{7}, 65536)))
		require.NoError(f, err)
		for i := range formats {
			f.Add(data[:min(len(data), 300000)], uint8(i))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte, format uint8) {
		const limit = 8 << 20
		d, err := Open(bytes.NewReader(data), int64(len(data)), formats[int(format)%len(formats)], Options{MaxData: limit})
		if err != nil {
			return
		}
		total, end := uint64(0), uint64(0)
		_ = d.Read(func(offset uint64, data []byte) error {
			require.GreaterOrEqual(t, offset, end)
			end = offset + uint64(len(data))
			require.LessOrEqual(t, end, d.Size())
			total += uint64(len(data))
			require.LessOrEqual(t, total, uint64(limit))
			return nil
		})
	})
}
