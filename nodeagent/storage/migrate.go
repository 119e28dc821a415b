package storage

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// sharedPool has the methods of a storage pool for migrations of VMs with volumes.
type sharedPool interface {
	OpenStandby(ctx context.Context, id string, a volume.Attachment) (volume.Files, error)
	ConfirmStandby(ctx context.Context, id string, a volume.Attachment) error
	Activate(ctx context.Context, id string, a volume.Attachment) error
	TakeBack(ctx context.Context, id string, a volume.Attachment, from uint64) error
}

// ConfirmStandby does nothing: the lock that OpenStandby took already excludes other hosts.
func (p filePool) ConfirmStandby(context.Context, string, volume.Attachment) error { return nil }

// OpenStandby opens a volume for the disk of a VM that is being migrated to this host. QEMU must not write to it before
// Activate. The newest known desired state must be the one of a migration's target (AssignedVolume.standby). The errors
// are those of Open. The caller passes duplicates of the files to QEMU and closes the files.
func (s *Storage) OpenStandby(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume) (volume.Files, error) {
	want = s.newest(want)
	p, a, err := s.assignedTo(vm, disk, want, true)
	if err != nil {
		return volume.Files{}, fmt.Errorf("open volume %s for a migration: %w", want.GetVolumeId(), err)
	}
	if want.GetEncrypted() && len(want.GetEncryptionKey()) == 0 {
		return volume.Files{}, fmt.Errorf("open volume %s for a migration: %w", want.GetVolumeId(), volume.ErrNoKey)
	}
	status, err := p.Status(ctx, want.GetVolumeId())
	switch {
	case err != nil:
		return volume.Files{}, err
	case status.Encrypted != want.GetEncrypted():
		return volume.Files{}, fmt.Errorf("%w: only one of the required volume %s and the volume in %s is encrypted", volume.ErrRefused,
			want.GetVolumeId(), poolText(want))
	}
	files, err := p.OpenStandby(ctx, want.GetVolumeId(), a)
	files.Key = want.GetEncryptionKey()
	return files, err
}

// ConfirmStandby is called after a process has opened a volume that OpenStandby has returned, and before the VM's host
// may hand the guest over. The error wraps volume.ErrStale if the migration has ended.
func (s *Storage) ConfirmStandby(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume) error {
	p, a, err := s.assignedTo(vm, disk, s.newest(want), true)
	if err != nil {
		return fmt.Errorf("confirm the migration of volume %s: %w", want.GetVolumeId(), err)
	}
	return p.ConfirmStandby(ctx, want.GetVolumeId(), a)
}

// Activate is called after the switchover, before a process that has opened a volume after OpenStandby may write to it.
// The error wraps volume.ErrStale if the other host of the migration has taken the volume back. A second call does
// nothing.
func (s *Storage) Activate(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume) error {
	p, a, err := s.assignedTo(vm, disk, s.newest(want), false)
	if err != nil {
		return fmt.Errorf("activate volume %s: %w", want.GetVolumeId(), err)
	}
	return p.Activate(ctx, want.GetVolumeId(), a)
}

// TakeBack is called after a migration to another host has failed, for a volume that a process of the VM on this host has
// open with the attachment generation from. When it returns nil, no process on the other host can write to the volume, and
// the generation in the desired state applies to the process. A second call does nothing. The error wraps
// volume.ErrActivated if a process on the other host may have written to the volume: the guest must not continue on this
// host with the memory that it had at the switchover.
func (s *Storage) TakeBack(ctx context.Context, vm cloud.VMID, disk string, want *agentv1.AssignedVolume, from uint64) error {
	p, a, err := s.assignedTo(vm, disk, s.newest(want), false)
	if err != nil {
		return fmt.Errorf("take back volume %s: %w", want.GetVolumeId(), err)
	}
	return p.TakeBack(ctx, want.GetVolumeId(), a, from)
}

// Key returns the key of an encrypted volume that is attached to this disk of the VM. The error wraps volume.ErrNoKey if
// the control plane has not sent the key yet.
func (s *Storage) Key(vm cloud.VMID, disk string, want *agentv1.AssignedVolume) ([]byte, error) {
	want = s.newest(want)
	switch {
	case want.GetDeleted() || want.GetVmId() != string(vm) || want.GetDiskId() != disk:
		return nil, fmt.Errorf("key of volume %s: %w", want.GetVolumeId(), errNotAttached)
	case len(want.GetEncryptionKey()) == 0:
		return nil, fmt.Errorf("key of volume %s: %w", want.GetVolumeId(), volume.ErrNoKey)
	}
	return want.GetEncryptionKey(), nil
}

// assignedTo returns the pool and the attachment of a volume whose desired state want attaches it to this disk of the VM.
// The parameter standby is the required value of want.Standby.
func (s *Storage) assignedTo(vm cloud.VMID, disk string, want *agentv1.AssignedVolume, standby bool) (pool, volume.Attachment, error) {
	if want.GetDeleted() || want.GetVmId() != string(vm) || want.GetDiskId() != disk || want.GetStandby() != standby {
		return nil, volume.Attachment{}, errNotAttached
	}
	p, err := s.poolOf(want)
	if err != nil {
		return nil, volume.Attachment{}, err
	}
	return p, volume.Attachment{VM: string(vm), Generation: want.GetAttachmentGeneration()}, nil
}
