package volume

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// NotMigratable returns the reason why a VM with these volumes can never be migrated, or "" if the volumes do not prevent
// it. The text is the predicate of a sentence whose subject is the VM.
func NotMigratable(r store.Reader, t cloud.Tenant, ids []cloud.VolumeID) (string, error) {
	for _, id := range ids {
		v, err := Lookup(r, t, id)
		if err != nil {
			return "", err
		}
		if why := v.NotMigratable(); why != "" {
			return why, nil
		}
	}
	return "", nil
}

// MigrationFeatures returns the names of the features that both hosts of a migration must support because of these
// volumes of the VM.
func MigrationFeatures(r store.Reader, t cloud.Tenant, ids []cloud.VolumeID) (all []string, err error) {
	for _, id := range ids {
		v, err := Lookup(r, t, id)
		if err != nil {
			return nil, err
		}
		for _, name := range v.MigrationFeatures() {
			if !slices.Contains(all, name) {
				all = append(all, name)
			}
		}
	}
	return all, nil
}

// MigratableLater returns the reason why a VM with these volumes cannot be migrated now, or "" if it can. The reason ends
// by itself. The text is the predicate of a sentence whose subject is the VM.
func MigratableLater(r store.Reader, t cloud.Tenant, ids []cloud.VolumeID) (string, error) {
	for _, id := range ids {
		v, err := Lookup(r, t, id)
		if err != nil {
			return "", err
		}
		if why := v.MigratableLater(); why != "" {
			return why, nil
		}
		snapshots, err := SnapshotsOf(r, v)
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(snapshots, isPending) {
			return "has the volume " + v.Name + ", of which a snapshot is PENDING", nil
		}
	}
	return "", nil
}

// SetHosts updates the volumes of a VM after a step of its migration (see cloud.Volume.SetHosts). The parameters node
// and other are VM.Node and VM.OtherHost. Both hosts get the volumes. The assignment of any other host
// makes it forget them. It still has a process with the volumes open until it has destroyed the VM.
func SetHosts(tx *store.Tx, t cloud.Tenant, vm cloud.VMID, ids []cloud.VolumeID, node, other cloud.NodeID) error {
	for _, id := range ids {
		v, err := Lookup(tx, t, id)
		if err != nil {
			return err
		}
		generation, before := v.Generation, []cloud.NodeID{v.Node, v.Other}
		if v.VM != vm || !v.SetHosts(node, other) {
			continue
		}
		for _, host := range before {
			if host != node && host != other && !mutant.On(mutant.KeepStandbyHost) {
				unbind(tx, host, v.ID)
			}
		}
		save(tx, v, generation)
	}
	return nil
}

// FenceMigrated makes the hosts of the volumes of a VM fence their RBD images, before another VM can have the volumes. See
// cloud.Volume.FenceMigrated.
func FenceMigrated(tx *store.Tx, t cloud.Tenant, vm cloud.VMID, ids []cloud.VolumeID) error {
	for _, id := range ids {
		v, err := Lookup(tx, t, id)
		if err != nil {
			return err
		}
		if generation := v.Generation; v.VM == vm && v.FenceMigrated() {
			save(tx, v, generation)
		}
	}
	return nil
}

// checkNotMigrating returns FailedPrecondition if the VM that has the volume is being migrated. The volume then has two
// hosts. A change of its size, its image or its snapshots would reach the QEMU processes of both at different times.
func checkNotMigrating(v *cloud.Volume) error {
	if !v.Migrating() || mutant.On(mutant.ChangeMigratingVolume) {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "volume %s is attached to VM %s, which is being migrated: try again later", v.Name, v.VM).
		WithReason("VM_MIGRATING").With("vm", string(v.VM))
}
