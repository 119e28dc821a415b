//go:build mutant

package vm

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules for creating VMs, and checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ForgetAnswers, TestCreateIsIdempotent, "the project has a VM called web")
	mutanttest.Notices(t, mutant.ReleaseAttachedNIC, TestDetachNICFromRunningVM, "the port of a NIC that the guest still has")
	mutanttest.Notices(t, mutant.ReleaseDeletedEarly, TestDeletedVMKeepsVolumes, "the host may still run the guest")
	mutanttest.Notices(t, mutant.AttachTwice, TestConcurrentAttach, "the others must learn who has the volume")
	mutanttest.Notices(t, mutant.AttachUnflushed, TestDiskOfStoppedVM, "the host has not flushed the volume")
	mutanttest.Notices(t, mutant.AttachElsewhere, TestVolumesDecideTheHost, "the host must have the volume")
	mutanttest.Notices(t, mutant.KeepAttachmentGeneration, TestDiskOfStoppedVM, "the attachment generation must grow")
	mutanttest.Notices(t, mutant.ReleaseAttachedDisk, TestDiskOfRunningVM, "the guest still has the disk")
	mutanttest.Notices(t, mutant.StaleQuota, TestConcurrentQuota, "more VMs than the quota allows")
	mutanttest.Notices(t, mutant.StaleQuota, TestOrgQuotaCoversNewProjects, "more VMs than the quota allows")
	mutanttest.Notices(t, mutant.RecoverUnconfirmed, TestVMsThatStayOnLostHost, "may still run on its host, or needs it")
	mutanttest.Notices(t, mutant.KeepLostAttachment, TestVMOfLostHost, "waits until another host has ended the attachment")
	mutanttest.Notices(t, mutant.TwoMigrationHolders, TestMigrationIsUndone, "the target must destroy the VM")
	mutanttest.Notices(t, mutant.KeepStandbyHost, TestMigrationOfVolume, "the source keeps the volume")
	mutanttest.Notices(t, mutant.MigrateBesideOldAgent, TestMigrationBesideOldAgent, "an old agent could open the volume")
	mutanttest.Notices(t, mutant.ShutDownObstructed, TestForcedDrainBesideOldAgent, "a forced drain has stopped the VM")
	mutanttest.Notices(t, mutant.PlaceOnOldAgent, TestPlacementAvoidsOldAgent, "placed on a host that cannot migrate it")
	mutanttest.Notices(t, mutant.CommitBesideOldAgent, TestSwitchoverBesideOldAgent, "the switchover is committed although an old agent shares the pool")
	mutanttest.Notices(t, mutant.FreeMigratedVolume, TestDeleteAfterSwitchoverOfRBDVolume, "the source may still write to the volume")
	mutanttest.Notices(t, mutant.ChangeMigratingVolume, TestMigrationOfVolume, "the volume was changed during the migration")
	mutanttest.Notices(t, mutant.ReserveNewSize, TestResizeOfRunningVM, "the host may still run the larger process")
	mutanttest.Notices(t, mutant.PlaceOnDraining, TestDrainedHostGetsNoVM, "a VM was placed on a host that is drained")
	mutanttest.Notices(t, mutant.CreatingIsOff, TestDeleteOfStartedCreatingVM, "the host may still run the VM")
	mutanttest.Notices(t, mutant.StartInMaintenance, TestDrain, "a VM was started on a host in maintenance")
	mutanttest.Notices(t, mutant.MaintenanceEarly, TestDrainOfTarget, "a host to which a VM is being migrated is in maintenance")
	mutanttest.Notices(t, mutant.ExecUnpermitted, TestExecNeedsPermission, "a program may run in this guest")
	mutanttest.Notices(t, mutant.AllocateTwice, TestConcurrentCreatesShareNoCapacity, "more VMs than the host has room for")
}
