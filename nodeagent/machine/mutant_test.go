//go:build mutant

package machine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that violation detects each mutant of this package.
func TestMutants(t *testing.T) {
	require.Empty(t, violation())
	for _, name := range []string{mutant.StartTwice, mutant.DestroyUnruled, mutant.ApplyForeign} {
		mutant.Set(name)
		require.NotEmpty(t, violation(), name)
	}
	mutant.Set("")
	require.Empty(t, migrationViolation())
	for _, name := range []string{mutant.RunUncommitted, mutant.RunHandedOver, mutant.ContinueCancelled, mutant.SwitchUncommitted, mutant.HandOverRunning} {
		mutant.Set(name)
		require.NotEmpty(t, migrationViolation(), name)
	}
	mutant.Set("")
	mutanttest.Notices(t, mutant.TwoConsoleWriters, TestOneConsoleWriter)
	mutanttest.Notices(t, mutant.RunUnactivated, TestMigrationOfSharedVolume, "the target runs the guest without its attachment")
	mutanttest.Notices(t, mutant.TakeBackActivated, TestMigrationTargetRanGuest, "the guest continues with the memory of the switchover")
}
