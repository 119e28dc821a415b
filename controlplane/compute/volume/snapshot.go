package volume

import (
	"maps"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

var (
	// Snapshots is the table of snapshot records, at snapshot/<project>/<id>. It also contains deleted snapshots whose
	// bytes the host has not deleted yet.
	Snapshots = store.NewTable[cloud.Snapshot]("snapshot")
	// SnapshotNames is the table of the IDs of snapshots, at snapshot-name/<project>/<name>.
	SnapshotNames   = store.NewTable[cloud.SnapshotID]("snapshot-name")
	volumeSnapshots = store.NewTable[cloud.SnapshotID]("volume-snapshot")
	// Scheduled is the table of the volumes whose metadata has a schedule of snapshots, at
	// snapshot-schedule/<project>/<id>.
	Scheduled = store.NewTable[cloud.VolumeID]("snapshot-schedule")
)

// indexSchedule adds the volume to the table Scheduled if its metadata has a schedule, and otherwise removes it. It
// returns FailedPrecondition if the volume has a schedule but cannot have snapshots.
func indexSchedule(tx *store.Tx, v *cloud.Volume) error {
	if _, ok := v.Schedule(); !ok {
		Scheduled.Delete(tx, string(v.Project), string(v.ID))
		return nil
	}
	if err := v.CheckSnapshots(); err != nil {
		return err
	}
	Scheduled.Put(tx, &v.ID, string(v.Project), string(v.ID))
	return nil
}

// LookupSnapshot returns the snapshot with this ID. It returns NotFound if the snapshot does not exist, was deleted, or
// does not belong to the tenant t.
func LookupSnapshot(r store.Reader, t cloud.Tenant, id cloud.SnapshotID) (*cloud.Snapshot, error) {
	s, err := Snapshots.Get(r, string(t.Project), string(id))
	if err != nil {
		return nil, err
	}
	if s == nil || s.Org != t.Org || s.Deleted {
		return nil, fault.New(fault.NotFound, "no snapshot %s", id)
	}
	return s, nil
}

// SnapshotsOf returns the records of all snapshots of a volume, including deleted snapshots whose bytes the host has
// not deleted yet.
func SnapshotsOf(r store.Reader, v *cloud.Volume) (out []*cloud.Snapshot, err error) {
	all, _, err := volumeSnapshots.List(r, 0, string(v.ID))
	if err != nil {
		return nil, err
	}
	for _, one := range all {
		s, err := Snapshots.Get(r, string(v.Project), string(*one.Value))
		if err != nil {
			return nil, err
		}
		if s != nil {
			out = append(out, s)
		}
	}
	return out, nil
}

// VolumesOf returns the volumes of the tenant t that are attached to a VM.
func VolumesOf(r store.Reader, t cloud.Tenant, vm cloud.VMID) (out []*cloud.Volume, err error) {
	all, _, err := Volumes.List(r, 0, string(t.Project))
	for _, one := range all {
		if one.Value.VM == vm && one.Value.Org == t.Org {
			out = append(out, one.Value)
		}
	}
	return out, err
}

// AddSnapshot stores the record of a new snapshot of a volume of the tenant t, so that the volume's host copies the
// volume. The caller sets the ID, name, volume, group, labels, creator and Scheduled of s. AddSnapshot sets the other
// fields. It returns the same errors as CreateSnapshot of storage.v1.
func AddSnapshot(tx *store.Tx, t cloud.Tenant, s *cloud.Snapshot) error {
	v, err := Lookup(tx, t, s.Volume)
	if err != nil {
		return err
	}
	switch {
	case v.CheckSnapshots() != nil:
		return v.CheckSnapshots()
	case v.Flatten:
		return fault.New(fault.FailedPrecondition, "volume %s is being made independent of its image: try again later", v.Name)
	case v.Driver == cloud.DriverRBD && !v.Present:
		return fault.New(fault.FailedPrecondition, "no host has made volume %s yet: try again later", v.Name)
	case v.Node == "":
		return fault.New(fault.FailedPrecondition, "volume %s was never attached to a VM, so there is nothing to copy", v.Name)
	}
	if err := checkNotMigrating(v); err != nil {
		return err
	}
	if err := checkNoPendingSnapshot(tx, v); err != nil {
		return err
	}
	existing, err := SnapshotsOf(tx, v)
	if err != nil {
		return err
	}
	if len(existing) >= cloud.MaxSnapshots {
		return fault.New(fault.ResourceExhausted, "volume %s has %d snapshots, which is the maximum", v.Name, len(existing))
	}
	taken, err := SnapshotNames.Has(tx, string(t.Project), s.Name)
	if err != nil {
		return err
	}
	if taken {
		return errSnapshotExists(s.Name)
	}
	s.Org, s.Project, s.SizeGiB, s.Pool, s.PoolID, s.Node = t.Org, t.Project, v.SizeGiB, v.Pool, v.PoolID, v.Node
	s.Counted = true
	s.Status, s.CreatedAt, s.Deadline = cloud.SnapshotPending, tx.Now(), tx.Now()+cloud.SnapshotStartTimeout
	if err := chargeQuota(tx, t, snapshotAmount(s), tenant.Amount{}); err != nil {
		return err
	}
	if v.Driver != cloud.DriverRBD { // The space of a Ceph pool is not counted.
		if err := allocate(tx, v, v.Node, s.SizeGiB, fault.ResourceExhausted); err != nil {
			return err
		}
	}
	SnapshotNames.Put(tx, &s.ID, string(t.Project), s.Name)
	volumeSnapshots.Put(tx, &s.ID, string(v.ID), string(s.ID))
	Snapshots.Put(tx, s, string(t.Project), string(s.ID))
	if s.Scheduled {
		v.ScheduledAt = tx.Now()
	}
	touch(tx, v)
	return nil
}

// touch increments the generation of the volume, so that the volume's desired state is sent to its host again.
func touch(tx *store.Tx, v *cloud.Volume) {
	before := v.Generation
	v.Generation++
	save(tx, v, before)
}

// checkNoPendingSnapshot returns FailedPrecondition if a snapshot of the volume is PENDING.
func checkNoPendingSnapshot(r store.Reader, v *cloud.Volume) error {
	all, err := SnapshotsOf(r, v)
	if err != nil {
		return err
	}
	for _, s := range all {
		if isPending(s) {
			return fault.New(fault.FailedPrecondition, "snapshot %s of volume %s is PENDING: try again when it is AVAILABLE", s.Name, v.Name).
				WithReason("SNAPSHOT_PENDING")
		}
	}
	return nil
}

func isPending(s *cloud.Snapshot) bool { return s.Status == cloud.SnapshotPending && !s.Deleted }

// snapshotAmount returns the amount with which a snapshot counts in the quotas of its project and org.
func snapshotAmount(s *cloud.Snapshot) tenant.Amount {
	a := tenant.Amount{VolumeGiB: s.SizeGiB}
	if s.Counted {
		a.Snapshots = 1
	}
	return a
}

// UpdateSnapshot changes the name of a snapshot of the tenant t, unless name is empty, and merges labels into those of
// the snapshot. The host does not know either. It returns the same errors as UpdateSnapshot of storage.v1.
func UpdateSnapshot(tx *store.Tx, t cloud.Tenant, id cloud.SnapshotID, name string, labels map[string]string) (*cloud.Snapshot, error) {
	s, err := LookupSnapshot(tx, t, id)
	if err != nil {
		return nil, err
	}
	before := *s
	if name != "" && name != s.Name {
		taken, err := SnapshotNames.Has(tx, string(t.Project), name)
		if err != nil {
			return nil, err
		}
		if taken {
			return nil, errSnapshotExists(name)
		}
		SnapshotNames.Delete(tx, string(t.Project), s.Name)
		SnapshotNames.Put(tx, &s.ID, string(t.Project), name)
		s.Name = name
	}
	s.Labels = cloud.Merge(s.Labels, labels)
	if err := cloud.CheckSnapshotChange(s.Name, labels, before.Labels, s.Labels); err != nil {
		return nil, err
	}
	if s.Name != before.Name || !maps.Equal(s.Labels, before.Labels) {
		Snapshots.Put(tx, s, string(t.Project), string(s.ID))
	}
	return s, nil
}

func errSnapshotExists(name string) error {
	return fault.New(fault.AlreadyExists, "the project has a snapshot called %s", name)
}

// DropSnapshot marks a snapshot of the tenant t as deleted, so that the host deletes the bytes. The record is removed
// when the host has reported the deletion. DropSnapshot returns the same errors as DeleteSnapshot of storage.v1.
func DropSnapshot(tx *store.Tx, t cloud.Tenant, id cloud.SnapshotID) (*cloud.Snapshot, error) {
	s, err := LookupSnapshot(tx, t, id)
	if err != nil {
		return nil, err
	}
	v, err := Lookup(tx, t, s.Volume)
	if err != nil {
		return nil, err
	}
	all, _, err := Volumes.List(tx, 0, string(t.Project))
	if err != nil {
		return nil, err
	}
	for _, other := range all {
		if source := other.Value.Source; source != nil && source.Snapshot == id && !other.Value.Present {
			return nil, fault.New(fault.FailedPrecondition, "volume %s is being made from snapshot %s: try again later", other.Value.Name, s.Name)
		}
	}
	touch(tx, v)
	s.Deleted, s.DeletedGeneration = true, v.Generation
	SnapshotNames.Delete(tx, string(t.Project), s.Name)
	Snapshots.Put(tx, s, string(t.Project), string(s.ID))
	return s, tenant.Give(tx, t, tenant.Storage, snapshotAmount(s))
}

// forgetSnapshots is called when the volume v is deleted. It returns FailedPrecondition if v has snapshots that are not
// deleted. Otherwise it removes the records of the deleted snapshots of v, and returns the space in GiB that they still
// take in the host's pool.
func forgetSnapshots(tx *store.Tx, v *cloud.Volume) (heldGiB uint64, err error) {
	all, err := SnapshotsOf(tx, v)
	if err != nil {
		return 0, err
	}
	kept := 0
	for _, s := range all {
		if !s.Deleted {
			kept++
		}
		heldGiB += s.SizeGiB
	}
	if kept > 0 && !(v.Encrypted && mutant.On(mutant.DropNeededKey)) {
		return 0, fault.New(fault.FailedPrecondition, "volume %s has %d snapshots: delete them first", v.Name, kept).
			WithReason("VOLUME_HAS_SNAPSHOTS")
	}
	for _, s := range all {
		deleteSnapshotRecord(tx, s)
	}
	return heldGiB, nil
}

func deleteSnapshotRecord(tx *store.Tx, s *cloud.Snapshot) {
	Snapshots.Delete(tx, string(s.Project), string(s.ID))
	volumeSnapshots.Delete(tx, string(s.Volume), string(s.ID))
}

// applySnapshotReport applies a host's report about one snapshot of the volume v to the snapshot's record, and returns
// whether the report changes records. If tx is nil, it writes nothing. generation is the generation of v to which the
// report refers.
func applySnapshotReport(r store.Reader, tx *store.Tx, v *cloud.Volume, generation uint64, o cloud.SnapshotObservation) (changed bool, err error) {
	if cloud.CheckUUID("snapshot_id", string(o.Snapshot)) != nil {
		return false, nil
	}
	s, err := Snapshots.Get(r, string(v.Project), string(o.Snapshot))
	if err != nil || s == nil || s.Volume != v.ID {
		return false, err
	}
	if !s.Deleted {
		if changed = s.Observe(o); changed && tx != nil {
			Snapshots.Put(tx, s, string(s.Project), string(s.ID))
		}
		return changed, nil
	}
	if o.State != cloud.SnapshotAbsent || generation < s.DeletedGeneration && !mutant.On(mutant.ForgetSnapshotEarly) {
		return false, nil
	}
	if tx == nil {
		return true, nil
	}
	deleteSnapshotRecord(tx, s)
	if v.Driver == cloud.DriverRBD {
		return true, nil
	}
	return true, space{s.Pool, s.PoolID}.add(tx, s.Node, -int64(s.SizeGiB))
}

// CreateFrom stores the record of a new volume v of the tenant t with the content of a snapshot, so that the host of
// the snapshot copies the snapshot. For the driver RBD, any host that serves RBD clones the RBD snapshot and then
// flattens the clone. The caller sets the ID, name, size, metadata, labels and creator of v. CreateFrom sets the other
// fields. A size of 0 becomes the size of the snapshot. CreateFrom returns the same errors as CreateVolumeFromSnapshot
// of storage.v1.
func (s *Service) CreateFrom(tx *store.Tx, t cloud.Tenant, v *cloud.Volume, id cloud.SnapshotID) error {
	if err := createFrom(tx, s.keys, t, v, id); err != nil {
		return err
	}
	return s.billing.AdmitVolume(tx, v)
}

func createFrom(tx *store.Tx, k sealer, t cloud.Tenant, v *cloud.Volume, id cloud.SnapshotID) error {
	s, err := LookupSnapshot(tx, t, id)
	if err != nil {
		return err
	}
	if v.SizeGiB == 0 {
		v.SizeGiB = s.SizeGiB
	}
	if err := s.CheckSource(v.SizeGiB); err != nil {
		return err
	}
	from, err := Lookup(tx, t, s.Volume)
	if err != nil {
		return err
	}
	v.Org, v.Project, v.Source = t.Org, t.Project, &cloud.SnapshotRef{Volume: s.Volume, Snapshot: s.ID}
	if err := claimName(tx, v, v.Name); err != nil {
		return err
	}
	v.Class, v.Driver, v.Pool, v.ClassLimits, v.Format = from.Class, from.Driver, from.Pool, from.ClassLimits, s.Format
	v.CreatedAt, v.Generation, v.Node, v.PoolID = tx.Now(), 1, s.Node, from.PoolID
	switch {
	case from.PoolID != "":
		v.Node = from.Node // another host than when the snapshot was created, if the volume has moved since
	case from.Driver == cloud.DriverRBD:
		v.Node = "" // Place chooses a host.
	}
	if from.Driver == cloud.DriverManaged && from.Image != nil { // the copy contains only the differences from the image
		if err := image.ShareWithVolume(tx, from.Image.ID, from.ID, v.ID); err != nil {
			return err
		}
		v.Image = from.Image
	}
	if v.Encrypted = from.Encrypted; v.Encrypted {
		if err := k.copyKey(tx, from, v); err != nil {
			return err
		}
	}
	if err := chargeQuota(tx, t, amountOf(v.SizeGiB), tenant.Amount{}); err != nil {
		return err
	}
	if v.Driver != cloud.DriverRBD {
		if err := allocate(tx, v, v.Node, v.SizeGiB, fault.ResourceExhausted); err != nil {
			return err
		}
	}
	storageclass.Use(tx, v.Class, v.Project, v.ID)
	save(tx, v, 0)
	return indexSchedule(tx, v)
}
