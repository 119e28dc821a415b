//go:build mutant

package volume

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules for opening, flushing and flattening volumes, and
// checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.OpenStaleVolume, TestOlderAttachmentIsRefused)
	mutanttest.Notices(t, mutant.OpenVolumeTwice, TestOpenVolumeIsLocked)
	mutanttest.Notices(t, mutant.FlushOpenVolume, TestOpenVolumeIsLocked)
	mutanttest.Notices(t, mutant.FlattenOverlayOnly, TestFlatten)
	mutanttest.Notices(t, mutant.RecordIncomplete, TestRecordFlattened)
	mutanttest.Notices(t, mutant.ExportWithoutZeros, TestExportOfRawVolume)
	mutanttest.Notices(t, mutant.SkipConfirm, TestAttachmentEndsWhileQEMUOpens)
	mutanttest.Notices(t, mutant.OpenStaleVolume, TestHostIsLost)
	mutanttest.Notices(t, mutant.OpenVolumeTwice, TestHostIsLost, "two hosts may write the volume")
	mutanttest.Notices(t, mutant.ReuseUnfinished, TestLateWriterChangesNothing, "the volume of the other host was replaced")
	mutanttest.Notices(t, mutant.FlattenUsedVolume, TestFlattenAfterLostLock, "the copy replaced the overlay")
	mutanttest.Notices(t, mutant.FinishFailed, TestSnapshotOfLostHost, "a failed snapshot became complete")
	mutanttest.Notices(t, mutant.WriteWithoutLock, TestRecordAfterLostLock)
	mutanttest.Notices(t, mutant.KeepLateRecord, TestLateRename, "an old record replaces a newer one")
	mutanttest.Notices(t, mutant.FinishFailed, TestRBDSnapshotOfLostHost, "a failed snapshot became complete")
	mutanttest.Notices(t, mutant.RemakeDeleted, TestDeletedVolumeIsNotMade, "a deleted volume was made again")
	mutanttest.Notices(t, mutant.RemakeDeleted, TestDeletedVolumeOfSharedPool, "a deleted volume was made again")
	mutanttest.Notices(t, mutant.CheckDeletionEarly, TestDeletedVolumeIsNotMade, "a deleted volume was made again")
	mutanttest.Notices(t, mutant.KeepLateImage, TestDeletedVolumeIsNotMade, "the image of a deleted volume remains")
	mutanttest.Notices(t, mutant.SweepEarly, TestRBDVolumesOfImages, "a base image is deleted too early")
	mutanttest.Notices(t, mutant.StaleSnapshot, TestRBDSnapshots, "a snapshot for an earlier attachment")
	mutanttest.Notices(t, mutant.AdoptOpenImage, TestRegisteredImage, "that a client has open became a volume")
	mutanttest.Notices(t, mutant.AdoptTwice, TestRegisteredImage, "one image became two volumes")
	mutanttest.Notices(t, mutant.DeleteRegistered, TestRegisteredImage, "the image was deleted with the volume")
	mutanttest.Notices(t, mutant.StaleFinish, TestRBDSnapshotOfLostHost, "a snapshot of an ended attachment became complete")
	mutanttest.Notices(t, mutant.ImportPlainImage, TestEncryptedRBDVolumes, "the cluster has the image in plain text")
	mutanttest.Notices(t, mutant.FenceWithoutBlock, TestFenceBlocksRecordedClients)
	mutanttest.Notices(t, mutant.FenceWithoutBlock, TestFenceOfOlderRecord)
	mutanttest.Notices(t, mutant.FenceLaterUse, TestFenceBlocksRecordedClients, "an old request to fence")
	mutanttest.Notices(t, mutant.FenceLateClients, TestFenceBlocksRecordedClients, "would not be blocked")
	mutanttest.Notices(t, mutant.StandbyWithoutLock, TestMigrationOfSharedVolume, "three processes have the volume open")
	mutanttest.Notices(t, mutant.StandbyOfOtherVM, TestMigrationOfSharedVolume, "another VM gets the volume")
	mutanttest.Notices(t, mutant.StandbyOfOtherVM, TestMigrationOfRBDVolume, "another VM gets the volume")
	mutanttest.Notices(t, mutant.ActivateStale, TestSourceTakesVolumeBack, "two hosts may write to the volume")
	mutanttest.Notices(t, mutant.ActivateStale, TestSourceTakesRBDVolumeBack, "two hosts may write to the volume")
	mutanttest.Notices(t, mutant.TakeBackUnproven, TestSourceTakesVolumeBack, "the target may write to the volume")
	mutanttest.Notices(t, mutant.TakeBackUnproven, TestSourceTakesRBDVolumeBack, "the target may write to the volume")
	mutanttest.Notices(t, mutant.TakeBackActivated, TestSourceTakesVolumeBack, "the guest continues with the memory of the switchover")
	mutanttest.Notices(t, mutant.TakeBackActivated, TestSourceOfActivatedRBDVolume, "the guest continues with the memory of the switchover")
	mutanttest.Notices(t, mutant.OverwriteRecord, TestRecordChangesDuringOpen, "two hosts have the volume open")
	for _, name := range []string{
		mutant.OpenStaleVolume, mutant.OpenVolumeTwice, mutant.FlushOpenVolume, mutant.OpenUnflushedImage, mutant.OpenBeforeRecord,
	} {
		mutanttest.Notices(t, name, TestRBDAttachments)
	}
}
