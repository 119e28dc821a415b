package volume

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

// writeDiff writes a stream of package rbddiff to a new file, and returns the file's path.
func writeDiff(t *testing.T, h rbddiff.Header, ranges ...rbddiff.Range) string {
	t.Helper()
	var b bytes.Buffer
	w, err := rbddiff.NewWriter(&b, h)
	require.NoError(t, err)
	for _, r := range ranges {
		require.NoError(t, w.Write(r))
	}
	require.NoError(t, w.Close())
	path := filepath.Join(t.TempDir(), "diff")
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o600))
	return path
}

// mergeFile calls merge for a full file without diffs.
func mergeFile(t *testing.T, path string) (raw *os.File, size uint64, err error) {
	t.Helper()
	in, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { in.Close() })
	raw, size, err = merge(t.Context(), path, in, nil)
	if err == nil {
		t.Cleanup(func() { raw.Close() })
	}
	return raw, size, err
}

// TestMergeKeepsHoles checks that ranges of zeros overwrite data, but take no space where the file has no data. A small
// file could otherwise fill the disk.
func TestMergeKeepsHoles(t *testing.T) {
	const size = 256 << 20
	full := writeDiff(t, rbddiff.Header{To: "a", Size: size}, rbddiff.Range{Offset: 1 << 20, Length: 8 << 10, Data: bytes.Repeat([]byte("a"), 8<<10)})
	zeros := writeDiff(t, rbddiff.Header{From: "a", To: "b", Size: size}, rbddiff.Range{Offset: 1<<20 + 100, Length: size - 1<<20 - 100})
	in, err := os.Open(full)
	require.NoError(t, err)
	defer in.Close()
	raw, got, err := merge(t.Context(), full, in, []string{zeros})
	require.NoError(t, err)
	defer raw.Close()
	require.EqualValues(t, size, got)
	content := make([]byte, 16<<10)
	_, err = raw.ReadAt(content, 1<<20)
	require.NoError(t, err)
	require.Equal(t, append(bytes.Repeat([]byte("a"), 100), make([]byte, 16<<10-100)...), content)
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(raw.Fd()), &st))
	require.Less(t, st.Blocks*512, int64(1<<20))
}

// TestMergeRefusesOtherExports checks that an export that cannot be read is an error. It must not be taken as the raw
// content of a disk.
func TestMergeRefusesOtherExports(t *testing.T) {
	for name, text := range map[string]string{
		"other version":   "rbd diff v2\n" + string(make([]byte, 1000)),
		"other format":    "rbd image v2\n" + string(make([]byte, 1000)),
		"truncated":       "rbd diff v1\nt\x04\x00",
		"without a size":  "rbd diff v1\ne",
		"damaged version": "rbd diff v",
	} {
		path := filepath.Join(t.TempDir(), "full")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		_, _, err := mergeFile(t, path)
		require.ErrorIs(t, err, rbddiff.ErrFormat, name)
	}
	path := filepath.Join(t.TempDir(), "raw")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("rbd"), 512), 0o600))
	_, size, err := mergeFile(t, path)
	require.NoError(t, err)
	require.EqualValues(t, 3*512, size)
}

// TestImportsHaveTheirOwnFiles checks that imports of the same file as different volumes do not share a temporary file,
// and that two processes cannot run the same import.
func TestImportsHaveTheirOwnFiles(t *testing.T) {
	full := filepath.Join(t.TempDir(), "disk.raw")
	diff := filepath.Join(t.TempDir(), "a.diff")
	one, err := createPacked("one", []string{full})
	require.NoError(t, err)
	defer one.close()
	two, err := createPacked("two", []string{full})
	require.NoError(t, err)
	defer two.close()
	three, err := createPacked("one", []string{full, diff})
	require.NoError(t, err)
	defer three.close()
	require.Len(t, map[string]bool{one.path: true, two.path: true, three.path: true}, 3)
	_, err = createPacked("one", []string{full})
	require.ErrorContains(t, err, "another process is importing")
	_, err = one.temporary.Write([]byte("rest"))
	require.NoError(t, err)
	one.close()
	again, err := createPacked("one", []string{full})
	require.NoError(t, err)
	defer again.close()
	require.Equal(t, one.path, again.path, "a repeated command continues with the same file")
	info, err := again.temporary.Stat()
	require.NoError(t, err)
	require.Zero(t, info.Size())
}
