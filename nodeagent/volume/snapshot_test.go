package volume

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

func ref(volume, n int) SnapshotRef { return SnapshotRef{Volume: id(volume), ID: id(n)} }

// rawFile returns the path of the file of a raw volume.
func (h *host) rawFile(n int) string { return filepath.Join(h.dir, id(n)+".raw") }

// writeTo writes a byte pattern to a volume that no process has open.
func (h *host) writeTo(n int, pattern byte, offset int64, length int) {
	h.Helper()
	f, err := os.OpenFile(h.rawFile(n), os.O_RDWR, 0)
	require.NoError(h, err)
	defer f.Close()
	_, err = f.WriteAt(bytes.Repeat([]byte{pattern}, length), offset)
	require.NoError(h, err)
}

// snapshot makes a snapshot of a volume that no process has open.
func (h *host) snapshot(r SnapshotRef, taken time.Time) {
	h.Helper()
	c, err := h.BeginSnapshot(h.Context(), r, nil)
	require.NoError(h, err)
	require.False(h, c.Attached())
	require.NoError(h, c.Copy(h.Context()))
	require.NoError(h, c.Finish(h.Context(), taken, "detached"))
}

// TestSnapshotOfDetachedVolume makes a snapshot, changes the volume, makes another volume from the snapshot, and
// deletes the first volume with its snapshot.
func TestSnapshotOfDetachedVolume(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.testSnapshots()
}

// TestSnapshotOnReflinks is TestSnapshotOfDetachedVolume on a file system where files share blocks.
func TestSnapshotOnReflinks(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	image := filepath.Join(t.TempDir(), "xfs")
	require.NoError(t, exec.Command("truncate", "-s", "320M", image).Run())
	if out, err := exec.Command("mkfs.xfs", "-q", "-m", "reflink=1", image).CombinedOutput(); err != nil {
		t.Skipf("cannot make a file system with reflinks: %v %s", err, out)
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-o", "loop", image, dir).CombinedOutput(); err != nil {
		t.Skipf("cannot mount a file system with reflinks: %v %s", err, out)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	require.NoError(t, os.Chmod(dir, 0o700))
	h := newHost(t, dir, false)
	t.Cleanup(h.Close)
	before, err := h.Space()
	require.NoError(t, err)
	h.make(Volume{ID: id(8), Size: 64 * mib})
	h.writeTo(8, 'r', 0, 32*mib)
	h.snapshot(ref(8, 9), time.Now())
	after, err := h.Space()
	require.NoError(t, err)
	require.Less(t, before.Free-after.Free, uint64(48*mib), "the files share their blocks")
	require.NoError(t, h.Delete(t.Context(), id(8)))
	h.testSnapshots()
}

func (h *host) testSnapshots() {
	t := h.T
	h.make(Volume{ID: id(1), Size: 64 * mib})
	h.writeTo(1, 'a', 3*mib, 2*mib)
	taken := time.UnixMilli(1_800_000_000_123)
	c, err := h.BeginSnapshot(t.Context(), ref(1, 5), nil)
	require.NoError(t, err)
	_, err = h.Open(t.Context(), id(1), Attachment{"x", 1})
	require.ErrorIs(t, err, ErrInUse, "the volume cannot change while it is copied")
	s, err := h.Snapshot(ref(1, 5))
	require.NoError(t, err)
	require.Equal(t, Copying, s.State)
	require.NoError(t, c.Copy(t.Context()))
	require.NoError(t, c.Finish(t.Context(), taken, "detached"))
	h.writeTo(1, 'b', 0, 8*mib)

	s, err = h.Snapshot(ref(1, 5))
	require.NoError(t, err)
	require.Less(t, s.Stored, uint64(8*mib), "the holes of the volume are holes of the copy")
	s.Stored = 0
	require.Equal(t, Snapshot{
		Version: 1, State: Complete, Size: 64 * mib, Format: qcow2.Raw, TakenAt: taken.UnixMilli(), Consistency: "detached",
	}, s)
	_, err = h.BeginSnapshot(t.Context(), ref(1, 5), nil)
	require.ErrorIs(t, err, ErrRefused, "a snapshot is not made twice")
	require.NoError(t, h.FailSnapshot(t.Context(), ref(1, 5), "too late"))
	list := h.list()
	require.Len(t, list.Volumes, 1)
	require.Empty(t, list.Unknown)

	from := ref(1, 5)
	restored := Volume{ID: id(2), Size: 96 * mib, Source: &from}
	for range 2 {
		h.make(restored)
	}
	data, err := os.ReadFile(h.rawFile(2))
	require.NoError(t, err)
	require.Len(t, data, 96*mib)
	want := make([]byte, 96*mib)
	copy(want[3*mib:], bytes.Repeat([]byte("a"), 2*mib))
	require.True(t, bytes.Equal(want, data), "the volume has the content of the snapshot")
	none := ref(1, 6)
	require.ErrorIs(t, h.Create(t.Context(), Volume{ID: id(3), Size: 96 * mib, Source: &none}), ErrNoSnapshot)
	require.ErrorIs(t, h.Create(t.Context(), Volume{ID: id(3), Size: 32 * mib, Source: &from}), ErrRefused)
	require.NoError(t, h.Delete(t.Context(), id(3)))

	require.NoError(t, os.Remove(filepath.Join(h.dir, from.file(qcow2.Raw))))
	_, err = h.Snapshot(from)
	require.ErrorContains(t, err, "missing from the pool")
	h.snapshot(ref(1, 6), taken)
	require.NoError(t, h.DeleteSnapshot(t.Context(), ref(1, 6)))
	require.NoError(t, h.DeleteSnapshot(t.Context(), ref(1, 6)), "a second deletion has nothing to do")
	h.snapshot(ref(1, 7), taken)
	require.NoError(t, h.Delete(t.Context(), id(1)))
	require.Equal(t, []string{id(2) + ".json", id(2) + ".raw"}, h.names(), "a deleted volume leaves no snapshots")
	require.NoError(t, h.Delete(t.Context(), id(2)))
}

// TestInterruptedSnapshot ends a program during a copy, of a volume that nobody has open and of one that QEMU has open.
// The copy is neither complete nor repeated.
func TestInterruptedSnapshot(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: mib})
	c, err := h.BeginSnapshot(t.Context(), ref(1, 5), nil)
	require.NoError(t, err)
	c.close()
	files, err := h.Open(t.Context(), id(1), Attachment{"x", 1})
	require.NoError(t, err)
	defer files.Close()
	c, err = h.BeginSnapshot(t.Context(), ref(1, 6), nil)
	require.NoError(t, err)
	require.True(t, c.Attached())
	require.Error(t, c.Copy(t.Context()))
	st, err := c.Target().Stat()
	require.NoError(t, err)
	info, err := qcow2.Inspect(c.Target(), st.Size())
	require.NoError(t, err)
	require.Equal(t, uint64(mib), info.VirtualSize)
	c.close()
	require.NoError(t, h.again())
	for _, r := range []SnapshotRef{ref(1, 5), ref(1, 6)} {
		s, err := h.Snapshot(r)
		require.NoError(t, err)
		require.Equal(t, Copying, s.State)
		_, err = h.BeginSnapshot(t.Context(), r, nil)
		require.ErrorIs(t, err, ErrRefused)
		require.NoError(t, h.FailSnapshot(t.Context(), r, "interrupted"))
		s, err = h.Snapshot(r)
		require.NoError(t, err)
		require.Equal(t, []any{Failed, "interrupted"}, []any{s.State, s.Error})
	}
	require.Equal(t, []string{
		id(1) + "." + id(5) + ".snapshot.json", id(1) + "." + id(6) + ".snapshot.json", id(1) + ".json", id(1) + ".raw",
	}, h.names())

	c, err = h.BeginSnapshot(t.Context(), ref(1, 7), nil)
	require.NoError(t, err)
	require.NoError(t, c.Finish(t.Context(), time.Now(), "crash"))
	s, err := h.Snapshot(ref(1, 7))
	require.NoError(t, err)
	require.Equal(t, qcow2.QCOW2, s.Format)
	require.Less(t, s.Stored, uint64(mib), "the room that was reserved and not used is free again")
	c, err = h.BeginSnapshot(t.Context(), ref(1, 8), nil)
	require.NoError(t, err)
	require.NoError(t, c.Abandon(t.Context()))
	_, err = h.Snapshot(ref(1, 8))
	require.ErrorIs(t, err, ErrNoSnapshot)
}

// TestSnapshotInFullPool makes snapshots in a pool without room for them. They fail and leave nothing, and what QEMU
// will copy is reserved before.
func TestSnapshotInFullPool(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	require.NoError(t, unix.Mount("trivet-test-volume", dir, "tmpfs", 0, "size=16m,mode=700"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	h := newHost(t, dir, false)
	t.Cleanup(h.Close)
	h.make(Volume{ID: id(1), Size: 64 * mib})
	h.writeTo(1, 'a', 0, 10*mib)
	before, err := h.Space()
	require.NoError(t, err)

	c, err := h.BeginSnapshot(t.Context(), ref(1, 5), nil)
	require.NoError(t, err)
	require.ErrorContains(t, c.Copy(t.Context()), "the storage pool is full")
	require.NoError(t, c.Fail(t.Context(), "the storage pool is full"))
	require.NoError(t, h.DeleteSnapshot(t.Context(), ref(1, 5)))
	files, err := h.Open(t.Context(), id(1), Attachment{"x", 1})
	require.NoError(t, err)
	_, err = h.BeginSnapshot(t.Context(), ref(1, 6), nil)
	require.ErrorContains(t, err, "the storage pool is full")
	files.Close()
	require.Equal(t, []string{id(1) + ".json", id(1) + ".raw"}, h.names())
	after, err := h.Space()
	require.NoError(t, err)
	require.Equal(t, before, after)

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	c, err = h.BeginSnapshot(t.Context(), ref(1, 7), nil)
	require.NoError(t, err)
	require.ErrorIs(t, c.Copy(ended), context.Canceled)
	require.NoError(t, c.Abandon(t.Context()))
}
