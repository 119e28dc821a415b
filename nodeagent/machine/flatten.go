package machine

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// copyStall is how long QEMU may copy a volume's image without progress. After this time the copy job is cancelled.
const copyStall = 5 * time.Minute

// copyPosition is the last observed position of QEMU's job that copies a volume's image into the volume.
type copyPosition struct {
	offset uint64
	since  time.Time // the time at which offset was first seen
}

// needsFlatten reports whether the action FlattenDisk is needed for a volume: to start QEMU's copy of the image, to
// cancel the copy because it is stalled, or to record that the copy is complete. A complete copy is recorded even if
// the desired state no longer asks to flatten the volume.
func needsFlatten(want *agentv1.AssignedVolume, have qemu.AttachedDisk) bool {
	f := have.Flattening
	switch {
	case have.Base == "" || have.Size == 0: // Size is 0 if QEMU was not queried.
		return false
	case f.Waiting:
		return false
	case f.Running:
		return f.Stalled
	}
	return f.Copied || want.GetFlatten()
}

// flattening reports whether QEMU is copying the image of any of the volumes, or a snapshot delays such a copy.
func flattening(volumes []qemu.AttachedDisk) bool {
	return slices.ContainsFunc(volumes, func(d qemu.AttachedDisk) bool {
		return d.Flattening.Running || d.Flattening.Waiting
	})
}

// observeFlattening calls FlattenProgress for each volume whose image QEMU is copying. It sets Flattening.Stalled of
// the volumes whose copy has made no progress for copyStall.
func (v *VM) observeFlattening(now time.Time) {
	progress := map[string]copyPosition{}
	for i, d := range v.volumes {
		f := d.Flattening
		if !f.Running {
			continue
		}
		last, ok := v.copyPositions[d.ID]
		if !ok || last.offset != f.Offset {
			last = copyPosition{f.Offset, now}
		}
		progress[d.ID] = last
		v.volumes[i].Flattening.Stalled = now.Sub(last.since) >= copyStall
		v.set.o.Volumes.FlattenProgress(cloud.VolumeID(d.Volume), f.Percent, nil)
	}
	v.copyPositions = progress
}

var errStalled = errors.New("copying the image made no progress for some minutes; the copy is started again")

// flattenDisk executes the action FlattenDisk for the disk id.
func (v *VM) flattenDisk(ctx context.Context, id string) error {
	at := slices.IndexFunc(v.volumes, func(d qemu.AttachedDisk) bool { return d.ID == id })
	if at < 0 || v.set.o.Volumes == nil {
		return nil
	}
	d := v.volumes[at]
	var err error
	if d.Flattening.Stalled {
		if err = v.process.CancelFlatten(ctx, id); err == nil {
			err = errStalled
		}
	} else {
		err = v.process.FlattenDisk(ctx, id, func(d qemu.Disk) error {
			return v.set.o.Volumes.Flattened(ctx, d.Pool, cloud.VolumeID(d.Volume), v.id, d.Generation)
		})
	}
	if errors.Is(err, qemu.ErrCopying) {
		return nil // a snapshot has just begun; the next observation reports that
	}
	if err != nil {
		v.set.o.Volumes.FlattenProgress(cloud.VolumeID(d.Volume), d.Flattening.Percent, err)
	}
	return err
}
