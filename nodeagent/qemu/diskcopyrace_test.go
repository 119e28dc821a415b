package qemu

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestCopyWhileFlattening copies a disk whose base image QEMU is just copying. The copy begins at once and has the
// whole content. FlattenDisk waits for the end of the copy, and then completes.
func TestCopyWhileFlattening(t *testing.T) {
	l := newCopyLab(t)
	d, files := l.overlay("data", Virtio)
	require.NoError(t, l.p.PlugDisk(l.ctx, d, files))
	d = l.p.Record().Spec.Disks[len(l.p.Record().Spec.Disks)-1]
	require.NoError(t, l.p.FlattenDisk(l.ctx, "data", nil))
	l.slow(l.p, d, 1<<16)
	require.True(t, l.flattening(l.p, "data").Running)
	target := l.copyTarget(t.TempDir(), "data", overlaySize)
	target.Base = true
	_, err := l.p.CopyDisks(l.ctx, []CopyTarget{target})
	require.NoError(t, err)
	_, err = l.p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "data", overlaySize)})
	require.ErrorIs(t, err, ErrDisksChanged, "the file was made for a disk without a base image")
	base := ",backing.driver=raw,backing.file.filename=" + files.Base.Name()
	content := flat(t, "driver=qcow2,file.filename="+target.File.Name()+base)
	require.True(t, bytes.Equal(bytes.Repeat([]byte{0x5a}, overlaySize), content))

	l.p.copies.Lock() // as CopyDisks does
	l.p.copying.Store(true)
	require.ErrorIs(t, l.p.FlattenDisk(l.ctx, "data", nil), ErrCopying)
	require.Equal(t, Flattening{Waiting: true}, l.flattening(l.p, "data"))
	l.p.copying.Store(false)
	l.p.copies.Unlock()
	require.Equal(t, 1, l.flatten(l.p, "data"))
	l.isFlat(files.Overlay)
}

// TestCopyOfAnotherDisk detaches a disk after the files of its copy were passed to QEMU, and attaches another disk in
// the same slot, which has the same names in QEMU. The content of this other disk must not get into the copy.
func TestCopyOfAnotherDisk(t *testing.T) {
	l := newCopyLab(t)
	before, _ := l.nodes(l.p)
	disks, actions, err := l.p.prepareCopies(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "d0", diskBytes)})
	require.NoError(t, err)
	slot := disks[0].Slot
	l.remove(l.p, "d0", func(Disk) error { return nil })
	other, files := l.blank("other", Virtio, diskBytes)
	other.Slot = slot
	require.NoError(t, l.p.PlugDisk(l.ctx, other, files))
	require.ErrorIs(t, l.p.beginCopies(l.ctx, disks, actions), ErrDisksChanged)
	jobs, err := l.p.copyJobs(l.ctx, newJobWait())
	require.NoError(t, err)
	require.Empty(t, jobs)
	require.NoError(t, l.p.endCopies(l.ctx))
	after, _ := l.nodes(l.p)
	require.ElementsMatch(t, before, after)
}

// TestGuestIsThawedLater freezes a guest whose agent does not answer for a while. The copy fails, and the guest is
// thawed as soon as its agent answers, without another copy and without a restart of the agent.
func TestGuestIsThawedLater(t *testing.T) {
	l := newCopyLab(t)
	l.p.thawWithin = time.Second
	agent := l.fakeAgent()
	agent.ignore["guest-fsfreeze-thaw"] = true
	_, err := l.p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "d0", diskBytes)})
	require.ErrorContains(t, err, "thaw the guest's file systems")
	frozen := func() bool { _, err := os.Lstat(l.home.path(frozenName)); return err == nil }
	require.True(t, frozen())
	agent.mu.Lock()
	agent.ignore["guest-fsfreeze-thaw"] = false
	agent.mu.Unlock()
	l.eventually(func() bool { return !frozen() }, "the guest is thawed")
	require.Equal(t, "guest-fsfreeze-thaw", agent.commands()[len(agent.commands())-1])
}
