package image

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestScrub damages a member's file of an image. When the file was verified a week ago, the member must notice the
// damage and pull a good copy. Good files must be verified once a week only.
func TestScrub(t *testing.T) {
	w := newWorld(t, 2)
	one, two := w.member(1), w.member(2)
	stop := w.run(one)
	w.run(two)
	data := noise(3 << 20)
	made, err := one.Create(member(t), described(w.write("disk.raw", data)), [32]byte{})
	require.NoError(t, err)
	w.until(made.Image.ID, "both members have it", func(i *cloud.Image) bool { return len(i.Holders) == 2 })
	stop()
	path := filepath.Join(w.dirs[1], sumOf(data))
	damage := func() {
		bad := bytes.Clone(data)
		bad[len(bad)/2] ^= 1
		require.NoError(t, os.WriteFile(path, bad, 0o400))
	}
	damage()
	sum, err := w.files[1].due(time.Now().Add(-scrubInterval))
	require.NoError(t, err)
	require.Empty(t, sum, "the file was stored less than a week ago")

	old := time.Now().Add(-scrubInterval - time.Hour)
	require.NoError(t, os.Chtimes(path, old, old))
	w.run(w.member(1))
	require.Eventually(t, func() bool {
		got, err := os.ReadFile(path)
		return err == nil && bytes.Equal(data, got)
	}, 30*time.Second, time.Millisecond)
	i := w.until(made.Image.ID, "both members have it again", func(i *cloud.Image) bool { return len(i.Holders) == 2 })
	require.Equal(t, cloud.ImageAvailable, i.Status)

	// A good file stays, and its time is set.
	require.NoError(t, os.Chtimes(path, old, old))
	damaged, err := w.files[1].scrub(t.Context(), sumOf(data))
	require.NoError(t, err)
	require.False(t, damaged)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Less(t, time.Since(info.ModTime()), time.Hour)
}

// TestScrubKeepsReplacedFile checks that scrub does not remove a good file that replaced the damaged one meanwhile.
func TestScrubKeepsReplacedFile(t *testing.T) {
	f, err := OpenFiles(t.TempDir())
	require.NoError(t, err)
	data := []byte("the bytes of a part")
	path := filepath.Join(f.dir, sumOf(data))
	require.NoError(t, os.WriteFile(path, []byte("damaged"), 0o400))
	open, err := os.Open(path)
	require.NoError(t, err)
	defer open.Close()
	require.NoError(t, f.StorePart(t.Context(), sumOf(data), bytes.NewReader(data)))
	require.NoError(t, f.removeSame(open, path))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, data, got)
	damaged, err := f.scrub(t.Context(), sumOf([]byte("no such file")))
	require.NoError(t, err)
	require.False(t, damaged)
}
