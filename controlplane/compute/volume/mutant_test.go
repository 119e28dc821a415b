//go:build mutant

package volume

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules for the bytes of volumes, and checks that a test
// notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.StaleQuota, TestConcurrentVolumeQuota, "exceed the quota")
	mutanttest.Notices(t, mutant.SendKeyToAll, TestVolumeKey, "must not get its key")
	mutanttest.Notices(t, mutant.KeepVolumeKey, TestKeyIsDeletedWithVolume, "must be deleted")
	mutanttest.Notices(t, mutant.SendKeyToAll, TestKeysOfSnapshots, "must not get its key")
	mutanttest.Notices(t, mutant.NewKeyForCopy, TestKeysOfSnapshots, "cannot be read with another key")
	mutanttest.Notices(t, mutant.DropNeededKey, TestKeysOfSnapshots, "the snapshot needs the key")
	mutanttest.Notices(t, mutant.MoveUnflushed, TestRBDVolumeFollowsHosts, "keeps its host")
	mutanttest.Notices(t, mutant.MoveUnflushed, TestSharedVolumeFollowsVMs, "keeps its host")
	mutanttest.Notices(t, mutant.AttachTwice, TestSharedVolumeAttachedTwice, "a second VM got the volume")
	mutanttest.Notices(t, mutant.AttachUnflushed, TestSharedVolumesOfRemovedHost, "two hosts may write")
	mutanttest.Notices(t, mutant.AnyPoolID, TestSharedVolumeFollowsVMs, "the host does not have the directory")
	mutanttest.Notices(t, mutant.CountSharedPoolTwice, TestSharedVolumeFollowsVMs, "counted for all hosts together")
	mutanttest.Notices(t, mutant.MoveDuringSnapshot, TestSnapshotsInSharedPool, "the host is copying the volume")
	mutanttest.Notices(t, mutant.ForgetBytesEarly, TestVolumeOnItsHost, "a report from before the deletion must not end it")
	mutanttest.Notices(t, mutant.FlushLostHost, TestHostRemovedWithVolumes, "two hosts may write")
	mutanttest.Notices(t, mutant.RegisterTwice, TestRegisterExternalVolume, "two volumes have the image")
	mutanttest.Notices(t, mutant.ReleaseImageEarly, TestRegisterExternalVolume, "two volumes have the image")
	mutanttest.Notices(t, mutant.RegisterOwnImage, TestRegisterRefused, "outside of the rules")
	mutanttest.Notices(t, mutant.RegisterElsewhere, TestRegisterRefused, "outside of the rules")
	mutanttest.Notices(t, mutant.KeepClassKey, TestClassChangeReachesVolumes, "was not sent the new key")
	mutanttest.Notices(t, mutant.ForgetUnseenBytes, TestFailedDeletion, "the host has not deleted the bytes")
}
