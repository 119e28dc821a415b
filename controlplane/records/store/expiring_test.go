package store_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
)

// TestExpiring checks that Expiring reads the records again when the TTL has passed and not before, and that it caches
// no error.
func TestExpiring(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	s := storetest.Memory(t, func() time.Time { return now })
	items := store.NewTable[int]("item")
	add := func(id string) {
		_, err := s.Update(t.Context(), func(tx *store.Tx) error { items.Put(tx, new(1), id); return nil })
		require.NoError(t, err)
	}
	var failure error
	count := store.NewExpiring(s, 30*time.Second, func(v *store.View) (int, error) {
		all, _, err := items.List(v, 0)
		return len(all), errors.Join(failure, err)
	})
	get := func() int {
		n, err := count.Get()
		require.NoError(t, err)
		return n
	}
	add("a")
	require.Equal(t, 1, get())
	add("b")
	now = now.Add(30*time.Second - 1)
	require.Equal(t, 1, get(), "the records were read before the TTL had passed")
	now = now.Add(1)
	require.Equal(t, 2, get(), "the records were not read after the TTL had passed")

	add("c")
	now = now.Add(30 * time.Second)
	failure = errors.New("damaged")
	_, err := count.Get()
	require.ErrorIs(t, err, failure)
	failure = nil
	require.Equal(t, 3, get(), "the error was cached")
}
