//go:build mutant

package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// The tests notice each mutant of this package.
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

	mutant.Set(mutant.KeepEvictedOpen)
	w = newWorld(t)
	h, err = w.join(ctx, newKey(t), "rack-1")
	require.NoError(t, err)
	ends := w.open(ctx, h)
	_, err = w.members[1].Evict(ctx, h.id, false)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- ends["watch"]() }()
	select {
	case err := <-ended:
		require.Fail(t, "it ended all the same", "%v", err)
	case <-time.After(3 * time.Second):
	}
}
