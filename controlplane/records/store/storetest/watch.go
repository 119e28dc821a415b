package storetest

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

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
