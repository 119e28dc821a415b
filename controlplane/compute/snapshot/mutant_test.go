//go:build mutant

package snapshot

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules for snapshots, and checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ForgetSnapshotEarly, TestSnapshotLife, "a report from before the deletion must not end it")
	mutanttest.Notices(t, mutant.ReplaceSnapshot, TestHostLosesSnapshot, "a copy of a later instant is not the snapshot")
	mutanttest.Notices(t, mutant.ExportEncrypted, TestExport, "an encrypted snapshot was exported")
}
