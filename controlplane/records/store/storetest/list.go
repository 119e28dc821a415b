package storetest

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

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
