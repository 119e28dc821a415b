package store

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// slowProposer is a Proposer whose proposals take a second. It counts the proposals and those whose guards failed.
type slowProposer struct {
	*Direct
	proposed, conflicts atomic.Int64
	fail                error // if not nil, the error of each proposal, which is then not applied
}

func (p *slowProposer) Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error) {
	p.proposed.Add(1)
	time.Sleep(time.Second)
	if p.fail != nil {
		return command.Result{}, p.fail
	}
	r, err := p.Direct.Propose(ctx, id, data)
	if r.Conflict {
		p.conflicts.Add(1)
	}
	return r, err
}

type count struct{ N int }

var counts = NewTable[count]("counts")

// increment adds 1 to the count at path, which begins at 0.
func increment(ctx context.Context, s *Store, path string) error {
	_, err := s.Update(ctx, func(tx *Tx) error {
		c, err := counts.Get(tx, path)
		if err != nil {
			return err
		}
		if c == nil {
			c = &count{}
		}
		c.N++
		counts.Put(tx, c, path)
		return nil
	})
	return err
}

// withSlowStore runs f in a synctest bubble, with a store over a slowProposer.
func withSlowStore(t *testing.T, f func(*testing.T, *Store, *slowProposer)) {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	synctest.Test(t, func(t *testing.T) {
		p := &slowProposer{Direct: NewDirect(engine)}
		f(t, New(Options{Engine: engine, Proposer: p, PageKey: make([]byte, 32)}), p)
	})
}

// TestUpdatesOfOneRecordDoNotConflict runs updates of one record concurrently. Each must be proposed once, after the
// previous one has ended, so that none conflicts. An update of another record must not wait.
func TestUpdatesOfOneRecordDoNotConflict(t *testing.T) {
	withSlowStore(t, func(t *testing.T, s *Store, p *slowProposer) {
		began := time.Now()
		ended := make(chan error)
		const callers = 8
		for range callers {
			go func() { ended <- increment(t.Context(), s, "shared") }()
		}
		synctest.Wait() // one proposal is running, the other updates wait for it
		require.EqualValues(t, 1, p.proposed.Load())
		require.NoError(t, increment(t.Context(), s, "other"))
		require.Equal(t, time.Second, time.Since(began))
		for range callers {
			require.NoError(t, <-ended)
		}
		require.EqualValues(t, callers+1, p.proposed.Load())
		require.Zero(t, p.conflicts.Load())
		require.NoError(t, s.Local(func(v *View) error {
			c, err := counts.Get(v, "shared")
			require.Equal(t, callers, c.N)
			return err
		}))
		require.Empty(t, s.inflight.keys)
	})
}

// TestUpdateWaitsForAProposalThatFails checks that an update that waits for another proposal continues when that
// proposal fails, and returns when its own context ends.
func TestUpdateWaitsForAProposalThatFails(t *testing.T) {
	withSlowStore(t, func(t *testing.T, s *Store, p *slowProposer) {
		p.fail = errors.New("no leader")
		ended := make(chan error)
		for range 3 {
			go func() { ended <- increment(t.Context(), s, "shared") }()
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		require.ErrorIs(t, increment(ctx, s, "shared"), context.DeadlineExceeded)
		for range 3 {
			require.ErrorIs(t, <-ended, p.fail)
		}
		require.Empty(t, s.inflight.keys)
	})
}
