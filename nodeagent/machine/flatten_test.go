package machine

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/images/guest"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// imageVolume returns the desired state of a volume that is made from an image of size bytes. The image has the guest's
// pattern of a seed at its beginning and in its last MiB.
func (l *lab) imageVolume(n, size int, seed string) *agentv1.AssignedVolume {
	data := bytes.Repeat([]byte{0x5a}, size)
	guest.Pattern(data[:mib], seed, 0)
	guest.Pattern(data[size-mib:], seed, int64(size-mib))
	sum := sha256.Sum256(data)
	l.more[hex.EncodeToString(sum[:])] = data
	v := blankVolume(n)
	v.Format = vmv1.VolumeFormat_VOLUME_FORMAT_QCOW2
	v.Image = &agentv1.AssignedImage{Sha256: hex.EncodeToString(sum[:]), SizeBytes: uint64(size), Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW}
	return v
}

// flatten adds the request to flatten the volume v to the desired states of the volume and of its VM, and assigns both
// to the host. It returns the new desired states.
func (l *lab) flatten(want *agentv1.AssignedVm, v *agentv1.AssignedVolume) (*agentv1.AssignedVm, *agentv1.AssignedVolume) {
	v = proto.CloneOf(v)
	v.Generation, v.Flatten, v.MustExist = v.Generation+1, true, true
	want = with(want, func(w *agentv1.AssignedVm) {
		w.Disks = append([]*agentv1.AssignedDisk{}, w.Disks...)
		for i, d := range w.Disks {
			if d.GetVolume().GetVolumeId() == v.GetVolumeId() {
				w.Disks[i] = proto.CloneOf(d)
				w.Disks[i].Volume = v
			}
		}
	})
	l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(v.VolumeId): v}, false)
	l.assign(want)
	return want, v
}

// TestFlattenInUse flattens a volume that a guest uses. Before the volume is flattened, the agent is restarted and QEMU
// is killed. Afterwards the host no longer needs the image, and the guest must read the content of the image and
// everything that it has written.
func TestFlattenInUse(t *testing.T) {
	l := newLab(t)
	want := l.linux(1)
	v := grant(l.imageVolume(1, 32*mib, "image"), want, "data")
	want = on(give(want, v, virtio, noCache))
	l.assign(want)
	l.seesDisks(want, "data")
	l.boots(want, 1)
	l.write(want.VmId, "vdb", "first", 4*mib)

	want, v = l.flatten(want, v)
	l.stop() // at an arbitrary point of the copying
	l.start()
	l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(v.VolumeId): v}, false)
	l.assign(want)
	l.write(want.VmId, "vdb", "second", 8*mib)
	o := l.sees(want, cloud.ObservedRunning)
	require.NoError(t, syscall.Kill(int(o.PID), syscall.SIGKILL))
	l.sees(want, cloud.ObservedEnded)

	want = on(want)
	l.assign(want)
	l.seesDisks(want, "data")
	require.Eventually(t, func() bool { return l.status(1).Flattened }, 2*within, 10*time.Millisecond, "the volume is flattened")
	require.Nil(t, l.status(1).Image)
	require.NoError(t, os.Remove(filepath.Join(l.dir, "images", v.GetImage().GetSha256())))
	l.boots(want, 2)
	for offset, seed := range map[int]string{0: "image", 31 * mib: "image", 4 * mib: "first", 8 * mib: "second"} {
		l.reads(want.VmId, "vdb", seed, offset)
	}

	// The next start needs no image.
	delete(l.more, v.GetImage().GetSha256())
	v = proto.CloneOf(v)
	v.Generation, v.Flatten, v.Image = v.Generation+1, false, nil
	want = off(want, 0)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	want = on(with(want, func(w *agentv1.AssignedVm) {
		w.Disks[len(w.Disks)-1] = proto.CloneOf(w.Disks[len(w.Disks)-1])
		w.Disks[len(w.Disks)-1].Volume = v
	}))
	l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(v.VolumeId): v}, false)
	l.assign(want)
	l.seesDisks(want, "data")
}

// progress is a Volumes that records the calls of FlattenProgress.
type progress struct {
	Volumes
	calls []uint32
	errs  []error
}

func (p *progress) FlattenProgress(_ cloud.VolumeID, percent uint32, err error) {
	p.calls, p.errs = append(p.calls, percent), append(p.errs, err)
}

// TestStalledFlattening checks which state of the copying of an image needs FlattenDisk, and that a copy without
// progress counts as stalled only after copyStall.
func TestStalledFlattening(t *testing.T) {
	base := qemu.AttachedDisk{Disk: qemu.Disk{ID: "data", Volume: "v", Base: "raw"}, Size: 1}
	wanted := &agentv1.AssignedVolume{Flatten: true}
	for _, c := range []struct {
		name string
		want *agentv1.AssignedVolume
		edit func(*qemu.AttachedDisk)
		need bool
	}{
		{"an image", &agentv1.AssignedVolume{}, func(*qemu.AttachedDisk) {}, false},
		{"a request", wanted, func(*qemu.AttachedDisk) {}, true},
		{"no image", wanted, func(d *qemu.AttachedDisk) { d.Base = "" }, false},
		{"unknown to QEMU", wanted, func(d *qemu.AttachedDisk) { d.Size = 0 }, false},
		{"copying", wanted, func(d *qemu.AttachedDisk) { d.Flattening.Running = true }, false},
		{"stalled", wanted, func(d *qemu.AttachedDisk) { d.Flattening.Running, d.Flattening.Stalled = true, true }, true},
		{"copied", wanted, func(d *qemu.AttachedDisk) { d.Flattening.Copied = true }, true},
		{"during a snapshot", wanted, func(d *qemu.AttachedDisk) { d.Flattening.Waiting = true }, false},
		{"copied, without a request", &agentv1.AssignedVolume{}, func(d *qemu.AttachedDisk) { d.Flattening.Copied = true }, true},
	} {
		d := base
		c.edit(&d)
		require.Equal(t, c.need, needsFlatten(c.want, d), c.name)
	}

	calls := &progress{}
	v := &VM{set: &MachineSet{o: Options{Volumes: calls}}}
	now := time.Now()
	see := func(offset uint64, after time.Duration) bool {
		d := base
		d.Flattening = qemu.Flattening{Running: true, Offset: offset, Percent: uint32(offset)}
		v.volumes = []qemu.AttachedDisk{d}
		v.observeFlattening(now.Add(after))
		return v.volumes[0].Flattening.Stalled
	}
	require.False(t, see(1, 0))
	require.False(t, see(1, copyStall-time.Second))
	require.False(t, see(2, copyStall))
	require.True(t, see(2, 2*copyStall))
	require.Equal(t, []uint32{1, 1, 2, 2}, calls.calls)
	require.NoError(t, errors.Join(calls.errs...))
	v.volumes = nil
	v.observeFlattening(now)
	require.Empty(t, v.copyPositions)
}
