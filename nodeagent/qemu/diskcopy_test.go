package qemu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// deviceIO makes QEMU write to or read from a disk like its guest does, by a command of qemu-io.
func (l *lab) deviceIO(p *Process, disk, command string) string {
	l.Helper()
	conn, err := p.work.Conn(l.ctx)
	require.NoError(l, err)
	var out string
	line := fmt.Sprintf("qemu-io -d /machine/peripheral/%s/virtio-backend \"%s\"", deviceID(disk), command)
	require.NoError(l, conn.Do(l.ctx, "human-monitor-command", object{"command-line": line}, &out))
	require.NotContains(l, out, "rror", command)
	return out
}

// copyTarget returns an empty image in the directory dir, for a copy of a disk of size bytes.
func (l *lab) copyTarget(dir, disk string, size uint64) CopyTarget {
	l.Helper()
	f, err := os.Create(filepath.Join(dir, "copy-of-"+disk))
	require.NoError(l, err)
	l.Cleanup(func() { _ = f.Close() })
	_, err = qcow2.Create(f, size)
	require.NoError(l, err)
	return CopyTarget{Disk: disk, File: f, Size: size, Base: disk == "root"}
}

// flat returns the bytes that a guest would read from an image. options are the image options of qemu-img
// (--image-opts).
func flat(t *testing.T, options string) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "flat")
	out, err := exec.Command("qemu-img", "convert", "--image-opts", options, "-O", "raw", path).CombinedOutput()
	require.NoError(t, err, "%s", out)
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return data
}

// count writes a counter to the disks a and b in turn, each time first to a, until the returned function is called.
func (l *lab) count(p *Process, a, b string) (stop func()) {
	ctx, cancel := context.WithCancel(l.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 1; ctx.Err() == nil; n++ {
			for _, disk := range []string{a, b} {
				l.deviceIO(p, disk, fmt.Sprintf("write -P %d 0 512", n%256))
			}
		}
	}()
	return func() { cancel(); <-done }
}

const diskBytes = 8 << 20

// copyLab is a running guest with the raw disks d0, without limits, and d1, with limits, beside its disk root.
type copyLab struct {
	*lab
	p     *Process
	files Files
}

func newCopyLab(t *testing.T) *copyLab {
	l := &copyLab{lab: newLab(t)}
	var s Spec
	s, l.files = l.bootable()
	l.p = l.launch(s, l.files)
	require.NoError(t, l.p.Resume(l.ctx))
	l.says("GUEST UP\n")
	for i := range 2 {
		d, f := l.blank(fmt.Sprintf("d%d", i), Virtio, diskBytes)
		d.IOPS = uint64(i) * 5000
		require.NoError(t, l.p.PlugDisk(l.ctx, d, f))
	}
	return l
}

// TestCopyOfOneInstant copies two disks to which the guest writes a counter in turn. At each instant the counters
// differ by at most one, so those in the copies must too. The file systems of the guest are frozen only while the
// copies begin.
func TestCopyOfOneInstant(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	l.deviceIO(l.p, "d0", "write -P 7 1M 2M")
	l.deviceIO(l.p, "root", "write -P 9 64k 64k")
	before, sets := l.nodes(l.p)
	stop := l.count(l.p, "d0", "d1")
	time.Sleep(100 * time.Millisecond) // some writes happen before the copies and some during them
	dir := t.TempDir()
	targets := []CopyTarget{l.copyTarget(dir, "d0", diskBytes), l.copyTarget(dir, "d1", diskBytes), l.copyTarget(dir, "root", 1<<30)}
	begun := time.Now()
	out, err := l.p.CopyDisks(l.ctx, targets)
	stop()
	require.NoError(t, err)
	require.True(t, out.Frozen)
	require.False(t, out.Taken.Before(begun) || out.Taken.After(time.Now()))
	require.Equal(t, []string{"guest-fsfreeze-freeze", "guest-fsfreeze-thaw"}, agent.commands(), "the guest is thawed")

	var data [2][]byte
	for i := range data {
		data[i] = flat(t, "driver=qcow2,file.filename="+targets[i].File.Name())
	}
	a, b := data[0][0], data[1][0]
	require.LessOrEqual(t, a-b, byte(1), "the counters in the copies are %d and %d: they are not of one instant", a, b)
	require.Equal(t, byte(7), data[0][1<<20])
	require.Equal(t, byte(0), data[0][3<<20])
	st, err := targets[0].File.Stat()
	require.NoError(t, err)
	require.Less(t, st.Size(), int64(4<<20), "zeros are not stored")

	after, setsAfter := l.nodes(l.p)
	require.ElementsMatch(t, before, after)
	require.Equal(t, sets, setsAfter)
	require.Zero(t, openCopies(t, l.p.Record().PID, targets[0].File))
	base := ",backing.driver=raw,backing.file.filename=" + l.files.Disks["root"].Base.Name()
	require.NoError(t, l.p.PowerOff(l.ctx))
	l.exited(l.p)
	whole := flat(t, "driver=qcow2,file.filename="+l.files.Disks["root"].Overlay.Name()+base)
	require.Equal(t, byte(9), whole[64<<10])
	require.True(t, slices.Equal(whole, flat(t, "driver=qcow2,file.filename="+targets[2].File.Name()+base)))
}

// TestCopyWithoutRoom copies a disk to a file system that is too small. The guest continues to run, also if it writes
// during the copy, and QEMU keeps nothing of the copy.
func TestCopyWithoutRoom(t *testing.T) {
	l := newCopyLab(t)
	dir := t.TempDir()
	require.NoError(t, unix.Mount("trivet-test-qemu", dir, "tmpfs", 0, "size=1m,mode=700"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	l.deviceIO(l.p, "d0", "write -P 7 0 8M")
	before, sets := l.nodes(l.p)
	full := l.copyTarget(dir, "d0", diskBytes)
	_, err := l.p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "d1", diskBytes), full})
	require.ErrorContains(t, err, "No space left on device")
	l.eventually(func() bool { s, err := l.p.Status(l.ctx); return err == nil && s.Running }, "the guest runs")
	l.deviceIO(l.p, "d0", "write -P 8 0 8M")
	after, setsAfter := l.nodes(l.p)
	require.ElementsMatch(t, before, after)
	require.Equal(t, sets, setsAfter)
	require.Zero(t, openCopies(t, l.p.Record().PID, full.File))
	_, err = l.p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "d0", diskBytes)})
	require.NoError(t, err, "a later copy succeeds")
}

// TestCopyIsCancelled checks that a copy whose context has ended leaves nothing in QEMU, and the errors for a second
// copy at the same time and for an unknown disk.
func TestCopyIsCancelled(t *testing.T) {
	l := newCopyLab(t)
	before, _ := l.nodes(l.p)
	ctx, cancel := context.WithCancel(l.ctx)
	cancel()
	_, err := l.p.CopyDisks(ctx, []CopyTarget{l.copyTarget(t.TempDir(), "d0", diskBytes)})
	require.ErrorIs(t, err, context.Canceled)
	after, _ := l.nodes(l.p)
	require.ElementsMatch(t, before, after)
	l.p.copies.Lock()
	_, err = l.p.CopyDisks(l.ctx, nil)
	l.p.copies.Unlock()
	require.ErrorIs(t, err, ErrCopying)
	_, err = l.p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "none", diskBytes)})
	require.ErrorContains(t, err, "the VM has no disk none")
}

// TestDiskIsRemovedDuringCopy removes a disk while it is copied. The copy ends with an error, and QEMU closes the disk.
func TestDiskIsRemovedDuringCopy(t *testing.T) {
	l := newCopyLab(t)
	l.deviceIO(l.p, "d0", "write -P 7 0 8M")
	target := l.copyTarget(t.TempDir(), "d0", diskBytes)
	_, actions, err := l.p.prepareCopies(l.ctx, []CopyTarget{target})
	require.NoError(t, err)
	actions[0]["data"].(object)["speed"] = 64 << 10 // bytes a second, so that the copy is in progress for two minutes
	conn, err := l.p.work.Conn(l.ctx)
	require.NoError(t, err)
	require.NoError(t, conn.Do(l.ctx, "transaction", object{"actions": actions}, nil))
	released := false
	l.remove(l.p, "d0", func(Disk) error { released = true; return nil })
	require.True(t, released)
	require.ErrorContains(t, l.p.waitCopies(l.ctx, 1), "canceled")
	require.NoError(t, l.p.endCopies(l.ctx))
	require.Zero(t, openCopies(t, l.p.Record().PID, target.File))
}

// TestInterruptedCopy ends the agent after it has begun a copy and frozen the guest. The next agent ends the copy and
// thaws the guest.
func TestInterruptedCopy(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	l.deviceIO(l.p, "d0", "write -P 7 0 8M")
	before, sets := l.nodes(l.p)
	target := l.copyTarget(t.TempDir(), "d0", diskBytes)
	_, actions, err := l.p.prepareCopies(l.ctx, []CopyTarget{target})
	require.NoError(t, err)
	frozen, err := l.p.freeze(l.ctx)
	require.NoError(t, err)
	require.True(t, frozen)
	conn, err := l.p.work.Conn(l.ctx)
	require.NoError(t, err)
	require.NoError(t, conn.Do(l.ctx, "transaction", object{"actions": actions}, nil))
	l.p.Close()

	p, err := l.launcher.Adopt(l.ctx, l.home)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	l.eventually(func() bool { return slices.Contains(agent.commands(), "guest-fsfreeze-thaw") }, "the guest is thawed")
	l.eventually(func() bool {
		after, setsAfter := l.nodes(p)
		return len(after) == len(before) && setsAfter == sets
	}, "QEMU has nothing of the copy")
	require.Zero(t, openCopies(t, p.Record().PID, target.File))
	_, err = os.Lstat(l.home.path(frozenName))
	require.ErrorIs(t, err, os.ErrNotExist)
	var jobs []job
	conn, err = p.inspect.Conn(l.ctx)
	require.NoError(t, err)
	require.NoError(t, conn.Do(l.ctx, "query-jobs", nil, &jobs))
	require.Empty(t, jobs)
}
