package identity

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// partitionedProposer is a Proposer of a member that a test can isolate: while off is set, linearizable reads wait
// until their context ends.
type partitionedProposer struct {
	*store.Direct
	off atomic.Bool
}

func (c *partitionedProposer) ReadIndex(ctx context.Context) error {
	if c.off.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	return c.Direct.ReadIndex(ctx)
}

// TestIsolatedMemberAcceptsNoTokens checks that a member without a connection to the other members accepts tokens for
// staleness (900 ms), and then returns Unavailable.
func TestIsolatedMemberAcceptsNoTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // so that the timeout of Verify takes no real time
		w := newWorld(t)
		w.user("ada", member)
		wire := &partitionedProposer{Direct: w.direct}
		now := func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.at }
		far := w.member(0, false)
		far.opts.Store = store.New(store.Options{Engine: w.engine, Proposer: wire, PageKey: make([]byte, 32), Now: now})
		text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
		verify := func() error { return errOf(far.Verify(t.Context(), text)) }
		require.NoError(t, verify())
		wire.off.Store(true)
		w.wait(staleness)
		require.NoError(t, verify())
		w.wait(time.Millisecond)
		err := verify()
		require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
		require.ErrorContains(t, err, "does not reach the others")
		require.Less(t, staleness, time.Second)
		wire.off.Store(false)
		require.NoError(t, verify())
	})
}

// TestWrongClockIsReported checks that a member whose clock differs by more than MaxSkew from the others issues and
// verifies no tokens, and that its error says by how much the clock is wrong.
func TestWrongClockIsReported(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
	for _, ahead := range []time.Duration{0, time.Minute, -time.Minute, MaxSkew} {
		w.skew = ahead
		require.NoError(t, errOf(w.first.Verify(t.Context(), text)))
	}
	for ahead, says := range map[time.Duration]string{10 * time.Minute: "10m0s ahead of the others'", -10 * time.Minute: "10m0s behind the others'"} {
		w.skew = ahead
		for _, err := range []error{errOf(w.first.Verify(t.Context(), text)), func() error {
			_, _, err := w.first.token(t.Context(), tokenRequest{User: "ada", Password: secret})
			return err
		}()} {
			require.True(t, fault.Is(err, fault.Unavailable), "a member with a wrong clock verified or issued a token: %v", err)
			require.ErrorContains(t, err, says)
		}
	}
	w.skew = 0
	early := w.member(10*time.Minute, false)
	early.opts.Skew = nil // as if no other member had reported its time yet
	ahead := w.token(early, tokenRequest{User: "ada", Password: secret})
	err := errOf(w.first.Verify(t.Context(), ahead))
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	require.ErrorContains(t, err, "the clock of this member or of the one that made it is wrong")
	near := w.token(w.member(time.Minute, false), tokenRequest{User: "ada", Password: secret})
	require.NoError(t, errOf(w.first.Verify(t.Context(), near)))
}
