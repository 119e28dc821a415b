//go:build mutant

package consensus

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutantsOfMembers checks that tests fail with the mutants that break rules of membership changes and of the
// installation of snapshots.
func TestMutantsOfMembers(t *testing.T) {
	mutanttest.Notices(t, mutant.PromoteEarly, TestPromoteLaggingLearner, "the learner has no entry")
	mutanttest.Notices(t, mutant.ReadmitRemoved, TestRemovedDirectoryReturns, "Not equal")
	mutanttest.Notices(t, mutant.HearRemoved, TestRemovedDirectoryReturns, "told the member that it was removed")
	mutanttest.Notices(t, mutant.SkipInstallMarker, TestCrashDuringInstallation, "the log has lost what it had acknowledged")
}
