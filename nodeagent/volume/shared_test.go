package volume

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// twoHosts returns two hosts that share a pool.
func twoHosts(t *testing.T) (a, b *host) {
	dir := t.TempDir()
	return newHost(t, dir, true), newHost(t, dir, true)
}

// TestHostsOpenVolumeAtOnce lets two hosts of a shared pool open a volume at the same time, for different VMs with the
// same generation, as after a forged assignment. One host must get the volume, and the error of the other host must
// name the VM that has it.
func TestHostsOpenVolumeAtOnce(t *testing.T) {
	a, b := twoHosts(t)
	require.Equal(t, a.ID(), b.ID())
	require.NotEqual(t, a.ID(), newHost(t, t.TempDir(), true).ID())
	a.make(Volume{ID: id(1), Size: mib})
	for generation := uint64(1); generation <= 100; generation++ {
		var files [2]Files
		var errs [2]error
		at := []Attachment{{"vm-x", generation}, {"vm-y", generation}}
		var calls sync.WaitGroup
		for i, h := range []*host{a, b} {
			calls.Go(func() { files[i], errs[i] = h.Open(t.Context(), id(1), at[i]) })
		}
		calls.Wait()
		winner := 0
		if errs[0] != nil {
			winner = 1
		}
		require.NoError(t, errs[winner])
		require.ErrorIs(t, errs[1-winner], ErrStale, "two hosts have the volume open")
		require.ErrorContains(t, errs[1-winner], "belongs to VM "+at[winner].VM)
		files[winner].Close()
		require.NoError(t, b.Release(t.Context(), id(1), at[winner]), "each host can release what no process has open")
	}
}

// TestHostIsLost opens a volume on a host that is then lost. Another host must not end the attachment while a process
// of the lost host has the file locked, and must say which host has the volume. When the lock has ended, the other host
// gets the volume. The lost host comes back with its old assignment, and must be refused.
func TestHostIsLost(t *testing.T) {
	a, b := twoHosts(t)
	a.make(Volume{ID: id(1), Size: mib})
	files, err := a.Open(t.Context(), id(1), Attachment{"vm-x", 3})
	require.NoError(t, err)
	for _, err := range []error{b.Detach(t.Context(), id(1), 3), b.Delete(t.Context(), id(1))} {
		require.ErrorIs(t, err, ErrElsewhere, "two hosts may write the volume")
		require.ErrorContains(t, err, a.o.Host+" opened it for VM vm-x")
	}
	require.NotErrorIs(t, a.Delete(t.Context(), id(1)), ErrElsewhere)
	files.Close() // The file system ends the locks of the lost host.
	require.NoError(t, b.Detach(t.Context(), id(1), 3))
	files, err = b.Open(t.Context(), id(1), Attachment{"vm-y", 4})
	require.NoError(t, err)
	defer files.Close()
	require.NoError(t, a.again())
	_, err = a.Open(t.Context(), id(1), Attachment{"vm-x", 3})
	require.ErrorIs(t, err, ErrStale)
	require.ErrorContains(t, err, "generation 3 is older than 4, which VM vm-y has")
	require.ErrorIs(t, a.Release(t.Context(), id(1), Attachment{"vm-x", 3}), ErrStale)
	require.NoError(t, a.Detach(t.Context(), id(1), 3), "the other host has ended this attachment")
	_, err = a.Open(t.Context(), id(1), Attachment{"vm-z", 5})
	require.ErrorIs(t, err, ErrElsewhere)
	require.Equal(t, Attachment{"vm-y", 4}, a.list().Volumes[0].Attachment)
}

// TestLateWriterChangesNothing interrupts a host while it makes a volume from a snapshot. The file system ends the
// locks of this host, and another host makes the volume and writes to it. Then the first host continues, and must
// change neither the record nor the content.
func TestLateWriterChangesNothing(t *testing.T) {
	a, b := twoHosts(t)
	a.make(Volume{ID: id(1), Size: 4 * mib})
	a.writeTo(1, 'a', 0, mib)
	a.snapshot(ref(1, 5), time.UnixMilli(7))
	from := ref(1, 5)
	v := Volume{ID: id(2), Size: 4 * mib, Source: &from}
	var r record
	var late *os.File
	require.NoError(t, a.change(t.Context(), func() (err error) {
		if r, err = a.beginFile(v); err == nil {
			late, err = a.newFile(r.fileName(v.ID))
		}
		return err
	}))
	defer late.Close()
	require.ErrorIs(t, b.Create(t.Context(), v), ErrInUse, "the other host is making the volume")
	require.ErrorIs(t, b.Delete(t.Context(), v.ID), ErrInUse)
	require.NoError(t, setLock(late, unix.F_UNLCK)) // as if the file system had ended the lock

	b.make(v)
	files, err := b.Open(t.Context(), v.ID, Attachment{"vm-y", 1})
	require.NoError(t, err)
	defer files.Close()
	_, err = files.Content.WriteAt([]byte("written by the guest"), 0)
	require.NoError(t, err)

	_, err = late.WriteAt(bytes.Repeat([]byte("l"), mib), 0)
	require.NoError(t, err)
	require.ErrorIs(t, a.change(t.Context(), func() error { return a.endFile(late, v.ID) }), errReplaced, "the volume of the other host was replaced")
	require.NoError(t, a.change(t.Context(), func() error { return a.removeUnfinished(late, v.ID, r) }))
	have := make([]byte, 20)
	f, err := os.Open(b.rawFile(2))
	require.NoError(t, err)
	defer f.Close()
	_, err = f.ReadAt(have, 0)
	require.NoError(t, err)
	require.Equal(t, "written by the guest", string(have), "the volume of the other host was replaced")
	require.Equal(t, Attachment{"vm-y", 1}, a.list().Volumes[1].Attachment)
}

// TestFlattenAfterLostLock flattens a volume on a host whose locks end during the copy. Another host opens the volume
// meanwhile, and its guest writes to the overlay. The copy must not replace the overlay.
func TestFlattenAfterLostLock(t *testing.T) {
	a, b := twoHosts(t)
	a.make(Volume{ID: id(1), Size: 4 * mib, Image: &a.image})
	opened := false
	err := a.Flatten(t.Context(), id(1), func(uint32) {
		if opened {
			return
		}
		opened = true // The record of Open. Open itself does not succeed, because the test cannot end the lock of Flatten.
		require.NoError(t, b.change(t.Context(), func() error {
			r, err := b.read(id(1))
			require.NoError(t, err)
			r.Attachment, r.Flushed, r.Host = Attachment{"vm-y", 2}, 1, b.o.Host
			return b.write(id(1), r)
		}))
	})
	require.True(t, opened)
	require.ErrorIs(t, err, errReplaced, "the copy replaced the overlay")
	require.Equal(t, []string{id(1) + ".json", id(1) + ".qcow2"}, b.names())
	status := b.list().Volumes[0]
	require.Equal(t, []any{Attachment{"vm-y", 2}, qcow2.QCOW2, false}, []any{status.Attachment, status.Format, status.Flattened})
}

// TestSnapshotOfLostHost lets another host record a snapshot as failed while the first host is still copying. The first
// host must not record the copy as complete afterwards. A snapshot that is complete is usable on each host.
func TestSnapshotOfLostHost(t *testing.T) {
	a, b := twoHosts(t)
	a.make(Volume{ID: id(1), Size: 4 * mib})
	a.writeTo(1, 'a', mib, mib)
	c, err := a.BeginSnapshot(t.Context(), ref(1, 5), nil)
	require.NoError(t, err)
	require.NoError(t, c.Copy(t.Context()))
	require.NoError(t, b.FailSnapshot(t.Context(), ref(1, 5), "interrupted"))
	require.ErrorIs(t, c.Finish(t.Context(), time.UnixMilli(7), "detached"), ErrRefused, "a failed snapshot became complete")
	s, err := b.Snapshot(ref(1, 5))
	require.NoError(t, err)
	require.Equal(t, Failed, s.State)

	a.snapshot(ref(1, 6), time.UnixMilli(8))
	from := ref(1, 6)
	b.make(Volume{ID: id(2), Size: 4 * mib, Source: &from})
	content, err := os.ReadFile(b.rawFile(2))
	require.NoError(t, err)
	require.True(t, bytes.Equal(bytes.Repeat([]byte("a"), mib), content[mib:2*mib]))
	require.NoError(t, b.DeleteSnapshot(t.Context(), ref(1, 6)))
	_, err = a.Snapshot(ref(1, 6))
	require.ErrorIs(t, err, ErrNoSnapshot)
}

// TestRecordAfterLostLock lets writes to pool.lock fail, as they do when the file system has ended the lock of a host.
// The host must not replace a record, and must not give the volume to QEMU.
func TestRecordAfterLostLock(t *testing.T) {
	a, b := twoHosts(t)
	a.make(Volume{ID: id(1), Size: mib})
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	require.NoError(t, err)
	defer full.Close()
	good := a.lock
	a.lock = full
	err = a.write(id(1), record{State: ready, Size: mib, Format: qcow2.Raw, Attachment: Attachment{"vm-x", 9}})
	require.ErrorContains(t, err, "the lock of the pool was lost")
	a.lock = good
	require.Equal(t, Attachment{}, b.list().Volumes[0].Attachment)
	text, err := os.ReadFile(filepath.Join(a.dir, lockName))
	require.NoError(t, err)
	require.Contains(t, string(text), a.o.Host, "the lock names the host that has changed the pool last")
}

// TestLateRename interrupts a host after its write to pool.lock and before the rename of a new record, and ends the
// lock of this host. Another host then replaces the record. The rename must fail when the first host continues.
func TestLateRename(t *testing.T) {
	a, b := twoHosts(t)
	a.make(Volume{ID: id(1), Size: mib})
	late := filepath.Join(a.dir, "."+id(1)+".json1234567890123")
	old, err := os.ReadFile(filepath.Join(a.dir, id(1)+".json"))
	require.NoError(t, err)
	require.NoError(t, a.change(t.Context(), func() error {
		require.NoError(t, os.WriteFile(late, old, 0o600))
		return a.confirmLock()
	}))
	files, err := b.Open(t.Context(), id(1), Attachment{"vm-y", 4})
	require.NoError(t, err)
	defer files.Close()
	require.ErrorIs(t, os.Rename(late, filepath.Join(a.dir, id(1)+".json")), os.ErrNotExist, "an old record replaces a newer one")
	require.Equal(t, Attachment{"vm-y", 4}, a.list().Volumes[0].Attachment)
}

// TestTemporaryRecordBeforeConfirmation checks that a host writes the temporary file of a record before it writes to
// pool.lock. Otherwise, the next host would not find this file in the situation of TestLateRename.
func TestTemporaryRecordBeforeConfirmation(t *testing.T) {
	a, _ := twoHosts(t)
	a.make(Volume{ID: id(1), Size: mib})
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	require.NoError(t, err)
	events := os.NewFile(uintptr(fd), "inotify")
	defer events.Close()
	_, err = unix.InotifyAddWatch(fd, a.dir, unix.IN_CREATE|unix.IN_MODIFY|unix.IN_MOVED_TO)
	require.NoError(t, err)
	require.NoError(t, a.Resize(t.Context(), id(1), 2*mib))
	buf := make([]byte, 4096)
	n, err := events.Read(buf)
	require.NoError(t, err)
	created := bytes.Index(buf[:n], []byte("."+id(1)+".json"))
	confirmed := bytes.Index(buf[:n], []byte(lockName))
	require.NotEqual(t, -1, created)
	require.Greater(t, confirmed, created)
}

// TestRecordIsNotReplacedByNewVolume makes a volume on a host that does not see the existing record yet, as with the
// cache of a network file system. An empty record, which an interrupted creation leaves, must be no volume.
func TestRecordIsNotReplacedByNewVolume(t *testing.T) {
	a, b := twoHosts(t)
	a.make(Volume{ID: id(1), Size: mib})
	require.ErrorIs(t, b.change(t.Context(), func() error { return b.claimRecord(id(1)) }), ErrInUse)
	require.Len(t, a.list().Volumes, 1)
	for range 2 {
		require.NoError(t, b.change(t.Context(), func() error { return b.claimRecord(id(2)) }))
	}
	_, err := a.Status(id(2))
	require.ErrorIs(t, err, ErrNotFound)
	require.Len(t, a.list().Volumes, 1)
	require.Empty(t, a.list().Unknown)
	a.make(Volume{ID: id(2), Size: mib})
	require.NoError(t, b.Delete(t.Context(), id(2)))
	require.NoError(t, b.change(t.Context(), func() error { return b.claimRecord(id(3)) }))
	require.NoError(t, a.Delete(t.Context(), id(3)))
	require.Equal(t, []string{id(1) + ".json", id(1) + ".raw", id(2) + ".deleted", id(3) + ".deleted"}, a.names())
}

// TestMountsOfSharedPools checks which file systems are refused for shared pools.
func TestMountsOfSharedPools(t *testing.T) {
	for _, c := range []struct {
		fsType  string
		options []string
		why     string
	}{
		{"ext4", []string{"rw", "relatime"}, ""},
		{"ceph", []string{"rw", "acl"}, ""},
		{"nfs4", []string{"rw", "vers=4.2", "hard", "local_lock=none"}, ""},
		{"nfs4", []string{"rw", "vers=4.2", "local_lock=posix"}, "local_lock=posix makes locks local"},
		{"nfs", []string{"rw", "vers=3", "local_lock=none"}, "NFS before version 4"},
		{"nfs", []string{"rw", "vers=3", "nolock", "local_lock=all"}, "nolock makes locks local"},
		{"ocfs2", []string{"rw", "localflocks"}, "localflocks makes"},
		{"gfs2", []string{"rw", "lockproto=lock_nolock"}, "lockproto=lock_nolock makes"},
	} {
		err := checkMount(c.fsType, c.options)
		if c.why == "" {
			require.NoError(t, err, c.options)
		} else {
			require.ErrorContains(t, err, c.why)
		}
	}
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	require.NoError(t, unix.Mount("trivet-test-volume", dir, "tmpfs", unix.MS_NOATIME, "size=1m,mode=700"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	h := newHost(t, dir, true)
	t.Cleanup(h.Close) // before the file system is unmounted
	fsType, options, err := mountOf(int(h.Pool.dir.Fd()))
	require.NoError(t, err)
	require.Equal(t, "tmpfs", fsType)
	require.Contains(t, options, "noatime")
	require.Contains(t, options, "size=1024k")
	require.Empty(t, h.names(), "the test of the locks leaves no file")
}

// TestDeletedVolumeOfSharedPool deletes a volume on one host of a shared pool. Another host, whose desired state still
// contains the volume, must not make it again. A pool that is not shared must not record the deletion.
func TestDeletedVolumeOfSharedPool(t *testing.T) {
	a, b := twoHosts(t)
	ctx := t.Context()
	a.make(Volume{ID: id(1), Size: mib})
	for _, v := range []string{id(1), id(2)} { // Volume 2 was not made by any host yet.
		require.NoError(t, a.Delete(ctx, v))
		require.NoError(t, a.Delete(ctx, v), "a repeated call")
		err := b.Create(ctx, Volume{ID: v, Size: mib})
		require.ErrorIs(t, err, ErrRefused, "a deleted volume was made again")
		require.ErrorContains(t, err, "the volume was deleted")
		_, err = b.Open(ctx, v, Attachment{"vm-x", 1})
		require.ErrorIs(t, err, ErrNotFound)
	}
	require.Equal(t, Listing{}, b.list())
	require.NoError(t, b.ForgetDeletions(ctx, time.Hour))
	require.ErrorIs(t, b.Create(ctx, Volume{ID: id(1), Size: mib}), ErrRefused)
	require.NoError(t, b.ForgetDeletions(ctx, 0))
	require.NoError(t, b.Create(ctx, Volume{ID: id(1), Size: mib}), "the deletion is forgotten")

	alone := newHost(t, t.TempDir(), false)
	alone.make(Volume{ID: id(1), Size: mib})
	require.NoError(t, alone.Delete(ctx, id(1)))
	require.NoFileExists(t, filepath.Join(alone.o.Path, id(1)+".deleted"))
}

// TestSnapshotBeforeDetach begins a snapshot of a volume that a lost host had opened, before the attachment is ended.
// This must fail, because the copy would lock the volume, and the attachment could then not be ended.
func TestSnapshotBeforeDetach(t *testing.T) {
	a, b := twoHosts(t)
	ctx := t.Context()
	a.make(Volume{ID: id(1), Size: mib})
	files, err := a.Open(ctx, id(1), Attachment{"vm-x", 3})
	require.NoError(t, err)
	files.Close() // The file system ends the locks of the lost host.
	ref := SnapshotRef{Volume: id(1), ID: id(2)}
	_, err = b.BeginSnapshot(ctx, ref, nil)
	require.ErrorIs(t, err, ErrNotNow)
	require.ErrorContains(t, err, a.o.Host+" opened the volume for VM vm-x")
	require.NoError(t, b.Detach(ctx, id(1), 3))
	c, err := b.BeginSnapshot(ctx, ref, nil)
	require.NoError(t, err)
	defer c.close()
	require.False(t, c.Attached())
}
