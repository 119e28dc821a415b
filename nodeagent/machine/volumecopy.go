package machine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// CopyVolumes copies volumes of a running VM as they are at one instant, while the guest continues to run. It returns
// when the copies are complete. The error wraps [volume.ErrNotNow] if no copy was begun. The reason is one of these:
// the VM has no process; QEMU cannot be queried; QEMU does not have one of the volumes as a disk of the same size; the
// disks of the VM are changing; other volumes of the VM are being copied; or CopyDisks must stop the guest's CPUs, and
// they do not run.
func (s *MachineSet) CopyVolumes(ctx context.Context, vm cloud.VMID, targets []volume.CopyTarget) (volume.Copied, error) {
	s.mu.Lock()
	v := s.open[vm]
	s.mu.Unlock()
	if v == nil {
		return volume.Copied{}, volume.ErrNotNow
	}
	v.mu.Lock()
	process := v.process
	v.mu.Unlock()
	if process == nil {
		return volume.Copied{}, volume.ErrNotNow
	}
	disks, err := process.Disks(ctx)
	if err != nil {
		return volume.Copied{}, errors.Join(volume.ErrNotNow, err)
	}
	var all []qemu.CopyTarget
	for _, t := range targets {
		at := slices.IndexFunc(disks, func(d qemu.AttachedDisk) bool { return d.Volume == t.Volume && d.Present })
		if at < 0 {
			return volume.Copied{}, fmt.Errorf("%w: the guest does not have volume %s", volume.ErrNotNow, t.Volume)
		}
		if disks[at].Size != t.Size {
			return volume.Copied{}, fmt.Errorf("%w: QEMU has another size of volume %s", volume.ErrNotNow, t.Volume)
		}
		all = append(all, qemu.CopyTarget{Disk: disks[at].ID, Size: t.Size, Take: t.Take, File: t.File, Key: t.Key, Base: t.Image})
	}
	out, err := process.CopyDisks(ctx, all)
	if errors.Is(err, qemu.ErrCopying) || errors.Is(err, qemu.ErrDisksChanged) || errors.Is(err, qemu.ErrNotHeld) {
		err = fmt.Errorf("%w: %w", volume.ErrNotNow, err)
	}
	return volume.Copied{Taken: out.Taken, Frozen: out.Frozen}, err
}
