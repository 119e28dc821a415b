//go:build mutant

package storage

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules for encrypted volumes, for desired states and for
// snapshots, and checks that a test fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.OpenPlainVolume, TestPlainFileIsNotOpenedAsEncrypted)
	mutanttest.Notices(t, mutant.DetachUnconfirmed, TestVolumeIsNotDetachedWhileItIsOpened)
	mutanttest.Notices(t, mutant.AcceptOldList, TestNewerAttachmentIsValid, "the older desired state detaches the volume")
	mutanttest.Notices(t, mutant.DeleteStored, TestLifeOfVolume)
	mutanttest.Notices(t, mutant.OpenStandbyVolume, TestVolumeOfMigration, "two hosts may write to the volume")
	mutanttest.Notices(t, mutant.TwoInstants, TestVMStartsDuringSnapshots, "the snapshots are of two instants")
}
