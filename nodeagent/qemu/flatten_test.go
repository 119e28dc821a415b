package qemu

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// overlaySize is the size of the disks of the tests in bytes, and of their base images.
const overlaySize = 8 << 20

// overlay returns a disk over a raw image with the byte 0x5a everywhere, and its open files.
func (l *lab) overlay(id string, bus Bus) (Disk, Layers) {
	l.Helper()
	return l.overlayIn(l.TempDir(), id, bus)
}

// overlayIn is like overlay. The disk's own file is in dir.
func (l *lab) overlayIn(dir, id string, bus Bus) (Disk, Layers) {
	l.Helper()
	d, files := l.blank(id, bus, 0)
	var err error
	files.Overlay, err = os.Create(filepath.Join(dir, id))
	require.NoError(l, err)
	l.Cleanup(func() { _ = files.Overlay.Close() })
	_, err = qcow2.Create(files.Overlay, overlaySize)
	require.NoError(l, err)
	path := filepath.Join(l.TempDir(), "base")
	require.NoError(l, os.WriteFile(path, bytes.Repeat([]byte{0x5a}, overlaySize), 0o400))
	files.Base, err = os.Open(path)
	require.NoError(l, err)
	l.Cleanup(func() { _ = files.Base.Close() })
	files.Size = overlaySize
	d.Format, d.Base = qcow2.QCOW2, qcow2.Raw
	return d, files
}

// flattening returns the state of a disk.
func (l *lab) flattening(p *Process, id string) Flattening {
	l.Helper()
	disks, err := p.Disks(l.ctx)
	require.NoError(l, err)
	for _, d := range disks {
		if d.ID == id {
			return d.Flattening
		}
	}
	l.Fatalf("no disk %s", id)
	return Flattening{}
}

// slow limits the speed of the copying of a disk to bytes per second; 0 means no limit.
func (l *lab) slow(p *Process, d Disk, speed int) {
	l.Helper()
	conn, err := p.work.Conn(l.ctx)
	require.NoError(l, err)
	require.NoError(l, conn.Do(l.ctx, "block-job-set-speed", object{"device": d.flattenJob(), "speed": speed}, nil))
}

// isFlat checks that the file of an overlay has the whole content of the base image.
func (l *lab) isFlat(overlay *os.File) {
	l.Helper()
	f, err := os.Open(overlay.Name()) // QEMU has set the other descriptor to direct I/O
	require.NoError(l, err)
	defer f.Close()
	st, err := f.Stat()
	require.NoError(l, err)
	d, err := qcow2.NewReader(f, st.Size())
	require.NoError(l, err)
	got := make([]byte, overlaySize)
	_, err = d.ReadAt(got, 0)
	require.NoError(l, err)
	require.True(l, bytes.Equal(bytes.Repeat([]byte{0x5a}, overlaySize), got))
}

// flatten calls FlattenDisk until the record of the process has the disk without a base image. It returns how often
// record was called.
func (l *lab) flatten(p *Process, id string) (recorded int) {
	l.Helper()
	l.eventually(func() bool {
		require.NoError(l, p.FlattenDisk(l.ctx, id, func(Disk) error { recorded++; return nil }))
		for _, d := range p.Record().Spec.Disks {
			if d.ID == id {
				return d.Base == ""
			}
		}
		return false
	}, "disk %s is flattened", id)
	return recorded
}

// TestFlattenDisk makes disks of a running guest independent of their base images, with and without limits, and after
// the agent was restarted during the copying. QEMU must then have closed the image.
func TestFlattenDisk(t *testing.T) {
	l := newLab(t)
	p := l.boot()
	pid := p.Record().PID
	before, sets := l.nodes(p)
	for i, id := range []string{"plain", "limited"} {
		d, files := l.overlay(id, Virtio)
		d.IOPS = uint64(i) * 10000
		require.NoError(t, p.PlugDisk(l.ctx, d, files))
		require.Equal(t, Flattening{}, l.flattening(p, id))
		require.Positive(t, openCopies(t, pid, files.Base))
		require.Equal(t, 1, l.flatten(p, id))
		require.Zero(t, openCopies(t, pid, files.Base))
		require.Zero(t, l.flatten(p, id), "a second call has nothing to do")
		l.isFlat(files.Overlay)
	}
	d, files := l.overlay("adopted", SCSI)
	require.NoError(t, p.PlugDisk(l.ctx, d, files))
	d = p.Record().Spec.Disks[len(p.Record().Spec.Disks)-1]
	require.NoError(t, p.FlattenDisk(l.ctx, "adopted", nil))
	l.slow(p, d, 1<<20)
	f := l.flattening(p, "adopted")
	require.True(t, f.Running, "%+v", f)
	require.LessOrEqual(t, f.Percent, uint32(100))
	p.Close()
	p, err := l.launcher.Adopt(l.ctx, l.home)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	l.slow(p, d, 0)
	refusal := errors.New("the record cannot be written")
	l.eventually(func() bool {
		err := p.FlattenDisk(l.ctx, "adopted", func(Disk) error { return refusal })
		return errors.Is(err, refusal)
	}, "the copying ends")
	require.True(t, l.flattening(p, "adopted").Copied)
	require.Positive(t, openCopies(t, pid, files.Base), "the image stays open until that is recorded")
	require.Equal(t, 1, l.flatten(p, "adopted"))
	require.Zero(t, openCopies(t, pid, files.Base))
	l.isFlat(files.Overlay)
	for _, id := range []string{"plain", "limited", "adopted"} {
		l.remove(p, id, func(Disk) error { return nil })
	}
	after, setsAfter := l.nodes(p)
	require.ElementsMatch(t, before, after)
	require.Equal(t, sets, setsAfter)
	require.NoError(t, p.PowerOff(l.ctx))
}

// TestFlattenDiskEnds cancels the copying of an image: by a call, by a resize, by a removal of the disk, and by a write
// error of the overlay. Except after the removal, a later call must continue it.
func TestFlattenDiskEnds(t *testing.T) {
	l := newLab(t)
	l.launcher.LargestDisk = 1 << 40
	p := l.boot()
	before, sets := l.nodes(p)
	d, files := l.overlay("data", Virtio)
	require.NoError(t, p.PlugDisk(l.ctx, d, files))
	d = p.Record().Spec.Disks[len(p.Record().Spec.Disks)-1]
	begin := func() {
		t.Helper()
		require.NoError(t, p.FlattenDisk(l.ctx, "data", nil))
		l.slow(p, d, 1<<16)
		require.True(t, l.flattening(p, "data").Running)
	}
	begin()
	require.NoError(t, p.CancelFlatten(l.ctx, "data"))
	require.NoError(t, p.CancelFlatten(l.ctx, "data"))
	require.Equal(t, Flattening{}, l.flattening(p, "data"))
	begin()
	require.NoError(t, p.ResizeDisk(l.ctx, "data", 2*overlaySize))
	require.Equal(t, Flattening{}, l.flattening(p, "data"))

	// A write error: the file system of the overlay is too small.
	small := t.TempDir()
	require.NoError(t, unix.Mount("trivet-test-flatten", small, "tmpfs", 0, "size=4m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(small, unix.MNT_DETACH)) })
	full, fullFiles := l.overlayIn(small, "full", SCSI)
	full.Cache = Writeback // a tmpfs has no direct I/O
	require.NoError(t, p.PlugDisk(l.ctx, full, fullFiles))
	var err error
	l.eventually(func() bool {
		if l.flattening(p, "full").Running {
			return false
		}
		err = p.FlattenDisk(l.ctx, "full", nil)
		return err != nil
	}, "the error of the job is returned")
	require.ErrorContains(t, err, "QEMU could not copy the image")
	require.False(t, l.flattening(p, "full").Copied)
	l.remove(p, "full", func(Disk) error { return nil })

	require.NoError(t, p.CancelFlatten(l.ctx, "data"))
	begin()
	l.remove(p, "data", func(Disk) error { return nil })
	after, setsAfter := l.nodes(p)
	require.ElementsMatch(t, before, after)
	require.Equal(t, sets, setsAfter)
	require.NoError(t, p.PowerOff(l.ctx))
}
