//go:build mutant

package cloud

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules for volumes and migrations, and checks that a test
// notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AttachTwice, TestVolumeHasOneHolder, "a second VM got the volume")
	mutanttest.Notices(t, mutant.AttachUnflushed, TestVolumeHasOneHolder, "a volume was attached before it was flushed")
	mutanttest.Notices(t, mutant.AttachElsewhere, TestVolumeHasOneHolder, "a volume was attached on another host than its own")
	mutanttest.Notices(t, mutant.KeepHostRemoved, TestSharedVolumeOfReturnedHost, "a volume moved although a VM has it")
	mutanttest.Notices(t, mutant.MoveUnflushed, TestRBDVolumeMoves, "a volume moved although a VM has it")
	mutanttest.Notices(t, mutant.AttachUnflushed, TestRBDVolumeMoves, "a volume was attached before it was flushed")
	mutanttest.Notices(t, mutant.KeepAttachmentGeneration, TestVolumeHasOneHolder, "the attachment generation must grow by 1")
	mutanttest.Notices(t, mutant.FlushUngranted, TestVolumeReports, "a generation that was not granted cannot be flushed")
	mutanttest.Notices(t, mutant.RegisterOwnImage, TestExternalImageNames, "an image that Trivet has made was accepted")
	mutanttest.Notices(t, mutant.AttachUnchecked, TestRegisteredVolume, "attached before its image was checked")
	mutanttest.Notices(t, mutant.FlattenEarly, TestVolumeFlatten, "the host has not reported the volume as flattened")
	mutanttest.Notices(t, mutant.ReleaseAttachedDisk, TestDiskOfRunningVM, "the guest still has the disk")
	mutanttest.Notices(t, mutant.LeaveHostState, TestMigration, "testdata/migration/lost")
	mutanttest.Notices(t, mutant.GuessHostState, TestMigration, "testdata/migration/lost")
	mutanttest.Notices(t, mutant.GuessHostState, TestMigrationRulesNeverRunTwoGuests, "may have the newest state")
	mutanttest.Notices(t, mutant.CommitCanceled, TestMigration, "testdata/migration/aborts")
	for _, name := range []string{mutant.SwitchWithoutGeneration, mutant.RollBackUnproven, mutant.ReleaseSourceEarly, mutant.ObeyOldAttempt} {
		mutanttest.Notices(t, name, TestScenarios, "testdata/scenarios/")
	}
	mutanttest.Notices(t, mutant.SwitchWithoutGeneration, TestMigration, "testdata/migration/completes")
	mutanttest.Notices(t, mutant.RollBackUnproven, TestMigration, "testdata/migration/lost")
	mutanttest.Notices(t, mutant.ReleaseSourceEarly, TestMigrationRulesNeverRunTwoGuests, "expected: 0x6")
	mutanttest.Notices(t, mutant.KeepTargetLeaseRule, TestLeaseRuleOfMigration, "the source has not promised it")
	mutanttest.Notices(t, mutant.SwitchWithoutGrant, TestVolumeOfMigration, "two hosts may write with generation 3")
	mutanttest.Notices(t, mutant.RollBackWithoutGrant, TestVolumeOfMigration, "two hosts may write with generation 6")
	mutanttest.Notices(t, mutant.ObeyOldAttempt, TestMigration, "testdata/migration/attempts")
}
