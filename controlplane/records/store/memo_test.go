package store

import (
	"errors"
	"strconv"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

// memoFixture is a store with a Memo. derived counts how often a value was derived.
type memoFixture struct {
	*Store
	t       *testing.T
	table   Table[int]
	memo    *Memo[int]
	derived int
}

func newMemoFixture(t *testing.T, indexed bool) *memoFixture {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{KeyIndex: indexed, Quiet: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	s := New(Options{Engine: engine, Proposer: NewDirect(engine), PageKey: make([]byte, 32)})
	return &memoFixture{Store: s, t: t, table: NewTable[int]("number"), memo: NewMemo[int](4)}
}

func (m *memoFixture) put(path string, n int) {
	m.t.Helper()
	_, err := m.Update(m.t.Context(), func(tx *Tx) error { m.table.Put(tx, &n, "n", path); return nil })
	require.NoError(m.t, err)
}

func (m *memoFixture) remove(path string) {
	m.t.Helper()
	_, err := m.Update(m.t.Context(), func(tx *Tx) error { m.table.Delete(tx, "n", path); return nil })
	require.NoError(m.t, err)
}

// sum returns, through the Memo, the sum of the records a and b. A record that does not exist counts as 1000.
func (m *memoFixture) sum(r Reader) (int, error) {
	return m.memo.Get(r, MemoKey{1}, func(v *View) (sum int, err error) {
		m.derived++
		for _, path := range []string{"a", "b"} {
			n, err := m.table.Get(v, "n", path)
			if err != nil {
				return 0, err
			}
			if n == nil {
				n = new(1000)
			}
			sum += *n
		}
		return sum, nil
	})
}

func (m *memoFixture) wants(sum, derived int, when string) {
	m.t.Helper()
	require.NoError(m.t, m.Local(func(v *View) error {
		got, err := m.sum(v)
		require.Equal(m.t, sum, got, when)
		return err
	}))
	require.Equal(m.t, derived, m.derived, when)
}

// TestMemoFollowsItsRecords checks that a value is derived again only if a record that it was derived from has changed.
func TestMemoFollowsItsRecords(t *testing.T) {
	m := newMemoFixture(t, true)
	m.put("a", 1)
	m.wants(1001, 1, "first read")
	m.put("c", 5)
	m.wants(1001, 1, "another record was written")
	m.put("b", 2)
	m.wants(3, 2, "a record that did not exist was written")
	m.put("a", 1)
	m.wants(3, 3, "a record was written with the same value")
	m.remove("b")
	m.wants(1001, 4, "a record was deleted")
	m.wants(1001, 4, "no record was changed")
}

// TestMemoOfAList checks that a value derived from a list is derived again when a record of the list is written, added
// or deleted.
func TestMemoOfAList(t *testing.T) {
	m := newMemoFixture(t, true)
	count := func() (n int) {
		require.NoError(t, m.Local(func(v *View) (err error) {
			n, err = m.memo.Get(v, MemoKey{2}, func(v *View) (int, error) {
				m.derived++
				all, _, err := m.table.List(v, 0, "n")
				return len(all), err
			})
			return err
		}))
		return n
	}
	require.Zero(t, count())
	m.put("a", 1)
	require.Equal(t, 1, count())
	m.put("b", 1)
	require.Equal(t, 2, count())
	m.remove("b")
	require.Equal(t, 1, count(), "the newest record was deleted")
	m.put("b", 1)
	m.remove("a")
	require.Equal(t, 1, count(), "one was added and one deleted")
	require.Equal(t, 5, m.derived)
	require.Equal(t, 1, count())
	require.Equal(t, 5, m.derived)
}

// TestMemoInATransaction uses a cached value in a transaction. If a record of the value changes before the commit, the
// transaction must conflict and run again.
func TestMemoInATransaction(t *testing.T) {
	m := newMemoFixture(t, true)
	m.put("a", 1)
	m.put("b", 2)
	m.wants(3, 1, "first read")
	runs := 0
	_, err := m.Update(t.Context(), func(tx *Tx) error {
		sum, err := m.sum(tx)
		if err != nil {
			return err
		}
		if runs++; runs == 1 {
			m.put("b", 40)
		}
		m.table.Put(tx, &sum, "n", "sum")
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 2, runs)
	require.NoError(t, m.Local(func(v *View) error {
		sum, err := m.table.Get(v, "n", "sum")
		require.Equal(t, 41, *sum)
		return err
	}))
	// Get must see the writes of its own transaction, and must not cache the resulting value.
	_, err = m.Update(t.Context(), func(tx *Tx) error {
		m.table.Put(tx, new(100), "n", "a")
		sum, err := m.sum(tx)
		require.Equal(t, 140, sum)
		return errors.Join(err, errors.New("given up"))
	})
	require.ErrorContains(t, err, "given up")
	require.NoError(t, m.Local(func(v *View) error {
		sum, err := m.sum(v)
		require.Equal(t, 41, sum)
		return err
	}))
}

// TestMemoDoesNotCacheErrors checks that errors, and values that depend on too many reads, are not cached. Without a
// key index nothing may be cached.
func TestMemoDoesNotCacheErrors(t *testing.T) {
	m := newMemoFixture(t, true)
	failed := errors.New("no value")
	for range 2 {
		require.ErrorIs(t, m.Local(func(v *View) error {
			_, err := m.memo.Get(v, MemoKey{3}, func(*View) (int, error) { m.derived++; return 0, failed })
			return err
		}), failed)
	}
	require.Equal(t, 2, m.derived)
	for range 2 {
		require.NoError(t, m.Local(func(v *View) error {
			_, err := m.memo.Get(v, MemoKey{4}, func(v *View) (int, error) {
				m.derived++
				for i := range memoReads + 1 {
					if _, err := m.table.Get(v, "n", strconv.Itoa(i)); err != nil {
						return 0, err
					}
				}
				return 0, nil
			})
			return err
		}))
	}
	require.Equal(t, 4, m.derived)

	plain := newMemoFixture(t, false)
	plain.put("a", 1)
	plain.wants(1001, 1, "without an index")
	plain.wants(1001, 2, "a second read without an index")
}
