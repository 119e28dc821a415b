//go:build mutant

package node

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of this package, and checks that a test notices it.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	ctx := limited(t)

	mutant.Set(mutant.EvictForgets)
	_, err := newWorld(t).evictWithVMs(ctx)
	require.ErrorContains(t, err, "was freed")

	mutant.Set(mutant.IgnoreBans)
	w := newWorld(t)
	h, err := w.join(ctx, newKey(t), "rack-1")
	require.NoError(t, err)
	_, err = w.members[1].Ban(ctx, h.id, "", "")
	require.NoError(t, err)
	require.ErrorContains(t, w.bannedCalls(ctx, h), "let in")

	mutanttest.Notices(t, mutant.KeepEvictedOpen, TestEvict,
		"the watch of an evicted host stays open", "the report of an evicted host stays open", "the console of an evicted host stays open")
	mutanttest.Notices(t, mutant.RenewFencedLease, TestHeartbeatWhileFencing, "the lease of a fenced host is renewed")
	mutanttest.Notices(t, mutant.AnyNodeID, TestHeartbeat, "a host sent a heartbeat for another")
}
