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

// copyStall is the time without progress after which the copying of a volume's image is cancelled.
const copyStall = 5 * time.Minute

// copying is the last progress of the copying of a volume's image.
type copying struct {
	offset uint64
	since  time.Time // the time at which offset was first seen
}

// needsFlatten reports whether FlattenDisk has something to do for a volume: to begin the copying of the image, to
// cancel it because it is stalled, or to complete it. A completed copy is recorded even if the volume need not be
// flattened any more.
func needsFlatten(want *agentv1.AssignedVolume, have qemu.AttachedDisk) bool {
	f := have.Flattening
	switch {
	case have.Base == "" || have.Size == 0: // QEMU was not queried
		return false
	case f.Running:
		return f.Stalled
	}
	return f.Copied || want.GetFlatten()
}

// flattening reports whether QEMU copies the image of one of the volumes.
func flattening(volumes []qemu.AttachedDisk) bool {
	return slices.ContainsFunc(volumes, func(d qemu.AttachedDisk) bool { return d.Flattening.Running })
}

// observeFlattening reports the progress of the volumes whose images QEMU copies, and marks those that are stalled.
func (v *VM) observeFlattening(now time.Time) {
	progress := map[string]copying{}
	for i, d := range v.volumes {
		f := d.Flattening
		if !f.Running {
			continue
		}
		last, ok := v.copying[d.ID]
		if !ok || last.offset != f.Offset {
			last = copying{f.Offset, now}
		}
		progress[d.ID] = last
		v.volumes[i].Flattening.Stalled = now.Sub(last.since) >= copyStall
		v.set.o.Volumes.FlattenProgress(cloud.VolumeID(d.Volume), f.Percent, nil)
	}
	v.copying = progress
}

var errStalled = errors.New("the copying of the image made no progress for some minutes; it begins again")

// flattenDisk executes FlattenDisk.
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
	if err != nil {
		v.set.o.Volumes.FlattenProgress(cloud.VolumeID(d.Volume), d.Flattening.Percent, err)
	}
	return err
}
