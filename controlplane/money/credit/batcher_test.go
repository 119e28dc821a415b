package credit

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestConcurrentRequestsOnOneWallet makes reservations and commits at the same time on a wallet that has credit for
// half of them. Exactly half must succeed, and the wallet must stay consistent.
func TestConcurrentRequestsOnOneWallet(t *testing.T) {
	const clients, price = 64, 10
	w := funded(t, clients*price/2) // enough for half of the reservations
	var wg sync.WaitGroup
	results := make([]error, clients)
	for i := range clients {
		wg.Go(func() {
			made, err := w.execute("", ledger.Command{Op: ledger.DoReserve, Amount: price})
			if err == nil {
				_, err = w.execute("", ledger.Command{Op: ledger.DoCommit, Reservation: made.Reservation.ID})
			}
			results[i] = err
		})
	}
	wg.Wait()
	done := 0
	for _, err := range results {
		if err == nil {
			done++
			continue
		}
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	}
	require.Equal(t, clients/2, done)
	require.Zero(t, w.wallet().Balance())
	require.Empty(t, w.credits.batchers.open)
	w.clean()
}

// TestRequestsShareATransaction checks that requests that wait while another one is executed are executed together in
// the next transaction, and that refused ones do not affect the others.
func TestRequestsShareATransaction(t *testing.T) {
	const clients = 20
	w := funded(t, 100)
	busy, proceed := make(chan struct{}), make(chan struct{})
	first, err := newQueuedRequest(nil, Request{Tenant: tenant, Command: ledger.Command{Op: ledger.DoTopUp, Amount: 1}})
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		err := w.credits.batchers.queue(t.Context(), tenant.Project, func(ctx context.Context, all []*queuedRequest) error {
			close(busy)
			<-proceed
			return w.credits.settle(ctx, all)
		}, first)
		if err != nil {
			t.Error(err)
		}
	})
	<-busy
	before := w.quorum.Committed.Load()
	results := make([]error, clients)
	for i := range clients {
		wg.Go(func() {
			_, results[i] = w.execute("", ledger.Command{Op: ledger.DoCharge, Amount: int64(1 + 1000*(i%2))})
		})
	}
	q := w.credits.batchers.enter(tenant.Project)
	defer w.credits.batchers.leave(tenant.Project, q)
	require.Eventually(t, func() bool { q.mu.Lock(); defer q.mu.Unlock(); return len(q.waiting) == clients }, 20*time.Second, time.Millisecond)
	close(proceed)
	wg.Wait()
	for i, err := range results {
		require.Equal(t, i%2 == 1, fault.Is(err, fault.ResourceExhausted), "%d: %v", i, err)
	}
	require.EqualValues(t, 2, w.quorum.Committed.Load()-before, "there must be one transaction for the first request and one for all that waited")
	require.EqualValues(t, 100+1-clients/2, w.wallet().Balance())
	w.clean()
}

// TestCommitRacesRelease makes a commit and a release of one reservation at the same time, 50 times. Exactly one of the
// two must succeed each time.
func TestCommitRacesRelease(t *testing.T) {
	w := funded(t, 1000)
	charged := int64(0)
	for range 50 {
		id := w.must(ledger.Command{Op: ledger.DoReserve, Amount: 10}).Reservation.ID
		var wg sync.WaitGroup
		var errs [2]error
		for i, op := range []ledger.Op{ledger.DoCommit, ledger.DoRelease} {
			wg.Go(func() { _, errs[i] = w.execute("", ledger.Command{Op: op, Reservation: id}) })
		}
		wg.Wait()
		require.True(t, (errs[0] == nil) != (errs[1] == nil), "%v", errs)
		if errs[0] == nil {
			charged += 10
		}
	}
	require.Equal(t, charged, w.wallet().Consumed())
	require.Zero(t, w.wallet().Reserved())
	w.clean()
}

// TestCanceledCalls checks that a canceled call removes its waiting request from the queue, and that a batch is
// completed although the caller that executes it is canceled.
func TestCanceledCalls(t *testing.T) {
	w := funded(t, 100)
	entered, proceed := make(chan struct{}), make(chan struct{})
	stuck, err := newQueuedRequest(nil, Request{Tenant: tenant, Command: ledger.Command{Op: ledger.DoTopUp, Amount: 1}})
	require.NoError(t, err)
	ctx, cancelFirst := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		first <- w.credits.batchers.queue(ctx, tenant.Project, func(ctx context.Context, all []*queuedRequest) error {
			close(entered)
			<-proceed
			return w.credits.settle(ctx, all)
		}, stuck)
	}()
	<-entered
	cancelFirst() // the caller that executes the batch is canceled; the batch must be completed
	gone, cancel := context.WithCancel(w.as("ada", ""))
	cancel()
	_, err = w.credits.Execute(gone, Request{Tenant: tenant, Command: ledger.Command{Op: ledger.DoTopUp, Amount: 1000}})
	require.ErrorIs(t, err, context.Canceled)
	close(proceed)
	require.NoError(t, <-first)
	require.NoError(t, stuck.err)
	require.EqualValues(t, 101, w.wallet().Balance())
	require.Empty(t, w.credits.batchers.open)
}

// TestRefusalsUseCurrentRecords checks that a member that cannot reach a quorum returns neither a success nor a
// refusal.
func TestRefusalsUseCurrentRecords(t *testing.T) {
	w := funded(t, 10)
	proofs := w.quorum.Proofs.Load()
	_, err := w.execute("", ledger.Command{Op: ledger.DoReserve, Amount: 11})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.Greater(t, w.quorum.Proofs.Load(), proofs)
	w.quorum.Away.Store(true)
	for _, c := range []ledger.Command{{Op: ledger.DoReserve, Amount: 11}, {Op: ledger.DoReserve, Amount: 1}, {Op: ledger.DoCreate}} {
		_, err := w.execute("", c)
		require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
	}
}

// TestIdempotencyKeys checks that a call repeated under its key gets the stored response, separately for each operation
// and caller. Another body under the key must be refused, and a failed call must store no response.
func TestIdempotencyKeys(t *testing.T) {
	w := funded(t, 0)
	_, err := w.execute("k", ledger.Command{Op: ledger.DoCharge, Amount: 5})
	require.True(t, fault.Is(err, fault.ResourceExhausted))
	topUp := Request{Tenant: tenant, Command: ledger.Command{Op: ledger.DoTopUp, Amount: 7}, Body: [32]byte{1}}
	first, err := w.credits.Execute(w.as("ada", "k"), topUp)
	require.NoError(t, err)
	require.False(t, first.Replayed)
	w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 100})
	again, err := w.credits.Execute(w.as("ada", "k"), topUp)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Outcome, again.Outcome, "a repeated call must return the outcome of the first call")
	topUp.Body[0]++
	_, err = w.credits.Execute(w.as("ada", "k"), topUp)
	f, _ := fault.From(err)
	require.NotNil(t, f)
	require.Equal(t, "IDEMPOTENCY_KEY_REUSED", f.Reason)
	charge, err := w.execute("k", ledger.Command{Op: ledger.DoCharge, Amount: 5})
	require.NoError(t, err)
	require.False(t, charge.Replayed, "the failed call must have stored no response under the key")
	topUp.Body[0]--
	eve, err := w.credits.Execute(w.as("eve", "k"), topUp)
	require.NoError(t, err)
	require.False(t, eve.Replayed, "the key of another caller must not be found")
	require.EqualValues(t, 7+100-5+7, w.wallet().Balance())
	// A repeated DoReserve under its key must return the same reservation.
	hold := ledger.Command{Op: ledger.DoReserve, Amount: 3}
	r1, err := w.execute("h", hold)
	require.NoError(t, err)
	r2, err := w.execute("h", hold)
	require.NoError(t, err)
	require.Equal(t, r1.Reservation.ID, r2.Reservation.ID)
	require.EqualValues(t, 3, w.wallet().Reserved())
	w.clean()
}

// TestConcurrentCallsWithOneKey makes the same top-up 20 times at the same time under one idempotency key. It must take
// effect once.
func TestConcurrentCallsWithOneKey(t *testing.T) {
	w := funded(t, 0)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := w.execute("k", ledger.Command{Op: ledger.DoTopUp, Amount: 5}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 5, w.wallet().Balance())
}
