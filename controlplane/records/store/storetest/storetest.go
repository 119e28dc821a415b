// Package storetest contains the test suite for stores, and in-memory stores for the tests of other packages. Open
// returns a store with a Quorum, whose calls a test can count and make fail. Clock is a clock that a test sets.
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
	"github.com/trivet-cloud/trivet/shared/fault"
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

func all(*account) bool { return true }

func pages(t *testing.T, s *store.Store, _ *Clock) {
	for i := range 25 {
		put(t, s, fmt.Sprintf("%02d", i), int64(i))
	}
	even := func(a *account) bool { return a.Balance%2 == 0 }
	var got []int64
	req := store.PageRequest{Size: 5, Query: "even"}
	for turn := 0; ; turn++ {
		items, next, err := store.Page(t.Context(), s, accounts, req, even, "p")
		require.NoError(t, err)
		for _, a := range items {
			got = append(got, a.Balance)
		}
		put(t, s, fmt.Sprintf("%02d", 24-turn), 100+2*int64(turn)) // later changes must not appear
		put(t, s, "99", 2)
		if next == "" {
			break
		}
		require.Len(t, items, 5)
		req.Token = next
	}
	require.Equal(t, []int64{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24}, got)
	// If the last record of a list is also the last record of a page, that page returns no token for a next page.
	items, next, err := store.Page(t.Context(), s, accounts, store.PageRequest{Size: 26}, all, "p")
	require.NoError(t, err)
	require.Len(t, items, 26)
	require.Empty(t, next)
	one, next, err := store.Page(t.Context(), s, accounts, store.PageRequest{Only: []string{"p", "03"}}, all, "p")
	require.NoError(t, err)
	require.Equal(t, []int64{3}, []int64{one[0].Balance})
	require.Empty(t, next)
	one, _, err = store.Page(t.Context(), s, accounts, store.PageRequest{Only: []string{"p", "0"}}, all, "p")
	require.NoError(t, err)
	require.Empty(t, one, "only the record at this path, not those below or after it")
	_, _, err = store.Page(t.Context(), s, accounts, store.PageRequest{Size: cloud.MaxPage + 1}, all, "p")
	require.True(t, fault.Is(err, fault.InvalidArgument))
	_, _, err = store.Page(t.Context(), s, accounts, store.PageRequest{Size: -1}, all, "p")
	require.True(t, fault.Is(err, fault.InvalidArgument))
}

func listsOn(t *testing.T, s *store.Store, _ *Clock) {
	for _, id := range []string{"a", "c", "d"} {
		put(t, s, id, 1)
	}
	require.NoError(t, s.View(t.Context(), func(v *store.View) error {
		for after, want := range map[string][]string{"a": {"c", "d"}, "b": {"c", "d"}, "0": {"a", "c", "d"}, "d": {}} {
			records, more, err := accounts.ListAfter(v, 0, []string{"p", after}, "p")
			require.NoError(t, err)
			require.False(t, more)
			got := []string{}
			for _, r := range records {
				got = append(got, r.Value.Owner)
			}
			require.Equal(t, want, got, "after %s", after)
		}
		records, more, err := accounts.ListAfter(v, 1, []string{"p", "a"}, "p")
		require.NoError(t, err)
		require.True(t, more)
		require.Equal(t, "c", records[0].Value.Owner)
		return nil
	}))
}

func forgedTokens(t *testing.T, s *store.Store, _ *Clock) {
	for i := range 5 {
		put(t, s, fmt.Sprint(i), 0)
	}
	_, token, err := store.Page(t.Context(), s, accounts, store.PageRequest{Size: 2, Query: "q"}, all, "p")
	require.NoError(t, err)
	require.NotEmpty(t, token)
	flipped := []byte(token)
	flipped[len(flipped)/2] ^= 1
	for name, req := range map[string]store.PageRequest{
		"garbage":       {Token: "garbage", Query: "q"},
		"not base64":    {Token: "ä", Query: "q"},
		"changed":       {Token: string(flipped), Query: "q"},
		"another query": {Token: token, Query: "other"},
	} {
		_, _, err := store.Page(t.Context(), s, accounts, req, all, "p")
		require.True(t, fault.Is(err, fault.InvalidArgument), "%s: %v", name, err)
		require.ErrorContains(t, err, "page_token", name)
	}
	_, _, err = store.Page(t.Context(), s, accounts, store.PageRequest{Token: token, Query: "q"}, all, "elsewhere")
	require.True(t, fault.Is(err, fault.InvalidArgument))
}

func oldPage(t *testing.T, s *store.Store, _ *Clock) {
	for i := range 5 {
		put(t, s, fmt.Sprint(i), 0)
	}
	_, token, err := store.Page(t.Context(), s, accounts, store.PageRequest{Size: 2}, all, "p")
	require.NoError(t, err)
	rev := put(t, s, "9", 0)
	require.NoError(t, s.Compact(t.Context(), rev))
	_, _, err = store.Page(t.Context(), s, accounts, store.PageRequest{Size: 2, Token: token}, all, "p")
	f, ok := fault.From(err)
	require.True(t, ok, "%v", err)
	require.Equal(t, fault.InvalidArgument, f.Kind)
	require.Equal(t, "PAGE_TOKEN_EXPIRED", f.Reason)

	w := accounts.Watch(s, 2)
	defer w.Close()
	_, _, err = w.Next(t.Context())
	require.True(t, fault.Is(err, fault.OutOfRange), "%v", err)
}

func watches(t *testing.T, s *store.Store, _ *Clock) {
	first := put(t, s, "a", 1)
	w := accounts.Watch(s, first, "p")
	defer w.Close()
	one := accounts.WatchOne(s, first, "p", "b")
	defer one.Close()
	paths := accounts.WatchPaths(s, first, "p")
	defer paths.Close()
	put(t, s, "b", 1)
	put(t, s, "a", 2)
	_, err := s.Update(t.Context(), func(tx *store.Tx) error {
		other.Put(tx, &account{}, "p", "z")
		accounts.Delete(tx, "p", "b")
		return nil
	})
	require.NoError(t, err)
	var got []string
	for len(got) < 4 {
		changes, _, err := w.Next(t.Context())
		require.NoError(t, err)
		for _, c := range changes {
			require.Nil(t, c.Before)
			after := int64(0)
			if c.Value != nil {
				after = c.Value.Balance
			}
			got = append(got, fmt.Sprintf("%s %d", c.Path[1], after))
		}
	}
	require.Equal(t, []string{"a 1", "b 1", "a 2", "b 0"}, got)
	got = nil
	for len(got) < 4 {
		changes, _, err := paths.Next(t.Context())
		require.NoError(t, err)
		for _, c := range changes {
			got = append(got, fmt.Sprintf("%s %t", c.Path[1], c.Deleted))
		}
	}
	require.Equal(t, []string{"a false", "b false", "a false", "b true"}, got)
	seen := 0
	for seen < 2 {
		changes, _, err := one.Next(t.Context())
		require.NoError(t, err)
		for _, c := range changes {
			require.Equal(t, []string{"p", "b"}, c.Path)
		}
		seen += len(changes)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = w.Next(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func watchesTables(t *testing.T, s *store.Store, _ *Clock) {
	first := put(t, s, "a", 1)
	w := s.WatchTables(first, "account")
	defer w.Close()
	outside := store.NewTable[account]("accord")
	_, err := s.Update(t.Context(), func(tx *store.Tx) error {
		other.Put(tx, &account{}, "x")
		outside.Put(tx, &account{}, "x")
		return nil
	})
	require.NoError(t, err)
	put(t, s, "b", 1)
	last, err := s.Update(t.Context(), func(tx *store.Tx) error {
		other.Delete(tx, "x")
		accounts.Delete(tx, "p", "a")
		return nil
	})
	require.NoError(t, err)
	var got []string
	var complete int64
	for complete < last {
		var changes []store.TableChange
		changes, complete, err = w.Next(t.Context())
		require.NoError(t, err)
		for _, c := range changes {
			got = append(got, fmt.Sprintf("%d %s %v %t", c.Revision-first, c.Table, c.Path, c.Deleted))
		}
	}
	require.Equal(t, []string{
		"0 account [p a] false", "1 account2 [x] false", "2 account [p b] false", "3 account [p a] true", "3 account2 [x] true",
	}, got)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = w.Next(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func awaits(t *testing.T, s *store.Store, _ *Clock) {
	put(t, s, "a", 1)
	done := make(chan *account, 1)
	started := make(chan struct{}, 16)
	go func() {
		a, err := store.Await(t.Context(), s, accounts, func(a *account) (bool, error) {
			started <- struct{}{}
			return a == nil, nil
		}, "p", "a")
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	<-started
	put(t, s, "a", 2)
	<-started
	_, err := s.Update(t.Context(), func(tx *store.Tx) error { accounts.Delete(tx, "p", "a"); return nil })
	require.NoError(t, err)
	require.Nil(t, <-done)
}

func idempotency(t *testing.T, s *store.Store, _ *Clock) {
	create := func(key, body string) (string, bool, error) {
		var out string
		var replayed bool
		_, err := s.Update(t.Context(), func(tx *store.Tx) (err error) {
			caller := &cloud.Caller{User: "ada", IdempotencyKey: key}
			out, replayed, err = store.Idempotent(tx, caller, store.InProject("p"), "create", [32]byte([]byte(fmt.Sprintf("%32s", body))), func() (string, error) {
				a, err := accounts.Get(tx, "p", "n")
				if err != nil {
					return "", err
				}
				if a == nil {
					a = &account{}
				}
				if body == "fails" {
					return "", fault.New(fault.FailedPrecondition, "no")
				}
				a.Balance++
				accounts.Put(tx, a, "p", "n")
				return fmt.Sprint("made ", a.Balance), nil
			})
			return err
		})
		return out, replayed, err
	}
	out, replayed, err := create("k", "b")
	require.NoError(t, err)
	require.Equal(t, "made 1", out)
	require.False(t, replayed)
	out, replayed, err = create("k", "b")
	require.NoError(t, err)
	require.Equal(t, "made 1", out)
	require.True(t, replayed)
	_, _, err = create("k", "other")
	require.True(t, fault.Is(err, fault.InvalidArgument))
	out, _, err = create("", "b")
	require.NoError(t, err)
	require.Equal(t, "made 2", out)
	_, _, err = create("f", "fails")
	require.True(t, fault.Is(err, fault.FailedPrecondition))
	out, replayed, err = create("f", "b") // the failed call must not have stored a response
	require.NoError(t, err)
	require.Equal(t, "made 3", out)
	require.False(t, replayed)
}

func answersExpire(t *testing.T, s *store.Store, clock *Clock) {
	runs := 0
	do := func(key string) {
		_, err := s.Update(t.Context(), func(tx *store.Tx) error {
			_, _, err := store.Idempotent(tx, &cloud.Caller{User: "ada", IdempotencyKey: key}, store.InProject("p"), "m", [32]byte{}, func() (int, error) {
				runs++
				return runs, nil
			})
			return err
		})
		require.NoError(t, err)
	}
	sweep := func() {
		for more := true; more; {
			_, err := s.Update(t.Context(), func(tx *store.Tx) (err error) { more, err = store.ForgetAnswers(tx, 2); return err })
			require.NoError(t, err)
		}
	}
	for i := range 5 {
		do(fmt.Sprint(i))
	}
	clock.Advance(23 * time.Hour)
	do("late")
	sweep()
	do("0")
	require.Equal(t, 6, runs, "nothing was old enough")
	clock.Advance(2 * time.Hour)
	sweep()
	do("late")
	require.Equal(t, 6, runs)
	do("0")
	require.Equal(t, 7, runs, "its answer was forgotten")
}

func placeForgotten(t *testing.T, s *store.Store, clock *Clock) {
	runs := 0
	do := func(place, key string) (out int) {
		_, err := s.Update(t.Context(), func(tx *store.Tx) (err error) {
			out, _, err = store.Idempotent(tx, &cloud.Caller{User: "ada", IdempotencyKey: key}, store.InProject(cloud.ProjectID(place)), "m", [32]byte{}, func() (int, error) {
				runs++
				return runs, nil
			})
			return err
		})
		require.NoError(t, err)
		return out
	}
	forget := func(place string) {
		_, err := s.Update(t.Context(), func(tx *store.Tx) error { return store.ForgetPlace(tx, store.InProject(cloud.ProjectID(place))) })
		require.NoError(t, err)
	}
	forget("p")
	require.Equal(t, 1, do("p", "a"))
	require.Equal(t, 2, do("p", "b"))
	require.Equal(t, 3, do("q", "a"))
	forget("p")
	require.Equal(t, 4, do("p", "a"), "the answer is of before")
	require.Equal(t, 4, do("p", "a"), "and this one is remembered, in the same millisecond")
	require.Equal(t, 3, do("q", "a"), "another place is not touched")
	clock.Advance(25 * time.Hour)
	for more := true; more; {
		_, err := s.Update(t.Context(), func(tx *store.Tx) (err error) { more, err = store.ForgetAnswers(tx, 1); return err })
		require.NoError(t, err)
	}
	require.Equal(t, 5, do("p", "a"))
	require.Equal(t, 5, do("p", "a"))
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
