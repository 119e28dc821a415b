package identity

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestMissesShareReads checks that concurrent calls of wait share reads, each of which began after the calls that it
// serves, and that consecutive calls cause at most missesPerSecond reads per second after the burst.
func TestMissesShareReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, reads := newMissReads(), 0
		barrier := func(context.Context) error {
			reads++
			time.Sleep(time.Millisecond)
			return nil
		}
		var calls sync.WaitGroup
		for range 1000 {
			calls.Go(func() { require.NoError(t, m.wait(t.Context(), barrier)) })
		}
		calls.Wait()
		require.Equal(t, 2, reads, "there must be one read for the first call, and one for all calls that began during it")

		reads = 0
		begin := time.Now()
		for range 1000 {
			before := reads
			require.NoError(t, m.wait(t.Context(), barrier))
			require.Equal(t, before+1, reads, "a call must not share a read that began before the call")
		}
		require.LessOrEqual(t, float64(reads), missBurst+missesPerSecond*time.Since(begin).Seconds()+1)
		require.Less(t, time.Since(begin), 30*time.Second)
	})
}

// TestFailedReadIsNotShared checks that a call of wait returns the error of its own read only: after a failed read, the
// next waiting call begins another.
func TestFailedReadIsNotShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, broken := newMissReads(), errors.New("broken")
		reads := 0
		barrier := func(context.Context) error {
			time.Sleep(time.Millisecond)
			if reads++; reads < 3 {
				return broken
			}
			return nil
		}
		failed := make(chan error, 10)
		var calls sync.WaitGroup
		for range 10 {
			calls.Go(func() { failed <- m.wait(t.Context(), barrier) })
		}
		calls.Wait()
		close(failed)
		n := 0
		for err := range failed {
			if err != nil {
				require.ErrorIs(t, err, broken)
				n++
			}
		}
		require.Equal(t, 2, n)
		require.Equal(t, 3, reads)
	})
}

// countingProposer is a Proposer that counts linearizable reads in n.
type countingProposer struct {
	*store.Direct
	n atomic.Int64
}

func (r *countingProposer) ReadIndex(ctx context.Context) error {
	r.n.Add(1)
	return r.Direct.ReadIndex(ctx)
}

// TestUnknownProjectsCauseFewReads checks that, once the rate limit is used up, calls and tokens for unknown projects
// return an error and cause no linearizable read.
func TestUnknownProjectsCauseFewReads(t *testing.T) {
	w := newWorld(t)
	wire := &countingProposer{Direct: w.direct}
	now := func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.at }
	s := w.member(0, false)
	s.opts.Store = store.New(store.Options{Engine: w.engine, Proposer: wire, PageKey: make([]byte, 32), Now: now})
	s.misses.limit = rate.NewLimiter(rate.Every(time.Hour), 2)
	lost := w.hostToken(cloud.Tenant{Org: "acme", Project: "unknown"})

	org, err := s.OrgOf(t.Context(), "unknown")
	require.NoError(t, err)
	require.Empty(t, org)
	_, err = s.Verify(t.Context(), lost)
	require.NoError(t, err)
	before := wire.n.Load()
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		_, err = s.OrgOf(ctx, "unknown")
		require.Error(t, err)
		_, err = s.Verify(ctx, lost)
		require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
		cancel()
	}
	require.Equal(t, before, wire.n.Load())
	_, err = s.Verify(t.Context(), w.hostToken(cloud.Tenant{}))
	require.NoError(t, err, "a token without a project must need no read")
}
