package credit

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestWatch checks that a watch sends each transaction once and in order: existing ones, those committed while it reads
// these, and later ones.
func TestWatch(t *testing.T) {
	const before, after = 300, 40 // more existing transactions than watchPage
	w := funded(t, 1)
	for range before - 1 {
		w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 1})
	}
	ctx, stop := context.WithCancel(t.Context())
	seen := make(chan uint64, before+after)
	ended := make(chan error, 1)
	go func() {
		ended <- w.credits.Watch(ctx, tenant, 10, func(tx *ledger.Transaction) error { seen <- tx.Sequence; return nil })
	}()
	for range after {
		w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 1})
	}
	for n := uint64(10); n <= before+after; n++ {
		select {
		case got := <-seen:
			require.Equal(t, n, got)
		case <-time.After(20 * time.Second):
			require.Fail(t, "the watch sends no more transactions", "before %d", n)
		}
	}
	stop()
	require.ErrorIs(t, <-ended, context.Canceled)
	err := w.credits.Watch(t.Context(), cloud.Tenant{Org: "evil", Project: "web"}, 0, nil)
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
}

// TestWatchFromTheFuture checks that a watch from a sequence number that does not exist yet begins with the transaction
// that gets that number.
func TestWatchFromTheFuture(t *testing.T) {
	w := funded(t, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	got := make(chan uint64, 1)
	go func() {
		_ = w.credits.Watch(ctx, tenant, 4, func(tx *ledger.Transaction) error { got <- tx.Sequence; stop(); return nil })
	}()
	for range 4 {
		w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 1})
	}
	require.EqualValues(t, 4, <-got)
}

func TestStatement(t *testing.T) {
	w := funded(t, 100)
	begin := w.clock.Now().UnixMilli()
	tick := func() { w.clock.Advance(time.Second) }
	tick()
	id := w.must(ledger.Command{Op: ledger.DoReserve, Amount: 40}).Reservation.ID
	tick()
	w.must(ledger.Command{Op: ledger.DoCommit, Reservation: id, Amount: 30})
	tick()
	w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 5})
	all := [6]int64{105, 40, 30, 10, 0, 0}
	for _, c := range []struct {
		p    Period
		want ledger.Statement
	}{
		{Period{}, ledger.Statement{Closing: 75, Moved: all, Transactions: 5}},
		{Period{begin, 0}, ledger.Statement{Closing: 75, Moved: all, Transactions: 5}},
		{Period{begin + 1, begin + 3000}, ledger.Statement{Opening: 100, Closing: 70, Moved: [6]int64{0, 40, 30, 10}, Transactions: 3}},
		{Period{begin + 2000, begin + 2001}, ledger.Statement{Opening: 100, Closing: 70, Moved: [6]int64{0, 0, 30, 10}, Transactions: 2}},
		{Period{begin + 2001, begin + 2002}, ledger.Statement{Opening: 70, Closing: 70}},
		{Period{0, begin}, ledger.Statement{}},
		{Period{begin + 9000, 0}, ledger.Statement{Opening: 75, Closing: 75}},
	} {
		got, period, err := w.credits.Statement(t.Context(), tenant, c.p)
		require.NoError(t, err)
		require.Equal(t, c.want, got, "%+v", c.p)
		require.Equal(t, c.p.From, period.From)
		require.GreaterOrEqual(t, period.To, period.From)
	}
	for _, p := range []Period{{From: -1}, {To: -1}, {From: 5, To: 4}} {
		_, _, err := w.credits.Statement(t.Context(), tenant, p)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
	}
}

// TestLists checks the pages and the filters of the lists of transactions, reservations and wallets.
func TestLists(t *testing.T) {
	w := funded(t, 1000)
	var ids []string
	for n := range 5 {
		ids = append(ids, w.must(ledger.Command{Op: ledger.DoReserve, Amount: 10, Description: fmt.Sprint(n)}).Reservation.ID)
	}
	w.must(ledger.Command{Op: ledger.DoCommit, Reservation: ids[1], ResourceID: "vm-1"})
	w.clock.Advance(time.Hour)
	w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 1})
	list := func(q Filter) (out []uint64) {
		token := ""
		for {
			page, next, err := w.credits.Transactions(t.Context(), tenant, q, 2, token)
			require.NoError(t, err)
			for _, tx := range page {
				out = append(out, tx.Sequence)
			}
			if token = next; token == "" {
				return out
			}
		}
	}
	require.Equal(t, []uint64{1, 2, 3, 4, 5, 6, 7, 8}, list(Filter{}))
	require.Equal(t, []uint64{1, 7, 8}, list(Filter{Types: []ledger.Type{ledger.TopUp, ledger.Charge}}))
	require.Equal(t, []uint64{3, 7}, list(Filter{Reservation: ids[1]}))
	require.Equal(t, []uint64{7}, list(Filter{ResourceID: "vm-1"}))
	require.Equal(t, []uint64{8}, list(Filter{Period: Period{From: w.clock.Now().UnixMilli()}}))
	require.Len(t, list(Filter{Period: Period{To: w.clock.Now().UnixMilli()}}), 7)
	// A page token must be valid only for a list with the same filter.
	_, token, err := w.credits.Transactions(t.Context(), tenant, Filter{}, 2, "")
	require.NoError(t, err)
	_, _, err = w.credits.Transactions(t.Context(), tenant, Filter{ResourceID: "x"}, 2, token)
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
	pending, next, err := w.credits.Reservations(t.Context(), tenant, ledger.Pending, 10, "")
	require.NoError(t, err)
	require.Len(t, pending, 4)
	require.Empty(t, next)
	found, _, err := w.credits.Wallets(t.Context(), "acme", 0, "")
	require.NoError(t, err)
	require.Len(t, found, 1)
	found, _, err = w.credits.Wallets(t.Context(), "nobody", 0, "")
	require.NoError(t, err)
	require.Empty(t, found)
}
