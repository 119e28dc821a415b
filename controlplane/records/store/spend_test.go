package store

import (
	"context"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/shared/fault"
)

type text struct{ Value string }

var texts = NewTable[text]("texts")

// TestSpend checks that Spend is called with the size of the log entry before an update is proposed, and that nothing
// is written if Spend returns an error. An update without writes must not call Spend.
func TestSpend(t *testing.T) {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	var spent []int
	var refusal error
	s := New(Options{
		Engine: engine, Proposer: NewDirect(engine), PageKey: make([]byte, 32),
		Spend: func(_ context.Context, n int) error { spent = append(spent, n); return refusal },
	})
	put := func(value string, meanwhile func()) error {
		_, err := s.Update(t.Context(), func(tx *Tx) error {
			if _, err := texts.Get(tx, "a"); err != nil {
				return err
			}
			if meanwhile != nil {
				meanwhile()
			}
			texts.Put(tx, &text{value}, "a")
			return nil
		})
		return err
	}
	require.NoError(t, put(string(make([]byte, 5000)), nil))
	require.Len(t, spent, 1)
	require.InDelta(t, 5100, spent[0], 100)

	_, err = s.Update(t.Context(), func(*Tx) error { return nil })
	require.NoError(t, err)
	require.Len(t, spent, 1)

	before := s.Revision()
	refusal = fault.New(fault.Throttled, "enough")
	require.True(t, fault.Is(put("b", nil), fault.Throttled))
	require.Equal(t, before, s.Revision())
	refusal = nil

	// Another update is made between the reads and the commit. Both attempts and the other update are log entries, so
	// Spend must be called three times.
	spent = nil
	once := false
	require.NoError(t, put("c", func() {
		if !once {
			once = true
			require.NoError(t, put("d", nil))
		}
	}))
	require.Len(t, spent, 3)
}

// TestDropUnchanged checks that an update after DropUnchanged creates a revision only if it changes a stored value.
func TestDropUnchanged(t *testing.T) {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	s := New(Options{Engine: engine, Proposer: NewDirect(engine), PageKey: make([]byte, 32)})
	do := func(f func(*Tx)) (changed bool) {
		before := s.Revision()
		_, err := s.Update(t.Context(), func(tx *Tx) error { f(tx); return tx.DropUnchanged() })
		require.NoError(t, err)
		return s.Revision() != before
	}
	require.True(t, do(func(tx *Tx) { texts.Put(tx, &text{"x"}, "a") }))
	require.False(t, do(func(tx *Tx) { texts.Put(tx, &text{"x"}, "a"); texts.Delete(tx, "b") }))
	require.True(t, do(func(tx *Tx) { texts.Put(tx, &text{"x"}, "a"); texts.Put(tx, &text{"x"}, "b") }))
	require.True(t, do(func(tx *Tx) { texts.Delete(tx, "b") }))
	require.True(t, do(func(tx *Tx) { texts.Put(tx, &text{"y"}, "a") }))
}
