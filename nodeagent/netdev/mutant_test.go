//go:build mutant

package netdev

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables single rules of the package and checks that the test of each then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.LooseForever, TestMigrationWindow, "the window has ended")
	mutanttest.Notices(t, mutant.UnfilteredPort, TestTap, "the device is down before Activate")
}
