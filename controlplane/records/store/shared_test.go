package store_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var texts = store.NewTable[string]("text")

// sharedFixture is a store with a Shared whose values are texts that describe the change. made counts the derived
// values; broken makes derivations fail.
type sharedFixture struct {
	t      *testing.T
	s      *store.Store
	shared *store.Shared[string, string]
	made   atomic.Int64
	broken atomic.Bool
}

// newSharedFixture returns a fixture whose engine has recent bytes of events in memory and whose Shared caches up to
// most bytes of values.
func newSharedFixture(t *testing.T, recent int64, most int) *sharedFixture {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{RecentBytes: recent})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	w := &sharedFixture{t: t, s: store.New(store.Options{Engine: engine, Proposer: store.NewDirect(engine), PageKey: make([]byte, 32)})}
	show := func(s *string) string {
		if s == nil {
			return "nothing"
		}
		return *s
	}
	w.shared = store.NewShared(w.s, texts, most, func(c store.Change[string]) (string, int, error) {
		w.made.Add(1)
		if w.broken.Load() {
			return "", 0, errors.New("broken")
		}
		return fmt.Sprintf("%s to %s at %d", show(c.Before), show(c.Value), c.Revision), 10, nil
	})
	return w
}

// put writes text to the record id, or deletes the record if text is empty. It returns the revision.
func (w *sharedFixture) put(id, text string) int64 {
	revision, err := w.s.Update(w.t.Context(), func(tx *store.Tx) error {
		if text == "" {
			texts.Delete(tx, id)
		} else {
			texts.Put(tx, &text, id)
		}
		return nil
	})
	require.NoError(w.t, err)
	return revision
}

// next returns the derived values of the next n changes of a watch, with ", gone" for deletions.
func (w *sharedFixture) next(watch *store.SharedWatch[string, string], n int) (out []string) {
	for len(out) < n {
		changes, err := watch.Next(w.t.Context())
		require.NoError(w.t, err)
		for _, c := range changes {
			text, err := c.Value()
			require.NoError(w.t, err)
			if c.Deleted {
				text += ", gone"
			}
			out = append(out, text)
		}
	}
	return out
}

// TestSharedValuesAreDerivedOnce runs many watches of one record. Each must get every change, in order and with the
// previous value. The value of each change must be derived only once, whether its event is in memory or on disk.
func TestSharedValuesAreDerivedOnce(t *testing.T) {
	for name, recent := range map[string]int64{"from memory": 1 << 20, "from disk": 1} {
		t.Run(name, func(t *testing.T) {
			w := newSharedFixture(t, recent, 1<<20)
			from := w.put("other", "x") + 1
			const watchers = 20
			all := make([]*store.SharedWatch[string, string], watchers)
			for i := range all {
				all[i] = w.shared.WatchOne(from, "a")
				defer all[i].Close()
			}
			w.put("a", "one")
			w.put("other", "y")
			w.put("a", "two")
			w.put("a", "")
			w.put("a", "three")
			want := []string{"nothing to one at 3", "one to two at 5", "two to nothing at 6, gone", "nothing to three at 7"}
			var work sync.WaitGroup
			got := make([][]string, watchers)
			for i := range all {
				work.Go(func() { got[i] = w.next(all[i], len(want)) })
			}
			work.Wait()
			for _, g := range got {
				require.Equal(t, want, g)
			}
			require.EqualValues(t, len(want), w.made.Load())
		})
	}
}

// TestSharedCurrent calls Current several times for a record whose last revision was compacted. The value must be
// derived only once.
func TestSharedCurrent(t *testing.T) {
	w := newSharedFixture(t, 1<<20, 1<<20)
	w.put("a", "one")
	last := w.put("other", "x")
	require.NoError(t, w.s.Compact(t.Context(), last))
	for range 3 {
		require.NoError(t, w.s.Local(func(v *store.View) error {
			current, err := w.shared.Current(v, "a")
			require.NoError(t, err)
			text, err := current()
			require.NoError(t, err)
			require.Equal(t, "one to one at 2", text)
			_, err = w.shared.Current(v, "none")
			require.ErrorContains(t, err, "no such record")
			return nil
		}))
	}
	require.EqualValues(t, 1, w.made.Load())
}

// TestSharedHistoryExpires asks for values of changes after a compaction. A value that another watch has asked for
// earlier must still be cached; any other must fail with OutOfRange.
func TestSharedHistoryExpires(t *testing.T) {
	w := newSharedFixture(t, 1<<20, 1<<20)
	from := w.put("a", "one") + 1
	early, late := w.shared.WatchOne(from, "a"), w.shared.WatchOne(from, "a")
	defer early.Close()
	defer late.Close()
	w.put("a", "two")
	w.put("a", "three")
	require.Len(t, w.next(early, 2), 2)
	changes, err := late.Next(t.Context())
	require.NoError(t, err)
	require.Len(t, changes, 2)
	last := w.put("other", "x")
	require.NoError(t, w.s.Compact(t.Context(), last))
	text, err := changes[0].Value()
	require.NoError(t, err, "the value that another watch has derived is cached")
	require.Equal(t, "one to two at 3", text)

	w.put("a", "four")
	changes, err = late.Next(t.Context())
	require.NoError(t, err)
	require.NoError(t, w.s.Compact(t.Context(), w.put("a", "five")))
	_, err = changes[0].Value()
	require.True(t, fault.Is(err, fault.OutOfRange), "%v", err)
}

// TestSharedCacheIsBounded checks that the cache holds only as many bytes as it may, and that a value whose derivation
// failed is derived again.
func TestSharedCacheIsBounded(t *testing.T) {
	w := newSharedFixture(t, 1<<20, 30)
	watch := w.shared.WatchOne(1, "a")
	defer watch.Close()
	for i := range 5 {
		w.put("a", fmt.Sprint(i))
	}
	changes, err := watch.Next(t.Context())
	require.NoError(t, err)
	require.Len(t, changes, 5)
	w.broken.Store(true)
	_, err = changes[0].Value()
	require.EqualError(t, err, "broken")
	w.broken.Store(false)
	for range 2 {
		for _, c := range changes {
			_, err := c.Value()
			require.NoError(t, err)
		}
	}
	require.EqualValues(t, 1+2*5, w.made.Load(), "the cache holds three values, so five values that are read in turn are all derived again")
	_, err = changes[4].Value()
	require.NoError(t, err)
	require.EqualValues(t, 1+2*5, w.made.Load())
}
