//go:build mutant

package schedule_test

import (
	"testing"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant of the rules of placement, and checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.KeepOldCell, TestIndexEqualsScan, "the index chose another host than the scan")
	mutanttest.Notices(t, mutant.CountLostHost, schedule.TestRandomLosses, "that fit elsewhere")
}
