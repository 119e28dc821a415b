package cloud

import "github.com/trivet-cloud/trivet/shared/mutant"

// SetHosts updates the hosts of an attached volume after a step of the migration of its VM, and returns whether the
// volume has changed. The parameter node is VM.Node, and other is VM.OtherHost. The host node may write to the volume,
// and the host other may not.
//
// When a migration begins, SetHosts reserves the attachment generation of the target (StandbyGeneration), without
// changing AttachmentGeneration. At the switchover, the reserved generation becomes AttachmentGeneration. If the source
// becomes the VM's host again, it gets a higher generation than the target had. The storage of the volume records the
// highest generation, and a host cannot get the volume with a lower one.
func (v *Volume) SetHosts(node, other NodeID) (changed bool) {
	if v.Node == node && v.Other == other {
		return false
	}
	standby := uint64(0)
	switch {
	case v.Node != node:
		if !mutant.On(mutant.SwitchWithoutGrant) {
			v.AttachmentGeneration = v.nextGrant(node)
		}
		v.Migrated = true
	case other != "":
		standby = v.grant()
	}
	v.Node, v.Other, v.StandbyGeneration = node, other, standby
	v.Generation++
	return true
}

// nextGrant returns the attachment generation for the host to, which becomes the VM's host.
func (v *Volume) nextGrant(to NodeID) uint64 {
	switch {
	case v.Other == to && v.StandbyGeneration > 0:
		return v.StandbyGeneration
	case mutant.On(mutant.RollBackWithoutGrant):
		return v.AttachmentGeneration
	}
	return v.grant()
}

// grant returns a new attachment generation. It is higher than all earlier ones, including those that were reserved for
// the targets of migrations.
func (v *Volume) grant() uint64 {
	v.Granted = max(v.Granted, v.AttachmentGeneration) + 1
	return v.Granted
}

// FenceMigrated records that an RBD volume must be fenced (see Fence), and returns whether the volume has changed. It is
// called when the VM is deleted after the switchover of a migration and before its end. The host Other may then still run
// the guest although the host Node has destroyed the VM. If the host Node has already reported the volume as flushed, the
// guest has run there and has ended, so that FenceMigrated changes nothing. A file needs no fence, because its lock
// excludes other hosts.
func (v *Volume) FenceMigrated() (changed bool) {
	if v.Driver != DriverRBD || v.Flushed() || v.Fence || mutant.On(mutant.FreeMigratedVolume) {
		return false
	}
	v.Fence = true
	v.Generation++
	return true
}

// NotMigratable returns the reason why a VM with this volume can never be migrated, or "" if the volume does not prevent
// it. The text is the predicate of a sentence whose subject is the VM.
func (v *Volume) NotMigratable() string {
	if !v.Movable() {
		return "has the volume " + v.Name + ", which only its host can use"
	}
	return ""
}

// MigrationFeatures returns the names of the features that both hosts of a migration must support because of the volume.
func (v *Volume) MigrationFeatures() []string {
	if v.Driver == DriverManaged && v.Encrypted {
		return []string{FeatureVolumeMigration, FeatureEncryptedMigration}
	}
	return []string{FeatureVolumeMigration}
}

// MigratableLater returns the reason why a VM with this volume cannot be migrated now, or "". The reason ends by itself.
// The text is the predicate of a sentence whose subject is the VM.
func (v *Volume) MigratableLater() string {
	switch {
	case v.Ending:
		return "has the volume " + v.Name + ", whose last attachment has not ended"
	case v.Flatten:
		return "has the volume " + v.Name + ", which is being made independent of its image"
	}
	return ""
}

// Migrating reports whether the VM of the volume is being migrated. The volume then has two hosts, and cannot be
// changed.
func (v *Volume) Migrating() bool { return v.Other != "" }
