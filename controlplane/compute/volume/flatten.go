package volume

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var flattenCommand = newCommand("volume.flatten", "FlattenVolume", flatten, Billing.VolumeChanged)

// Flatten records that the host must make a volume independent of its image, and does not wait for the host. The host
// can flatten the volume while a guest uses the volume. A volume that was never attached has no host yet, and is
// flattened after its first attachment.
func (s *Service) Flatten(ctx context.Context, t cloud.Tenant, id cloud.VolumeID, body [32]byte) (Result, error) {
	if err := cloud.CheckUUID("volume_id", string(id)); err != nil {
		return Result{}, err
	}
	return flattenCommand.Call(ctx, s.commands, change{Tenant: t, Volume: cloud.Volume{ID: id}, Body: body})
}

// flatten implements Flatten in a transaction of the leader.
func flatten(_ context.Context, tx *store.Tx, q *change) (cloud.Volume, error) {
	v, err := Lookup(tx, q.Tenant, q.Volume.ID)
	if err != nil {
		return cloud.Volume{}, err
	}
	if v.ExternalImage != "" {
		return *v, fault.New(fault.FailedPrecondition, "volume %s is the registered RBD image %s, which only Ceph's program rbd can flatten",
			v.Name, v.ExternalImage)
	}
	// A snapshot in a storage pool contains only the differences from the image. After a flatten, the volume would no
	// longer prevent the deletion of the image. RBD snapshots do not have this problem: the Ceph cluster keeps the data
	// that they need.
	if snapshots, err := SnapshotsOf(tx, v); err != nil {
		return *v, err
	} else if len(snapshots) > 0 && v.Image != nil && v.Driver == cloud.DriverManaged {
		return *v, fault.New(fault.FailedPrecondition, "volume %s has %d snapshots, which need its image: delete them first", v.Name, len(snapshots)).
			WithReason("VOLUME_HAS_SNAPSHOTS")
	}
	if err := checkNotMigrating(v); err != nil {
		return *v, err
	}
	generation := v.Generation
	if v.RequestFlatten() {
		save(tx, v, generation)
	}
	return *v, nil
}

// observe applies a report of the host to the volume v, and returns whether v changed. If the host has flattened the
// volume, observe also deletes the record that the volume uses the image. If tx is nil, observe writes nothing.
func observe(tx *store.Tx, v *cloud.Volume, o cloud.VolumeObservation) (changed bool) {
	from := v.Image
	if !v.Observe(o) {
		return false
	}
	if tx != nil && from != nil && v.Image == nil {
		image.ReleaseVolume(tx, from.ID, v.ID)
	}
	return true
}
