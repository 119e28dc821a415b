//go:build mutant

package uplink

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that violation or a test detects each mutant of this package.
func TestMutants(t *testing.T) {
	require.Empty(t, violation())
	for _, name := range []string{mutant.FollowLowerTerm, mutant.DeliverIncomplete} {
		mutant.Set(name)
		require.NotEmpty(t, violation(), name)
	}
	mutant.Set("")
	mutanttest.Notices(t, mutant.LeaseFromReceipt, TestLeaseStartsWhenHeartbeatIsSent, "the lease begins when the heartbeat was sent")
	mutanttest.Notices(t, mutant.StoreVolumeKey, TestVolumeKeysAreNotStored)
}
