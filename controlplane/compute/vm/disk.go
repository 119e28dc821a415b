package vm

import (
	"context"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// diskWait is how long AttachDisk and DetachDisk wait for the guest of a running VM. It is longer than the 30 s after
// which a host reports a failed attachment or detachment as final.
const diskWait = 35 * time.Second

// flushWait is how long DetachDisk waits until the host has flushed the volume.
const flushWait = 10 * time.Second

// visibleDisks returns the disks without the fields that the API does not show.
func visibleDisks(disks []cloud.Disk) []cloud.Disk {
	out := make([]cloud.Disk, len(disks))
	for i, d := range disks {
		out[i] = d.Visible()
	}
	return out
}

// assignVolumes sets the field volume of each disk in out, the desired state of a VM, that is a volume.
func assignVolumes(v *store.View, vm *cloud.VM, on cloud.NodeID, out *agentv1.AssignedVm) error {
	for _, d := range vm.Disks {
		if d.Volume == "" {
			continue
		}
		record, err := volume.Volumes.Get(v, string(vm.Project), string(d.Volume))
		if err != nil {
			return err
		}
		for _, assigned := range out.Disks {
			if assigned.Id == d.ID && record != nil {
				assigned.Volume = convert.AssignedVolume(record, on)
			}
		}
	}
	return nil
}

// releaseVolumes detaches volumes from a VM. The VM must no longer be able to use them (see volume.Release).
func releaseVolumes(tx *store.Tx, project cloud.ProjectID, vm cloud.VMID, volumes []cloud.VolumeID) error {
	for _, id := range volumes {
		if err := volume.Release(tx, project, id, vm); err != nil {
			return err
		}
	}
	return nil
}

// diskRequest describes a disk to attach or, with only the ID set, to detach.
type diskRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	Disk   cloud.Disk
	// Draft is the new volume to create if the disk to attach is blank or has an image. It is nil for an existing
	// volume.
	Draft *volume.Draft
	Body  [32]byte
}

var (
	attachDiskCommand = leader.NewCommand("vm.disk.attach", leader.Keyed, (*Service).attachDiskOnLeader)
	detachDiskCommand = leader.NewCommand("vm.disk.detach", leader.Keyed, (*Service).detachDiskOnLeader)
)

// attachDiskOnLeader implements AttachDisk on the leader, without waiting for the host.
func (s *Service) attachDiskOnLeader(ctx context.Context, q diskRequest) (powerResponse, error) {
	return s.changeDisks(ctx, q, "AttachDisk", func(tx *store.Tx, vm *cloud.VM) error {
		if err := vm.CheckDiskChange("attach"); err != nil {
			return err
		}
		if vm.FindDisk(q.Disk.ID) >= 0 {
			f := fault.New(fault.AlreadyExists, "VM %s has a disk %s", vm.Name, q.Disk.ID)
			f.Field = "disk.id"
			return f
		}
		if vm.State == cloud.Running && !q.Disk.Bus.Hotpluggable() {
			return fault.New(fault.FailedPrecondition, "a disk on the bus %s cannot be attached to a running VM: stop VM %s, or use virtio or scsi",
				q.Disk.Bus, vm.Name)
		}
		d := q.Disk
		if q.Draft != nil {
			created, err := s.opts.Volumes.CreateIn(ctx, tx, q.Draft, vm.Name+"-"+d.ID)
			if err != nil {
				return err
			}
			d.Volume, d.Image, d.Blank, d.SizeGiB = created.ID, "", false, 0
		}
		if err := volume.Attach(tx, vm.Tenant(), d.Volume, vm.ID, d.ID, vm.Node); err != nil {
			return err
		}
		vm.AttachDisk(d)
		if err := vm.Spec.Check(); err != nil {
			return fault.New(fault.FailedPrecondition, "VM %s can have no more disks: %v", vm.Name, err)
		}
		if err := cloud.CheckMachine(vm.Metadata, &vm.Spec); err != nil {
			return fault.New(fault.FailedPrecondition, "VM %s can have no more disks: %v", vm.Name, err)
		}
		return nil
	})
}

// detachDiskOnLeader implements DetachDisk on the leader, without waiting for the host.
func (s *Service) detachDiskOnLeader(ctx context.Context, q diskRequest) (powerResponse, error) {
	return s.changeDisks(ctx, q, "DetachDisk", func(tx *store.Tx, vm *cloud.VM) error {
		if err := vm.CheckDiskChange("detach"); err != nil {
			return err
		}
		i := vm.FindDisk(q.Disk.ID)
		if i < 0 {
			f := fault.New(fault.NotFound, "VM %s has no disk %s", vm.Name, q.Disk.ID)
			f.Field = "disk_id"
			return f
		}
		d := vm.Spec.Disks[i]
		if d.Volume == "" {
			return fault.New(fault.FailedPrecondition, "disk %s belongs to VM %s: only volumes can be detached", d.ID, vm.Name)
		}
		if vm.State == cloud.Running && !d.Bus.Hotpluggable() {
			return fault.New(fault.FailedPrecondition, "disk %s on the bus %s cannot be detached from a running VM: stop VM %s first", d.ID, d.Bus, vm.Name)
		}
		vm.DetachDisk(i)
		if vm.State == cloud.Stopped {
			return volume.Release(tx, vm.Project, d.Volume, vm.ID)
		}
		return nil
	})
}

// changeDisks runs change on the record of a VM and stores it, at most once per idempotency key of the method.
func (s *Service) changeDisks(ctx context.Context, q diskRequest, method string, change func(*store.Tx, *cloud.VM) error) (powerResponse, error) {
	return s.changeVM(ctx, q.Tenant, q.VM, method, q.Body, change)
}

// AttachDisk attaches a disk to a VM that is STOPPED or RUNNING. The disk is an existing volume, or a new volume of the
// default class, which is blank or begins with the content of an image. A new volume is not deleted when it is detached
// or when the VM is deleted. For a RUNNING VM, AttachDisk waits up to diskWait until the guest has the disk. If the
// host refuses, AttachDisk returns FailedPrecondition, and the disk is removed from the VM again.
func (s *Service) AttachDisk(ctx context.Context, t cloud.Tenant, id cloud.VMID, d cloud.Disk, body [32]byte) (PowerResult, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return PowerResult{}, err
	}
	d.Normalize()
	if err := d.Check("disk."); err != nil {
		return PowerResult{}, err
	}
	q := diskRequest{Tenant: t, VM: id, Disk: d, Body: body}
	if d.Volume == "" {
		draft, err := s.opts.Volumes.Draft(t, cloud.Volume{SizeGiB: d.SizeGiB}, d.Image)
		if err != nil {
			return PowerResult{}, err
		}
		q.Draft = &draft
	}
	response, err := attachDiskCommand.Call(ctx, s.opts.Commands, q)
	if err != nil {
		return PowerResult{}, err
	}
	return s.awaitVM(ctx, t, response, diskWait, func(_, vm *cloud.VM) (bool, error) {
		i := vm.FindDisk(d.ID)
		if i < 0 || vm.Spec.Disks[i].Change == cloud.DeviceDetaching {
			return false, diskError(vm, d.ID, "attach", "it was detached meanwhile")
		}
		return vm.Spec.Disks[i].Change == cloud.DeviceUnchanged, nil
	})
}

// DetachDisk detaches a disk that is a volume from a VM that is STOPPED or RUNNING. For a RUNNING VM it waits up to
// diskWait until the guest has released the device. If the guest keeps it, DetachDisk returns FailedPrecondition, and
// the VM keeps the disk. After the release DetachDisk waits up to flushWait until the host has flushed the volume, so
// that the caller can attach the volume again at once. It is no error if the host takes longer.
func (s *Service) DetachDisk(ctx context.Context, t cloud.Tenant, id cloud.VMID, disk string, body [32]byte) (PowerResult, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return PowerResult{}, err
	}
	if err := cloud.CheckDeviceID("disk_id", disk); err != nil {
		return PowerResult{}, err
	}
	before, err := s.Get(ctx, t, id)
	if err != nil && !fault.Is(err, fault.NotFound) { // when a call is repeated, the VM may be deleted already
		return PowerResult{}, err
	}
	response, err := detachDiskCommand.Call(ctx, s.opts.Commands, diskRequest{Tenant: t, VM: id, Disk: cloud.Disk{ID: disk}, Body: body})
	if err != nil {
		return PowerResult{}, err
	}
	var detached cloud.VolumeID
	if before != nil && before.FindDisk(disk) >= 0 {
		detached = before.Spec.Disks[before.FindDisk(disk)].Volume
	}
	out, err := s.awaitVM(ctx, t, response, diskWait, func(_, vm *cloud.VM) (bool, error) {
		i := vm.FindDisk(disk)
		switch {
		case i < 0 || vm.Spec.Disks[i].Volume != detached: // detached; later calls can have attached another volume as a disk with this ID
			return true, nil
		case vm.Spec.Disks[i].Change != cloud.DeviceDetaching:
			return false, diskError(vm, disk, "detach", "another call changed it meanwhile")
		}
		return false, nil
	})
	if err == nil && !out.WaitEnded && detached != "" && !rpc.RespondAsync(ctx) {
		s.awaitFlush(ctx, t, detached)
	}
	return out, err
}

// awaitFlush waits up to flushWait until a detached volume is flushed or attached again.
func (s *Service) awaitFlush(ctx context.Context, t cloud.Tenant, id cloud.VolumeID) {
	ctx, cancel := context.WithTimeout(ctx, flushWait)
	defer cancel()
	store.Await(ctx, s.opts.Store, volume.Volumes, func(v *cloud.Volume) (bool, error) {
		return v == nil || v.VM != "" || v.Flushed(), nil
	}, string(t.Project), string(id))
}

// reasonDiskRefused is the reason in the error of AttachDisk and DetachDisk if the host could not change the disk.
const reasonDiskRefused = "DISK_REFUSED"

// diskError returns the error for a disk that was not attached or detached as requested. The error contains the reason
// that the host reported or, if the host reported none, the text of the parameter otherwise.
func diskError(vm *cloud.VM, disk, verb, otherwise string) error {
	if r := vm.DiskRefusal; r != nil && r.Disk == disk {
		return fault.New(fault.FailedPrecondition, "%s disk %s of VM %s: %s", verb, disk, vm.Name, r.Error).WithReason(reasonDiskRefused)
	}
	return fault.New(fault.FailedPrecondition, "%s disk %s of VM %s: %s", verb, disk, vm.Name, otherwise)
}
