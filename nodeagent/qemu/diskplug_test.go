package qemu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// blank returns a disk with a raw file, and its open file.
func (l *lab) blank(id string, bus Bus, size int64) (Disk, Layers) {
	l.Helper()
	f, err := os.Create(filepath.Join(l.TempDir(), id))
	require.NoError(l, err)
	l.Cleanup(func() { _ = f.Close() })
	require.NoError(l, f.Truncate(size))
	return Disk{ID: id, Bus: bus, Slot: -1, Cache: NoCache, Format: qcow2.Raw, Volume: "volume-" + id}, Layers{Overlay: f, Size: uint64(size)}
}

// openCopies returns how many descriptors a process has of the file f.
func openCopies(t *testing.T, pid int, f *os.File) int {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	copies := 0
	for _, name := range names {
		if to, err := os.Readlink(filepath.Join(dir, name.Name())); err == nil && to == f.Name() {
			copies++
		}
	}
	return copies
}

// nodes returns the names of all block nodes, and the number of descriptor sets.
func (l *lab) nodes(p *Process) (names []string, sets int) {
	l.Helper()
	var nodes []struct {
		Node string `json:"node-name"`
	}
	conn, err := p.work.Conn(l.ctx)
	require.NoError(l, err)
	require.NoError(l, conn.Do(l.ctx, "query-named-block-nodes", object{"flat": true}, &nodes))
	for _, n := range nodes {
		names = append(names, n.Node)
	}
	all, err := queryFDSets(l.ctx, conn)
	require.NoError(l, err)
	return names, len(all)
}

// remove removes a disk from a guest that releases devices only when it is reset.
func (l *lab) remove(p *Process, id string, release func(Disk) error) {
	l.Helper()
	p.diskReleaseWithin = 200 * time.Millisecond
	var err error
	l.eventually(func() bool {
		if err = p.UnplugDisk(l.ctx, id, release); errors.Is(err, ErrDiskNotReleased) {
			err = p.Reset(l.ctx)
			return false
		}
		return true
	}, "the guest releases disk %s", id)
	require.NoError(l, err)
}

// TestPlugDisk attaches disks to a running guest until no slot is free, and grows one. It then removes one disk. The
// guest has no operating system, so it releases the disk only when it is reset. After that QEMU has closed the file and
// the slot is free.
func TestPlugDisk(t *testing.T) {
	l := newLab(t)
	l.launcher.LargestDisk = 1 << 40 // QEMU gets a limit that suffices if the agent cannot raise limits
	p := l.boot()
	p.diskReleaseWithin = time.Second
	pid := p.Record().PID
	nodesBefore, setsBefore := l.nodes(p)
	var files [sparePorts]Layers
	for i := range sparePorts {
		var d Disk
		d, files[i] = l.blank(fmt.Sprintf("d%d", i), Virtio, 8<<20)
		d.IOPS = uint64(i) * 1000 // the disk with i = 0 has no limit
		require.NoError(t, p.PlugDisk(l.ctx, d, files[i]))
		require.NoError(t, p.PlugDisk(l.ctx, d, files[i]), "a repeated call does nothing")
		require.Positive(t, openCopies(t, pid, files[i].Overlay))
	}
	d, f := l.blank("late", Virtio, 8<<20)
	require.ErrorIs(t, p.PlugDisk(l.ctx, d, f), ErrNoDiskSlot)
	scsi, scsiFile := l.blank("scsi", SCSI, 8<<20)
	require.NoError(t, p.PlugDisk(l.ctx, scsi, scsiFile))
	for _, bus := range []Bus{IDE, SATA} {
		d.Bus = bus
		require.ErrorIs(t, p.PlugDisk(l.ctx, d, f), ErrNotPluggable)
	}
	require.Zero(t, openCopies(t, pid, f.Overlay))
	require.NoError(t, p.ResizeDisk(l.ctx, "d2", 16<<30), "also above the file size limit of the start")
	require.Error(t, p.ResizeDisk(l.ctx, "d2", 8<<20))
	disks, err := p.Disks(l.ctx)
	require.NoError(t, err)
	require.Len(t, disks, sparePorts+2)
	require.Equal(t, uint64(16<<30), disks[3].Size)
	st, err := files[2].Overlay.Stat()
	require.NoError(t, err)
	require.Equal(t, int64(16<<30), st.Size())

	var released []string
	release := func(d Disk) error { released = append(released, d.Volume); return nil }
	require.ErrorIs(t, p.UnplugDisk(l.ctx, "d2", release), ErrDiskNotReleased)
	require.Empty(t, released)
	require.Positive(t, openCopies(t, pid, files[2].Overlay), "a disk that the guest has not released stays open")
	for _, id := range []string{"d2", "d0", "scsi"} {
		l.remove(p, id, release)
		require.NoError(t, p.UnplugDisk(l.ctx, id, release), "a second removal has nothing to do")
	}
	require.Equal(t, []string{"volume-d2", "volume-d0", "volume-scsi"}, released)
	for _, f := range []Layers{files[0], files[2], scsiFile} {
		require.Zero(t, openCopies(t, pid, f.Overlay))
	}
	again, f := l.blank("again", Virtio, 8<<20)
	require.NoError(t, p.PlugDisk(l.ctx, again, f))

	p.Close() // a later agent finds the disks, and can remove them
	p, err = l.launcher.Adopt(l.ctx, l.home)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	for _, id := range []string{"again", "d1", "d3"} {
		l.remove(p, id, release)
	}
	nodes, sets := l.nodes(p)
	require.ElementsMatch(t, nodesBefore, nodes)
	require.Equal(t, setsBefore, sets)
	require.NoError(t, p.PowerOff(l.ctx))
}

// TestRefusedDisk checks that a disk that QEMU refuses leaves neither block nodes nor an open file in QEMU. The disk
// can be attached afterwards with another format.
func TestRefusedDisk(t *testing.T) {
	l := newLab(t)
	p := l.boot()
	before, sets := l.nodes(p)
	d, f := l.blank("broken", Virtio, 8<<20)
	d.Format, d.IOPS = qcow2.QCOW2, 100 // the file is raw
	err := p.PlugDisk(l.ctx, d, f)
	var refusal *qmp.Error
	require.ErrorAs(t, err, &refusal)
	require.True(t, strings.Contains(err.Error(), "qcow2"), err)
	after, setsAfter := l.nodes(p)
	require.Equal(t, before, after)
	require.Equal(t, sets, setsAfter)
	require.Zero(t, openCopies(t, p.Record().PID, f.Overlay))
	require.Len(t, p.Record().Spec.Disks, 1)
	d.Format = qcow2.Raw
	require.NoError(t, p.PlugDisk(l.ctx, d, f), "the names are free again")
	require.NoError(t, p.PowerOff(l.ctx))
}

// TestInterruptedPlugDisk ends the agent after it has passed the file of a disk to QEMU, and before QEMU has the
// device. The next agent finds the disk without its device, and removes the rest.
func TestInterruptedPlugDisk(t *testing.T) {
	l := newLab(t)
	p := l.boot()
	before, sets := l.nodes(p)
	d, f := l.blank("half", Virtio, 8<<20)
	d.Slot, d.IOPS = 2, 100
	require.NoError(t, p.writeDisks(append(slices.Clone(p.Record().Spec.Disks), d)))
	conn, err := p.work.Conn(l.ctx)
	require.NoError(t, err)
	_, err = conn.AddFD(l.ctx, firstHotSet, d.node(), f.Overlay)
	require.NoError(t, err)
	require.NoError(t, conn.Do(l.ctx, "object-add", d.throttleGroup(), nil))
	require.NoError(t, conn.Do(l.ctx, "blockdev-add", d.blockNodes(diskSets{overlay: firstHotSet})[0], nil))
	p.Close()

	p, err = l.launcher.Adopt(l.ctx, l.home)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	disks, err := p.Disks(l.ctx)
	require.NoError(t, err)
	require.Equal(t, d, disks[1].Disk)
	require.False(t, disks[1].Present)
	require.Positive(t, openCopies(t, p.Record().PID, f.Overlay))
	released := false
	require.NoError(t, p.UnplugDisk(l.ctx, "half", func(Disk) error { released = true; return nil }))
	require.True(t, released)
	require.Zero(t, openCopies(t, p.Record().PID, f.Overlay))
	after, setsAfter := l.nodes(p)
	require.ElementsMatch(t, before, after)
	require.Equal(t, sets, setsAfter)
	require.NoError(t, p.PowerOff(l.ctx))
}
