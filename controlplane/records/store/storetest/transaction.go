package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func readWritten(t *testing.T, s *store.Store, _ *Clock) {
	require.Nil(t, get(t, s, "a"))
	first := put(t, s, "a", 1)
	second := put(t, s, "a", 2)
	require.Greater(t, second, first)
	require.Equal(t, &account{"a", 2}, get(t, s, "a"))
	_, err := s.Update(t.Context(), func(tx *store.Tx) error {
		accounts.Delete(tx, "p", "a")
		other.Put(tx, &account{Owner: "x"}, "p", "a")
		return nil
	})
	require.NoError(t, err)
	require.Nil(t, get(t, s, "a"))
	require.NoError(t, s.View(t.Context(), func(v *store.View) error {
		list, more, err := accounts.List(v, 0)
		require.Empty(t, list)
		require.False(t, more)
		return err
	}))
}

func errorsChangeNothing(t *testing.T, s *store.Store, _ *Clock) {
	put(t, s, "a", 1)
	before := s.Revision()
	boom := errors.New("boom")
	_, err := s.Update(t.Context(), func(tx *store.Tx) error {
		accounts.Put(tx, &account{"a", 9}, "p", "a")
		return boom
	})
	require.ErrorIs(t, err, boom)
	require.Equal(t, before, s.Revision())
	require.EqualValues(t, 1, get(t, s, "a").Balance)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.Update(ctx, func(tx *store.Tx) error { accounts.Put(tx, &account{}, "p", "a"); return nil })
	require.ErrorIs(t, err, context.Canceled)
}

func ownWrites(t *testing.T, s *store.Store, _ *Clock) {
	for _, id := range []string{"a", "b", "d"} {
		put(t, s, id, 1)
	}
	_, err := s.Update(t.Context(), func(tx *store.Tx) error {
		accounts.Put(tx, &account{"c", 3}, "p", "c")
		accounts.Delete(tx, "p", "a")
		a, err := accounts.Get(tx, "p", "a")
		require.NoError(t, err)
		require.Nil(t, a)
		list, more, err := accounts.List(tx, 2, "p")
		require.NoError(t, err)
		require.True(t, more)
		require.Len(t, list, 2)
		require.Equal(t, []string{"p", "b"}, list[0].Path)
		require.Equal(t, &account{"c", 3}, list[1].Value)
		return nil
	})
	require.NoError(t, err)
}

func conflicts(t *testing.T, s *store.Store, _ *Clock) {
	put(t, s, "a", 0)
	const writers, each = 8, 10
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range each {
				_, err := s.Update(t.Context(), func(tx *store.Tx) error {
					a, err := accounts.Get(tx, "p", "a")
					if err != nil {
						return err
					}
					a.Balance++
					accounts.Put(tx, a, "p", "a")
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, writers*each, get(t, s, "a").Balance)
}

// phantoms checks that updates conflict if a range that they listed has changed. Ten concurrent updates each add a
// record only if a list has fewer than three, so exactly three may add one.
func phantoms(t *testing.T, s *store.Store, _ *Clock) {
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			_, err := s.Update(t.Context(), func(tx *store.Tx) error {
				list, _, err := accounts.List(tx, 0, "p")
				if err != nil {
					return err
				}
				if len(list) < 3 {
					accounts.Put(tx, &account{}, "p", fmt.Sprint(i))
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.NoError(t, s.View(t.Context(), func(v *store.View) error {
		list, _, err := accounts.List(v, 0, "p")
		require.Len(t, list, 3)
		return err
	}))
}

func transfers(t *testing.T, s *store.Store, _ *Clock) {
	const n = 4
	for i := range n {
		put(t, s, fmt.Sprint(i), 100)
	}
	stop := make(chan struct{})
	var wg, readers sync.WaitGroup
	readers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			sum := int64(0)
			if err := s.View(t.Context(), func(v *store.View) error {
				sum = 0
				list, _, err := accounts.List(v, 0, "p")
				for _, r := range list {
					sum += r.Value.Balance
				}
				return err
			}); err != nil {
				t.Error(err)
			}
			if sum != n*100 {
				t.Errorf("a view saw %d", sum)
			}
		}
	})
	for w := range 4 {
		wg.Go(func() {
			for i := range 15 {
				from, to := fmt.Sprint((w+i)%n), fmt.Sprint((w+i*3+1)%n)
				if from == to {
					continue
				}
				_, err := s.Update(t.Context(), func(tx *store.Tx) error {
					a, err := accounts.Get(tx, "p", from)
					if err != nil {
						return err
					}
					b, err := accounts.Get(tx, "p", to)
					if err != nil {
						return err
					}
					a.Balance--
					b.Balance++
					accounts.Put(tx, a, "p", from)
					accounts.Put(tx, b, "p", to)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	readers.Wait()
}

func monotone(t *testing.T, s *store.Store, clock *Clock) {
	stamp := func() (at cloud.Time) {
		_, err := s.Update(t.Context(), func(tx *store.Tx) error {
			at = tx.Now()
			accounts.Put(tx, &account{}, "p", "t")
			return nil
		})
		require.NoError(t, err)
		return at
	}
	first := stamp()
	clock.Advance(-time.Hour)
	require.GreaterOrEqual(t, stamp(), first)
}

func badPaths(t *testing.T, s *store.Store, _ *Clock) {
	put(t, s, "a", 1)
	_, err := s.Update(t.Context(), func(tx *store.Tx) error {
		accounts.Put(tx, &account{}, "p", "a/b")
		return nil
	})
	require.Error(t, err)
	require.NoError(t, s.View(t.Context(), func(v *store.View) error {
		for _, path := range [][]string{{"p/a"}, {"", "p", "a"}, {"p", ""}} {
			a, err := accounts.Get(v, path...)
			require.NoError(t, err)
			require.Nil(t, a)
		}
		return nil
	}))
}
