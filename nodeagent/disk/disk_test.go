package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/qcow2"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

const (
	gib     = 1 << 30
	waitFor = 10 * time.Second
	tick    = time.Millisecond
)

// memory is a file in memory, which grows when data is written beyond its end.
type memory []byte

func (m *memory) WriteAt(p []byte, at int64) (int, error) {
	if end := int(at) + len(p); end > len(*m) {
		*m = append(*m, make([]byte, end-len(*m))...)
	}
	return copy((*m)[at:], p), nil
}

// qcow2Image returns an image whose disk has the given size in bytes.
func qcow2Image(t *testing.T, size uint64) []byte {
	t.Helper()
	var m memory
	_, err := qcow2.Create(&m, size)
	require.NoError(t, err)
	return m
}

// uid returns the uid that owns the disks: that of another user if the test runs as root, else its own.
func uid() int {
	if os.Getuid() == 0 {
		return 600_123
	}
	return os.Getuid()
}

func TestBuild(t *testing.T) {
	s := newSource()
	raw := s.add(bytes.Repeat([]byte("r"), 4096), qcow2.Raw)
	cow := s.add(qcow2Image(t, gib), qcow2.QCOW2)
	images := openImages(t, t.TempDir(), s)
	dir := filepath.Join(t.TempDir(), "disks")
	disks := []Disk{{ID: "root", Size: 10 * gib, Image: &cow}, {ID: "data-1", Size: gib}, {ID: "raw", Size: gib, Image: &raw}}

	none, err := List(dir)
	require.NoError(t, err)
	require.Empty(t, none)
	require.NoError(t, Build(t.Context(), images, dir, uid(), disks))
	list, err := List(dir)
	require.NoError(t, err)
	require.Equal(t, []Disk{disks[1], disks[2], disks[0]}, list)

	// A second Build does not change a disk to which a guest has written.
	mark := func() []byte {
		data, err := os.ReadFile(filepath.Join(dir, "root.qcow2"))
		require.NoError(t, err)
		return data
	}
	f, err := os.OpenFile(filepath.Join(dir, "root.qcow2"), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	_, err = f.WriteString("guest data")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	before := mark()
	require.NoError(t, Build(t.Context(), images, dir, uid(), disks))
	require.Equal(t, before, mark())

	for _, d := range disks {
		c, err := Open(images, dir, d.ID)
		require.NoError(t, err)
		defer c.Close()
		st, err := c.Overlay.Stat()
		require.NoError(t, err)
		require.EqualValues(t, 0o600, st.Mode().Perm())
		require.EqualValues(t, uid(), st.Sys().(*syscall.Stat_t).Uid)
		require.Equal(t, d.Image != nil, c.Base != nil)
		if d.Image != nil {
			require.Equal(t, d.Image.Format, c.Format)
			_, err := c.Base.WriteString("x")
			require.Error(t, err, "an image must be open for reading only")
		}
	}
	_, err = Open(images, dir, "other")
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = Open(images, dir, "../root")
	require.Error(t, err)

	require.NoError(t, Remove(dir))
	require.NoError(t, Remove(dir))
	require.NoDirExists(t, dir)
	held, err := images.List()
	require.NoError(t, err)
	require.Len(t, held, 2)
}

func TestBuildAfterACrash(t *testing.T) {
	s := newSource()
	img := s.add(bytes.Repeat([]byte("r"), 4096), qcow2.Raw)
	images := openImages(t, t.TempDir(), s)
	want := Disk{ID: "root", Size: gib, Image: &img}
	for name, left := range map[string]map[string]string{
		"before the first file":                                {},
		"while the description was written":                    {".root.json1234567890123456789": `{"id":"ro`},
		"after the description was written":                    {"root.json": `{"id":"root","size":1073741824,"image":null}`},
		"while the overlay was written":                        {"root.json": `{"id":"root","size":1073741824,"image":null}`, ".root.qcow21234567890123456789": "QFI"},
		"without a description, while the overlay was written": {".root.qcow21234567890123456789": ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "disks")
			require.NoError(t, os.Mkdir(dir, 0o700))
			for file, text := range left {
				require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600))
			}
			require.NoError(t, Build(t.Context(), images, dir, uid(), []Disk{want}))
			list, err := List(dir)
			require.NoError(t, err)
			require.Equal(t, []Disk{want}, list)
			entries, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Len(t, entries, 2)
		})
	}
}

func TestBuildRefuses(t *testing.T) {
	s := newSource()
	cow := s.add(qcow2Image(t, gib), qcow2.QCOW2)
	raw := s.add(make([]byte, 8192), qcow2.Raw)
	spied := qcow2Image(t, gib)
	binary.BigEndian.PutUint64(spied[8:], 512)
	binary.BigEndian.PutUint32(spied[16:], 11)
	copy(spied[512:], "/etc/shadow")
	spy := s.add(spied, qcow2.QCOW2)
	invalid := s.add([]byte("this is no qcow2"), qcow2.QCOW2)
	images := openImages(t, t.TempDir(), s)
	dir := filepath.Join(t.TempDir(), "disks")
	require.NoError(t, Build(t.Context(), images, dir, uid(), []Disk{{ID: "old", Size: gib, Image: &cow}, {ID: "blank", Size: gib}}))

	require.NoError(t, os.WriteFile(filepath.Join(dir, "lost.qcow2"), []byte("data"), 0o600))
	require.NoError(t, Build(t.Context(), images, dir, uid(), []Disk{{ID: "blank", Size: 2 * gib}}), "QEMU grows the disk")
	size, err := Size(dir, "blank")
	require.NoError(t, err)
	require.Equal(t, uint64(gib), size)
	_, err = Size(dir, "lost")
	require.ErrorIs(t, err, ErrRefused)
	_, err = Size(dir, "../disks/blank")
	require.Error(t, err)

	for _, tc := range []struct {
		name string
		disk Disk
		says string
	}{
		{"ID that is a path", Disk{ID: "../../x", Size: gib}, "id"},
		{"no id", Disk{Size: gib}, "id"},
		{"no size", Disk{ID: "a"}, "size of 0"},
		{"size that is not a multiple of 512", Disk{ID: "a", Size: 1000}, "size of 1000"},
		{"size above the limit", Disk{ID: "a", Size: 65 << 40}, "size of"},
		{"smaller than its image", Disk{ID: "a", Size: gib / 2, Image: &cow}, "1073741824 bytes, which do not fit in 536870912"},
		{"smaller than a raw image", Disk{ID: "a", Size: 4096, Image: &raw}, "do not fit"},
		{"image with a backing file", Disk{ID: "a", Size: gib, Image: &spy}, "backing file"},
		{"invalid image", Disk{ID: "a", Size: gib, Image: &invalid}, "refused"},
		{"smaller than before", Disk{ID: "blank", Size: gib / 2}, "has 1073741824 bytes already, more than 536870912"},
		{"image instead of a blank disk", Disk{ID: "blank", Size: gib, Image: &cow}, "another image"},
		{"no image for a disk that was built with one", Disk{ID: "old", Size: gib}, "another image"},
		{"disk without a description", Disk{ID: "lost", Size: gib}, "without a description"},
		{"other image", Disk{ID: "old", Size: gib, Image: &raw}, "another image"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before, err := List(dir)
			require.NoError(t, err)
			err = Build(t.Context(), images, dir, uid(), []Disk{tc.disk})
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, tc.says)
			after, err := List(dir)
			require.NoError(t, err)
			require.Equal(t, before, after)
		})
	}

	// A failed fetch does not return ErrRefused: another attempt may succeed.
	missing := Image{SHA256: cow.SHA256[1:] + "0", Size: 1, Format: qcow2.Raw}
	err = Build(t.Context(), images, dir, uid(), []Disk{{ID: "a", Size: gib, Image: &missing}})
	require.ErrorContains(t, err, "no member has it")
	require.False(t, errors.Is(err, ErrRefused))
}

// TestQEMUReadsTheChain checks that qemu-img reads from an overlay over its image: the content of the image, then
// zeros.
func TestQEMUReadsTheChain(t *testing.T) {
	testenv.Program(t, "qemu-img")
	s := newSource()
	img := s.add(bytes.Repeat([]byte("0123456789abcdef"), 4096), qcow2.Raw)
	images := openImages(t, t.TempDir(), s)
	dir := filepath.Join(t.TempDir(), "disks")
	require.NoError(t, Build(t.Context(), images, dir, uid(), []Disk{{ID: "root", Size: 1 << 20, Image: &img}}))
	require.NoError(t, exec.Command("qemu-img", "check", "-q", filepath.Join(dir, "root.qcow2")).Run())

	out := filepath.Join(t.TempDir(), "out")
	chain := `json:{"driver":"qcow2","file":{"driver":"file","filename":"` + filepath.Join(dir, "root.qcow2") +
		`"},"backing":{"driver":"raw","file":{"driver":"file","filename":"` + filepath.Join(images.dir, img.SHA256) + `"}}}`
	text, err := exec.Command("qemu-img", "convert", "-O", "raw", chain, out).CombinedOutput()
	require.NoError(t, err, "%s", text)
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Len(t, got, 1<<20)
	require.Equal(t, s.images[img.SHA256], got[:img.Size])
	require.Equal(t, make([]byte, 1<<20-img.Size), got[img.Size:])
}
