package volume

import (
	"context"
	"maps"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Create creates the record of a volume. Create uses the name, size, driver, class, metadata and labels of v. imageID
// is the image with whose content the volume begins, or empty for a blank volume. body is the hash of the request, as
// in the other methods.
func (s *Service) Create(ctx context.Context, t cloud.Tenant, v cloud.Volume, imageID cloud.ImageID, body [32]byte) (Result, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return Result{}, err
	}
	d, err := s.draft(id, t, v, imageID)
	if err != nil {
		return Result{}, err
	}
	return createCommand.Call(ctx, s.commands, change{Tenant: t, Volume: d.Volume, Image: d.Image, Key: d.Key, Body: body})
}

// create implements Create in a transaction of the leader.
func create(ctx context.Context, tx *store.Tx, q *change) (v cloud.Volume, err error) {
	v = q.Volume
	if err := claimName(tx, &v, v.Name); err != nil {
		return v, err
	}
	class, err := storageclass.Resolve(tx, v.Class, v.Driver)
	if err != nil {
		return v, err
	}
	v.Class, v.Driver, v.Pool, v.ClassLimits, v.Format = class.Name, class.Driver, class.Pool, class.Limits, cloud.VolumeRaw
	v.CreatedAt, v.CreatedBy, v.Generation = tx.Now(), auth.CallerOf(ctx).Name(), 1
	if q.Image != "" {
		if err := useImage(tx, &v, q.Image); err != nil {
			return v, err
		}
		if v.Driver == cloud.DriverManaged {
			v.Format = cloud.VolumeQCOW2 // an overlay on the image
		}
	}
	if class.Encrypted {
		v.Encrypted = true
		if v.Driver == cloud.DriverManaged {
			v.Format = cloud.VolumeQCOW2
		} else { // The host copies the image into the volume, because the content of the base images in Ceph is not encrypted.
			v.Flatten = v.Image != nil
		}
		keys.Put(tx, &q.Key, string(v.Project), string(v.ID))
	}
	if err := chargeQuota(tx, q.Tenant, amountOf(v.SizeGiB), tenant.Amount{}); err != nil {
		return v, err
	}
	storageclass.Use(tx, v.Class, v.Project, v.ID)
	if v.Metadata[cloud.SnapshotEvery] != "" {
		if err := indexSchedule(tx, &v); err != nil {
			return v, err
		}
	}
	save(tx, &v, v.Generation)
	return v, nil
}

// claimName reserves the volume's name in its project. It returns AlreadyExists if another volume of the project has
// this name.
func claimName(tx *store.Tx, v *cloud.Volume, name string) error {
	holder, err := names.Get(tx, string(v.Project), name)
	if err != nil {
		return err
	}
	if holder != nil && *holder != v.ID {
		return fault.New(fault.AlreadyExists, "the project has a volume called %s", name)
	}
	names.Put(tx, &v.ID, string(v.Project), name)
	return nil
}

// Delete deletes the record of a volume. It returns FailedPrecondition if a VM has the volume, or the volume has
// snapshots. The host deletes the bytes later, but not the RBD image of a registered volume.
func (s *Service) Delete(ctx context.Context, t cloud.Tenant, id cloud.VolumeID, body [32]byte) (Result, error) {
	if err := cloud.CheckUUID("volume_id", string(id)); err != nil {
		return Result{}, err
	}
	return deleteCommand.Call(ctx, s.commands, change{Tenant: t, Volume: cloud.Volume{ID: id}, Body: body})
}

// remove implements Delete in a transaction of the leader.
func remove(_ context.Context, tx *store.Tx, q *change) (cloud.Volume, error) {
	v, err := Lookup(tx, q.Tenant, q.Volume.ID)
	if err != nil {
		return cloud.Volume{}, err
	}
	if v.VM != "" {
		return *v, fault.New(fault.FailedPrecondition, "volume %s is attached to VM %s: detach it first", v.Name, v.VM).
			WithReason("VOLUME_IN_USE").With("vm", string(v.VM))
	}
	held, err := forgetSnapshots(tx, v)
	if err != nil {
		return *v, err
	}
	Volumes.Delete(tx, string(v.Project), string(v.ID))
	names.Delete(tx, string(v.Project), v.Name)
	Scheduled.Delete(tx, string(v.Project), string(v.ID))
	if v.Encrypted && !mutant.On(mutant.KeepVolumeKey) {
		keys.Delete(tx, string(v.Project), string(v.ID))
	}
	if v.Driver != cloud.DriverRBD || v.Node == "" { // the host needs the class until it has deleted the RBD image
		if err := unregister(tx, v.Class, v.ExternalImage); err != nil {
			return *v, err
		}
		storageclass.Release(tx, v.Class, v.ID)
	} else if mutant.On(mutant.ReleaseImageEarly) {
		if err := unregister(tx, v.Class, v.ExternalImage); err != nil {
			return *v, err
		}
	}
	if v.Image != nil {
		image.ReleaseVolume(tx, v.Image.ID, v.ID)
	}
	if v.Node != "" {
		if err := requestDeletion(tx, v, v.SizeGiB+held); err != nil {
			return *v, err
		}
	}
	return *v, tenant.Give(tx, q.Tenant, tenant.Storage, amountOf(v.SizeGiB))
}

// Resize increases the size in the record of a volume. The host enlarges the volume later, also while a guest uses it.
func (s *Service) Resize(ctx context.Context, t cloud.Tenant, id cloud.VolumeID, gib uint64, body [32]byte) (Result, error) {
	if err := cloud.CheckUUID("volume_id", string(id)); err != nil {
		return Result{}, err
	}
	if err := cloud.CheckVolumeSize(gib); err != nil {
		return Result{}, err
	}
	return resizeCommand.Call(ctx, s.commands, change{Tenant: t, Volume: cloud.Volume{ID: id, SizeGiB: gib}, Body: body})
}

// resize implements Resize in a transaction of the leader.
func resize(_ context.Context, tx *store.Tx, q *change) (cloud.Volume, error) {
	v, err := Lookup(tx, q.Tenant, q.Volume.ID)
	if err != nil {
		return cloud.Volume{}, err
	}
	if err := checkNotMigrating(v); err != nil {
		return *v, err
	}
	before, generation := v.SizeGiB, v.Generation
	changed, err := v.Resize(q.Volume.SizeGiB)
	if err != nil || !changed {
		return *v, err
	}
	if err := checkNoPendingSnapshot(tx, v); err != nil {
		return *v, err
	}
	if err := chargeQuota(tx, q.Tenant, amountOf(v.SizeGiB), amountOf(before)); err != nil {
		return *v, err
	}
	if v.Node != "" && v.Driver != cloud.DriverRBD {
		if err := allocate(tx, v, v.Node, v.SizeGiB-before, fault.ResourceExhausted); err != nil {
			return *v, err
		}
	}
	save(tx, v, generation)
	return *v, nil
}

// Update changes the name of a volume, unless name is empty, and merges metadata and labels into those of the volume.
func (s *Service) Update(ctx context.Context, t cloud.Tenant, id cloud.VolumeID, name string, metadata, labels map[string]string, body [32]byte) (Result, error) {
	if err := cloud.CheckUUID("volume_id", string(id)); err != nil {
		return Result{}, err
	}
	if name != "" {
		if err := cloud.CheckName("name", name); err != nil {
			return Result{}, err
		}
	}
	if err := cloud.CheckVolumePairs(metadata, labels); err != nil {
		return Result{}, err
	}
	return updateCommand.Call(ctx, s.commands, change{
		Tenant: t, Volume: cloud.Volume{ID: id, Name: name, Metadata: metadata, Labels: labels}, Body: body,
	})
}

// update implements Update in a transaction of the leader.
func update(_ context.Context, tx *store.Tx, q *change) (cloud.Volume, error) {
	v, err := Lookup(tx, q.Tenant, q.Volume.ID)
	if err != nil {
		return cloud.Volume{}, err
	}
	before := *v
	if name := q.Volume.Name; name != "" && name != v.Name {
		if err := claimName(tx, v, name); err != nil {
			return *v, err
		}
		names.Delete(tx, string(v.Project), v.Name)
		v.Name = name
	}
	if err := cloud.CheckVolumeKeys(q.Volume.Metadata, q.Volume.Labels, &before); err != nil {
		return *v, err
	}
	v.Metadata, v.Labels = cloud.Merge(v.Metadata, q.Volume.Metadata), cloud.Merge(v.Labels, q.Volume.Labels)
	if err := cloud.CheckVolumePairs(v.Metadata, v.Labels); err != nil {
		return *v, err
	}
	if v.Metadata[cloud.SnapshotEvery] != before.Metadata[cloud.SnapshotEvery] {
		if err := indexSchedule(tx, v); err != nil {
			return *v, err
		}
	}
	if v.Limits() != before.Limits() {
		v.Generation++ // the host must receive the change
	}
	if v.Name != before.Name || !maps.Equal(v.Metadata, before.Metadata) || !maps.Equal(v.Labels, before.Labels) {
		save(tx, v, before.Generation)
	}
	return *v, nil
}
