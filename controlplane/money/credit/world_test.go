package credit

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// alone is the leadership of the only member.
type alone struct{}

func (alone) Leader() (uint64, uint64) { return 1, 1 }
func (alone) Changed() <-chan struct{} { return nil }

// quorum is the other members, which can be away, and counts what they agreed on.
type quorum struct {
	*store.Direct
	away   atomic.Bool
	agreed atomic.Int64
	proofs atomic.Int64
}

func (q *quorum) ReadIndex(ctx context.Context) error {
	if q.away.Load() {
		return fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	q.proofs.Add(1)
	return q.Direct.ReadIndex(ctx)
}

func (q *quorum) Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error) {
	if q.away.Load() {
		return command.Result{}, fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	q.agreed.Add(1)
	return q.Direct.Propose(ctx, id, data)
}

// world is the credit service of a member that leads, over records in memory.
type world struct {
	t       testing.TB
	store   *store.Store
	quorum  *quorum
	credits *Service

	// projects holds the existing projects.
	projects map[cloud.ProjectID]Project

	mu sync.Mutex
	at time.Time
}

var (
	tenant = cloud.Tenant{Org: "acme", Project: "web"}
	other  = cloud.Tenant{Org: "evil", Project: "lair"}
)

func newWorld(t testing.TB) *world {
	w := &world{t: t, at: time.UnixMilli(1_800_000_000_000), projects: map[cloud.ProjectID]Project{
		"web": {Exists: true, Org: "acme"}, "lair": {Exists: true, Org: "evil"}, "empty": {Exists: true, Org: "acme"},
	}}
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	w.quorum = &quorum{Direct: store.NewDirect(engine)}
	w.store = store.New(store.Options{Engine: engine, Proposer: w.quorum, PageKey: make([]byte, 32), Now: w.now})
	w.credits = New(Options{
		Store: w.store, Commands: leader.NewCommands(1, alone{}, nil), Log: slog.New(slog.DiscardHandler),
		Project: func(_ store.Reader, p cloud.ProjectID) (Project, error) { return w.projects[p], nil },
	})
	return w
}

func (w *world) now() time.Time       { w.mu.Lock(); defer w.mu.Unlock(); return w.at }
func (w *world) wait(d time.Duration) { w.mu.Lock(); defer w.mu.Unlock(); w.at = w.at.Add(d) }

// as is the context of a call by somebody under an idempotency key, which may be empty.
func (w *world) as(user cloud.UserID, key string) context.Context {
	return auth.With(w.t.Context(), &cloud.Caller{User: user, Proof: cloud.ProofPassword, IdempotencyKey: key}, auth.RPC)
}

func (w *world) give(key string, c ledger.Command) (Done, error) {
	return w.credits.Give(w.as("ada", key), Order{Tenant: tenant, Command: c})
}

func (w *world) must(c ledger.Command) Done {
	w.t.Helper()
	done, err := w.give("", c)
	require.NoError(w.t, err)
	return done
}

// funded is a world in which the tenant has a wallet with so much.
func funded(t testing.TB, balance int64) *world {
	w := newWorld(t)
	w.must(ledger.Command{Op: ledger.DoCreate, Amount: balance})
	return w
}

func (w *world) wallet() *ledger.Wallet {
	w.t.Helper()
	found, err := w.credits.Wallet(w.t.Context(), tenant)
	require.NoError(w.t, err)
	return found
}

// clean asks for an audit that finds nothing.
func (w *world) clean() {
	w.t.Helper()
	require.NoError(w.t, w.credits.Audit(w.t.Context(), func(f Finding) error {
		require.Empty(w.t, f.Problem, f.Project)
		return nil
	}))
}

// rows are the reservations that wait for their deadline.
func (w *world) rows() (n int) {
	w.t.Helper()
	require.NoError(w.t, w.store.View(w.t.Context(), func(v *store.View) error {
		rows, _, err := due.List(v, 0)
		n = len(rows)
		return err
	}))
	return n
}
