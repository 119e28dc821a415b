package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/e2e/history"
	"github.com/trivet-cloud/trivet/e2e/lab"
	domain "github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// opsEnv is the environment variable for the number of calls, seedEnv that for the random seed.
	opsEnv  = "TRIVET_HISTORY_OPS"
	seedEnv = "TRIVET_HISTORY_SEED"
	// shortHistory is the number of calls if opsEnv is not set.
	shortHistory = 3000
	// pace is the number of calls per second of all buyers together. buyers is the number of buyers. loyal is the
	// number of those that only read and never change their member.
	pace, buyers, loyal = 100, 12, 3
	// stampTolerance is the maximum time by which a transaction's time may be before the start or after the end of its
	// call.
	stampTolerance = 5 * time.Second
	checkTime      = 2 * time.Minute
)

// saga is a cloud on which buyers make credit calls while faults are injected. ops holds the history of each wallet.
type saga struct {
	*world
	hosts *lab.Hosts
	seed  uint64
	began time.Time
	// credits and operators hold clients with the administrator's token, by member.
	credits   map[int]creditv1.CreditServiceClient
	operators map[int]operatorv1.OperatorServiceClient

	mu    sync.Mutex
	ops   map[string][]history.Op
	names map[string][]string // the IDs of the most recent reservations of each wallet
	lost  map[string]int      // the number of unknown outcomes by reason
}

func number(t *testing.T, env string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(env)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	require.NoError(t, err, env)
	return n
}

// newSaga starts three members, each in its own network namespace and with a clock that can be set, and creates the
// wallets. mutant is the name of a deliberate fault in the control plane; empty for none.
func newSaga(t *testing.T, seed uint64, mutant string) *saga {
	t.Helper()
	hosts, err := lab.NewHosts(1, 2, 3)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, hosts.Close()) })
	bin := faulty(t)
	s := &saga{hosts: hosts, seed: seed, ops: map[string][]history.Op{}, lost: map[string]int{}, names: map[string][]string{}, credits: map[int]creditv1.CreditServiceClient{}, operators: map[int]operatorv1.OperatorServiceClient{}}
	s.world = newWorld(t, func(w *world) {
		w.trio.Bin, w.trio.Net, w.trio.Extra = bin, hosts.Net, append([]string{"--insecure-plaintext"}, lab.Unlimited...)
		for id := range w.trio.Members {
			w.trio.Members[id] = hosts.Address(id)
		}
		w.trio.Env = func(id int) []string { return []string{lab.ClockEnv(id), "TRIVET_MUTANT=" + mutant} }
	})
	// Undo partitions before the members are stopped; cleanups run in reverse order.
	t.Cleanup(func() { require.NoError(t, hosts.Heal()) })
	s.began = time.Now()
	for id := range s.trio.Members {
		g := s.dial(id, s.adminToken)
		s.credits[id], s.operators[id] = creditv1.NewCreditServiceClient(g.Conn()), g.Operator
	}
	for _, wallet := range walletNames {
		require.NoError(t, s.admin.EnsureProject(s.context(time.Minute), sagaOrg, wallet))
		_, err := s.credits[2].CreateWallet(s.context(time.Minute), &creditv1.CreateWalletRequest{OrgId: sagaOrg, ProjectId: wallet, InitialBalance: 2000})
		require.NoError(t, err)
	}
	return s
}

const sagaOrg = "acme"

var walletNames = []string{"w1", "w2", "w3", "w4"}

// live runs the buyers, with the faults of the given names, until they have made ops calls. Then it repairs all faults.
func (s *saga) live(ctx context.Context, ops int, names ...string) {
	s.t.Helper()
	permits := make(chan struct{})
	var work sync.WaitGroup
	for n := range buyers {
		b := s.newBuyer(n)
		work.Go(func() { b.run(ctx, permits) })
	}
	ended := make(chan error, 1)
	over := make(chan struct{})
	go func() { ended <- s.hurt(ctx, over, names) }()
	tick := time.NewTicker(time.Second / pace)
	defer tick.Stop()
	for range ops {
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
		select {
		case permits <- struct{}{}:
		case <-ctx.Done():
		}
	}
	close(over)
	require.NoError(s.t, <-ended)
	close(permits)
	work.Wait()
	require.NoError(s.t, s.trio.StartAll())
	s.ready()
}

// TestCreditHistory makes random credit calls while members are killed and cut off and their clocks jump. It checks
// that the calls on each wallet are linearizable and agree with its journal.
func TestCreditHistory(t *testing.T) {
	seed := number(t, seedEnv, uint64(time.Now().UnixNano()))
	ops := int(number(t, opsEnv, shortHistory))
	s := newSaga(t, seed, "")
	ctx := s.context(2*time.Minute + time.Duration(ops)*3*time.Second/pace)
	s.live(ctx, ops, everyFault()...)
	s.rest(ctx)
	total, err := s.judge(ctx)
	require.NoError(t, err, "seed %d", seed)
	t.Logf("seed %d, %.0f s: %+v; unknown outcomes: %v", seed, time.Since(s.began).Seconds(), total, s.lost)
	require.Greater(t, total.Known, 2*total.Unknown, "too many calls have an unknown outcome")
	require.Positive(t, total.Expired)
	require.Positive(t, total.Refused)
	for _, wallet := range walletNames {
		journal, err := s.journal(ctx, wallet)
		require.NoError(t, err)
		s.once(wallet, journal)
	}
	s.audit(ctx)
}

// rest waits until no reservation is pending any more. To that end it reads each wallet at every member, and adds these
// reads to the history.
func (s *saga) rest(ctx context.Context) {
	s.t.Helper()
	for id := range s.trio.Members {
		for _, wallet := range walletNames {
			require.NoError(s.t, lab.Until(ctx, "all reservations without an end have expired", func(ctx context.Context) error {
				o := history.Op{Client: buyers + id, Kind: history.ReadWallet, Call: time.Since(s.began)}
				w, err := s.credits[id].GetWallet(ctx, &creditv1.GetWalletRequest{OrgId: sagaOrg, ProjectId: wallet})
				if err != nil {
					return err
				}
				o.Return, o.Wallet = time.Since(s.began), figures(w)
				s.note(wallet, o)
				if w.GetPendingReservations() > 0 {
					return fmt.Errorf("%d reservations of %s are pending", w.GetPendingReservations(), wallet)
				}
				return nil
			}))
		}
	}
}

// judge reads the journals and checks each wallet's history with package history. It returns the sums of the
// statistics, or the error of the first wallet that fails.
func (s *saga) judge(ctx context.Context) (total history.Summary, err error) {
	for _, wallet := range walletNames {
		journal, err := s.journal(ctx, wallet)
		if err != nil {
			return total, err
		}
		w := history.Wallet{
			Org: sagaOrg, Project: domain.ProjectID(wallet), Journal: journal, Ops: s.ops[wallet], Began: s.began, Tolerance: stampTolerance,
		}
		began := time.Now()
		sum, err := w.Check(checkTime)
		if err != nil {
			return total, err
		}
		s.t.Logf("%s: %+v, checked in %.1f s", wallet, sum, time.Since(began).Seconds())
		total.Known, total.Unknown, total.Refused, total.Late = total.Known+sum.Known, total.Unknown+sum.Unknown, total.Refused+sum.Refused, total.Late+sum.Late
		total.Transactions, total.Expired, total.Off = total.Transactions+sum.Transactions, total.Expired+sum.Expired, max(total.Off, sum.Off)
	}
	return total, nil
}

// The method once checks that each acknowledged commit has exactly one charge in the journal and each reservation
// exactly one end. Package history implies this too, but with a model of the ledger, which this check does not need.
func (s *saga) once(wallet string, journal []ledger.Transaction) {
	charges, ends, made := map[string]int{}, map[string]int{}, 0
	for _, tx := range journal {
		switch {
		case tx.Type == ledger.Hold:
			made++
		case tx.Type == ledger.Charge:
			charges[tx.Reservation]++
			ends[tx.Reservation]++
		case tx.Type == ledger.Release && charges[tx.Reservation] == 0:
			ends[tx.Reservation]++
		}
	}
	for _, o := range s.ops[wallet] {
		if o.Kind == history.Commit && o.Return != history.Never && o.Refused == history.Done {
			require.Equal(s.t, 1, charges[o.Name], "the number of charges for %s of %s", o.Name, wallet)
		}
	}
	for id, n := range ends {
		require.Equal(s.t, 1, n, "the number of ends of reservation %s of %s", id, wallet)
	}
	require.Equal(s.t, made, len(ends), "each reservation of %s must end", wallet)
}

func (s *saga) journal(ctx context.Context, wallet string) (out []ledger.Transaction, err error) {
	for token := ""; ; {
		page, err := s.credits[1].ListTransactions(ctx, &creditv1.ListTransactionsRequest{OrgId: sagaOrg, ProjectId: wallet, PageSize: 1000, PageToken: token})
		if err != nil {
			return nil, fmt.Errorf("list transactions of %s: %w", wallet, err)
		}
		for _, tx := range page.GetTransactions() {
			out = append(out, ledger.Transaction{
				ID: tx.GetId(), Project: domain.ProjectID(tx.GetProjectId()), Sequence: tx.GetSequence(), Type: ledger.Type(tx.GetType()), Amount: tx.GetAmount(),
				BalanceAfter: tx.GetBalanceAfter(), Description: tx.GetDescription(), ResourceID: tx.GetResourceId(), Reservation: tx.GetReservationId(),
				Charge: tx.GetChargeSequence(), At: tx.GetCreatedAt(), By: tx.GetCreatedBy(),
			})
		}
		if token = page.GetNextPageToken(); token == "" {
			return out, nil
		}
	}
}

// audit checks that AuditLedger, which recomputes the ledger's sums, finds no problem at any member.
func (s *saga) audit(ctx context.Context) {
	s.t.Helper()
	for id := range s.trio.Members {
		stream, err := s.credits[id].AuditLedger(ctx, &creditv1.AuditLedgerRequest{})
		require.NoError(s.t, err)
		wallets := 0
		for {
			found, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(s.t, err)
			require.Empty(s.t, found.GetProblem())
			wallets++
		}
		require.Equal(s.t, len(walletNames), wallets)
	}
}

// hurt injects faults one after the other until the channel over is closed: the faults in names in random order, and
// then again. When hurt returns nil, no fault is in effect.
func (s *saga) hurt(ctx context.Context, over <-chan struct{}, names []string) error {
	r := rand.New(rand.NewPCG(s.seed, 1))
	for {
		for _, i := range r.Perm(len(names)) {
			select {
			case <-over:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(500*time.Millisecond + time.Duration(r.IntN(1000))*time.Millisecond):
			}
			f := faults[slices.IndexFunc(faults, func(f fault) bool { return f.name == names[i] })]
			at := time.Since(s.began)
			if err := f.act(ctx, s, r); err != nil {
				return fmt.Errorf("%s: %w", f.name, err)
			}
			s.t.Logf("%6.1f s to %6.1f s: %s", at.Seconds(), time.Since(s.began).Seconds(), f.name)
		}
	}
}

// sagaLeader returns the leader of the raft group that holds the control plane's records, as of the highest term that a
// member reports. It returns member 1 if no member reports a leader.
func (s *saga) sagaLeader(ctx context.Context) int {
	leader, term := 1, uint64(0)
	for id := range s.trio.Members {
		ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		status, err := s.operators[id].ClusterStatus(ctx, nil)
		cancel()
		if err != nil {
			continue
		}
		if g := status.GetGroups()[0]; g.GetLeaderId() != 0 && g.GetTerm() > term {
			leader, term = int(g.GetLeaderId()), g.GetTerm()
		}
	}
	return cmp.Or(leader, 1)
}
