package store_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func TestMemory(t *testing.T) {
	storetest.Run(t, func(t *testing.T, now func() time.Time) *store.Store { return storetest.Memory(t, now) })
}

// partitionedProposer is a Proposer whose ReadIndex fails while off is set, as on a member that cannot reach the
// others.
type partitionedProposer struct {
	store.Proposer
	off bool
}

func (c *partitionedProposer) ReadIndex(ctx context.Context) error {
	if c.off {
		return errors.New("cut off")
	}
	return c.Proposer.ReadIndex(ctx)
}

// TestRecentIgnoresTheWallClock checks that Recent measures age by the monotonic clock. With the wall clock, an
// isolated member whose clock was set back would return outdated records for that long.
func TestRecentIgnoresTheWallClock(t *testing.T) {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	defer engine.Close()
	proposer := &partitionedProposer{Proposer: store.NewDirect(engine), off: true}
	wall, elapsed := time.Now(), time.Duration(0)
	s := store.New(store.Options{
		Engine: engine, Proposer: proposer, PageKey: make([]byte, 32),
		Now: func() time.Time { return wall }, Elapsed: func() time.Duration { return elapsed },
	})
	recent := func() error {
		return s.Recent(t.Context(), time.Second, func(*store.View) error { return nil })
	}
	require.Error(t, recent(), "the member has never confirmed that its state is current")
	proposer.off = false
	require.NoError(t, recent())
	proposer.off = true
	for _, set := range []time.Duration{0, 10 * time.Minute, -20 * time.Minute} {
		wall = wall.Add(set)
		require.NoError(t, recent(), "the confirmation is recent although the wall clock was set")
	}
	elapsed += time.Second + 2
	require.Error(t, recent(), "the confirmation is too old although the wall clock was set back")
}

// laggingProposer is the Proposer of a member that has not applied the newest entries. The next ReadIndex calls rest,
// which applies them.
type laggingProposer struct {
	*store.Direct
	rest func()
}

func (l *laggingProposer) ReadIndex(ctx context.Context) error {
	if f := l.rest; f != nil {
		l.rest = nil
		f()
	}
	return l.Direct.ReadIndex(ctx)
}

// TestRefusalsUseCurrentRecords checks that refusals and updates without writes are based on current records, even on a
// member that lags behind. Otherwise a client could see older records after newer ones from another member.
func TestRefusalsUseCurrentRecords(t *testing.T) {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	wire := &laggingProposer{Direct: store.NewDirect(engine)}
	s := store.New(store.Options{Engine: engine, Proposer: wire, PageKey: make([]byte, 32)})
	things := store.NewTable[string]("thing")
	put := func(value string) {
		_, err := store.New(store.Options{Engine: engine, Proposer: wire.Direct, PageKey: make([]byte, 32)}).Update(t.Context(), func(tx *store.Tx) error {
			things.Put(tx, &value, "a")
			return nil
		})
		require.NoError(t, err)
	}
	put("running")
	runs := 0
	remove := func(tx *store.Tx) error {
		runs++
		state, err := things.Get(tx, "a")
		if err != nil {
			return err
		}
		if *state != "stopped" {
			return fault.New(fault.FailedPrecondition, "it is %s", *state)
		}
		things.Delete(tx, "a")
		return nil
	}
	_, err = s.Update(t.Context(), remove)
	require.EqualError(t, err, "it is running")
	require.Equal(t, 1, runs, "the function is not run again if its records are unchanged")
	wire.rest = func() { put("stopped") }
	_, err = s.Update(t.Context(), remove)
	require.NoError(t, err)

	var seen bool
	look := func(tx *store.Tx) (err error) { seen, err = things.Has(tx, "a"); return err }
	wire.rest = func() { put("again") }
	_, err = s.Update(t.Context(), look)
	require.NoError(t, err)
	require.True(t, seen)
}
