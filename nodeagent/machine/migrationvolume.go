package machine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// openStandby opens the volumes of an assigned VM for the target of a migration. The parameter spec is the Spec of the
// source's QEMU. The result has the disks of spec, with the target's way to the volumes. The error wraps
// volume.ErrRefused if a volume has another format than at the source. If a volume cannot be opened, openStandby closes
// the others.
func (v *VM) openStandby(ctx context.Context, want *agentv1.AssignedVm, spec qemu.Spec) (openVolumes, error) {
	out := openVolumes{}
	for _, w := range want.GetDisks() {
		if w.GetVolume() == nil {
			continue
		}
		at := slices.IndexFunc(spec.Disks, func(d qemu.Disk) bool { return d.ID == w.GetId() })
		one, err := v.openStandbyVolume(ctx, w, spec.Disks[at]) // incomingSpec has checked that spec has the disk
		if err != nil {
			out.close()
			return nil, fmt.Errorf("disk %s: %w", w.GetId(), err)
		}
		out[w.GetId()] = one
	}
	return out, nil
}

func (v *VM) openStandbyVolume(ctx context.Context, w *agentv1.AssignedDisk, d qemu.Disk) (openVolume, error) {
	if v.set.o.Volumes == nil {
		return openVolume{}, fmt.Errorf("%w: %w", volume.ErrRefused, errNoVolumes)
	}
	files, err := v.set.o.Volumes.OpenStandby(ctx, v.id, w.GetId(), w.GetVolume())
	if err != nil {
		return openVolume{}, err
	}
	own := d
	own.Pool, own.Generation, own.Standby = w.GetVolume().GetPool(), w.GetVolume().GetAttachmentGeneration(), true
	own.Format, own.Base, own.Encrypted, own.RBD = files.Format, files.BaseFormat, files.Encrypted, nil
	if i := files.RBD; i != nil {
		own.RBD = &qemu.RBDImage{Monitors: i.Monitors, Pool: i.Pool, Image: i.Image, User: i.User}
	}
	if own.Format != d.Format || own.Base != d.Base || own.Encrypted != d.Encrypted || (own.RBD == nil) != (d.RBD == nil) ||
		own.RBD != nil && (own.RBD.Pool != d.RBD.Pool || own.RBD.Image != d.RBD.Image) {
		files.Close()
		return openVolume{}, fmt.Errorf("%w: the volume differs at the source", volume.ErrRefused)
	}
	return openVolume{disk: own, files: files}, nil
}

// confirmStandby checks, after the target's QEMU has opened the volumes, that the migration has not ended meanwhile.
func (v *VM) confirmStandby(ctx context.Context, want *agentv1.AssignedVm) error {
	for _, w := range want.GetDisks() {
		if w.GetVolume() == nil {
			continue
		}
		if err := v.set.o.Volumes.ConfirmStandby(ctx, v.id, w.GetId(), w.GetVolume()); err != nil {
			return fmt.Errorf("disk %s: %w", w.GetId(), err)
		}
	}
	return nil
}

// activateVolumes makes the attachments of the VM's volumes on this host, the target of a migration, the present ones. It
// must be called after the switchover, and before QEMU runs the guest. QEMU opens the volumes for writing only then.
func (v *VM) activateVolumes(ctx context.Context, want *agentv1.AssignedVm) error {
	for _, d := range v.process.Record().Spec.Disks {
		if !d.Standby || mutant.On(mutant.RunUnactivated) {
			continue
		}
		at, err := findVolume(want, d.ID)
		if err != nil {
			return err
		}
		w := want.GetDisks()[at].GetVolume()
		if w.GetAttachmentGeneration() != d.Generation {
			return fmt.Errorf("disk %s: the host has prepared generation %d of the volume, and got %d", d.ID, d.Generation, w.GetAttachmentGeneration())
		}
		if err := v.set.o.Volumes.Activate(ctx, v.id, d.ID, w); err != nil {
			return fmt.Errorf("disk %s: %w", d.ID, err)
		}
		if err := v.process.SetGeneration(d.ID, d.Generation); err != nil {
			return err
		}
	}
	return nil
}

// reopenKeys returns the keys of the disks that QEMU opens again when the guest continues after a switchover. It returns
// an error if a key is not known yet. The guest must not continue then.
func (v *VM) reopenKeys(want *agentv1.AssignedVm) (map[string]qemu.Key, error) {
	keys := map[string]qemu.Key{}
	for _, id := range v.process.Record().Spec.ReopenedDisks() {
		at, err := findVolume(want, id)
		if err != nil {
			return nil, err
		}
		if v.set.o.Volumes == nil {
			return nil, errNoVolumes
		}
		key, err := v.set.o.Volumes.Key(v.id, id, want.GetDisks()[at].GetVolume())
		if err != nil {
			return nil, fmt.Errorf("disk %s: %w", id, err)
		}
		keys[id] = key
	}
	return keys, nil
}

// takesBack reports whether the disk d of a process has a volume that the host got back after a migration: the process
// has the volume open with an earlier generation than the assigned one.
func takesBack(w *agentv1.AssignedVolume, d qemu.Disk) bool {
	return w.GetMigrated() && !w.GetStandby() && w.GetAttachmentGeneration() > d.Generation && !d.Standby
}

// takeBackDisk makes sure that the target of a failed migration cannot write to a volume of the VM any more, and then
// writes the new generation of the attachment to the record of the process. If the target has activated the volume, the
// guest must not continue here: takeBackDisk then ends QEMU in failure, and returns true.
func (v *VM) takeBackDisk(ctx context.Context, id string, want *agentv1.AssignedVm) (ended bool, err error) {
	at, err := findVolume(want, id)
	if err != nil {
		return false, err
	}
	disks := v.process.Record().Spec.Disks
	i := slices.IndexFunc(disks, func(d qemu.Disk) bool { return d.ID == id })
	if i < 0 || v.set.o.Volumes == nil {
		return false, errors.New("the VM's process has no such volume")
	}
	w := want.GetDisks()[at].GetVolume()
	err = v.set.o.Volumes.TakeBack(ctx, v.id, id, w, disks[i].Generation)
	if errors.Is(err, volume.ErrActivated) {
		text := "the guest ran on the target of the migration before that host was lost, and may have written to disk " + id
		return true, v.process.EndInFailure(ctx, text)
	}
	if err != nil {
		return false, fmt.Errorf("disk %s: %w", id, err)
	}
	return false, v.process.SetGeneration(id, w.GetAttachmentGeneration())
}
