// Package storetest contains the test suite for stores, and in-memory stores for the tests of other packages. Open
// returns a store with a Quorum, whose calls a test can count and make fail. Clock is a clock that a test sets.
package storetest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// Memory returns an in-memory store. now is the store's clock; nil means the system clock.
func Memory(t testing.TB, now func() time.Time) *store.Store {
	s, _ := Open(t, now)
	return s
}

type account struct {
	Owner   string
	Balance int64
}

var (
	accounts = store.NewTable[account]("account")
	// other is a table whose name begins with the name of the table accounts. Its records must not appear in lists and
	// watches of accounts.
	other = store.NewTable[account]("account2")
)

// Run runs the test suite. Each call of open must return an empty store that uses now as its clock.
func Run(t *testing.T, open func(t *testing.T, now func() time.Time) *store.Store) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, *store.Store, *Clock)
	}{
		{"what is written is read", readWritten},
		{"an error changes nothing", errorsChangeNothing},
		{"a transaction sees its own writes", ownWrites},
		{"conflicting updates all count", conflicts},
		{"a phantom is a conflict", phantoms},
		{"updates from many sides keep the sum", transfers},
		{"pages show one moment", pages},
		{"a list goes on behind a record", listsOn},
		{"page tokens cannot be forged", forgedTokens},
		{"a page of before the kept history", oldPage},
		{"a watch misses nothing and keeps order", watches},
		{"a watch of several tables has one order", watchesTables},
		{"waiting for a record", awaits},
		{"the same key gives the same answer", idempotency},
		{"old answers are forgotten", answersExpire},
		{"a place that is used for something else forgets its answers", placeForgotten},
		{"time never goes back", monotone},
		{"a path with a slash is no path", badPaths},
	} {
		t.Run(c.name, func(t *testing.T) {
			clock := NewClock(time.UnixMilli(1_000_000))
			c.run(t, open(t, clock.Now), clock)
		})
	}
}

func put(t *testing.T, s *store.Store, id string, balance int64) int64 {
	t.Helper()
	rev, err := s.Update(t.Context(), func(tx *store.Tx) error {
		accounts.Put(tx, &account{Owner: id, Balance: balance}, "p", id)
		return nil
	})
	require.NoError(t, err)
	return rev
}

func get(t *testing.T, s *store.Store, id string) (a *account) {
	t.Helper()
	require.NoError(t, s.View(t.Context(), func(v *store.View) (err error) {
		a, err = accounts.Get(v, "p", id)
		return err
	}))
	return a
}
