package credit

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// world is the credit service of a member that leads, with its records in memory.
type world struct {
	t       testing.TB
	store   *store.Store
	quorum  *storetest.Quorum
	clock   *storetest.Clock
	credits *Service

	// projects holds the projects that the service finds, by ID.
	projects map[cloud.ProjectID]Project
}

var (
	tenant = cloud.Tenant{Org: "acme", Project: "web"}
	other  = cloud.Tenant{Org: "evil", Project: "lair"}
)

func newWorld(t testing.TB) *world {
	w := &world{t: t, clock: storetest.NewClock(time.UnixMilli(1_800_000_000_000)), projects: map[cloud.ProjectID]Project{
		"web": {Exists: true, Org: "acme"}, "lair": {Exists: true, Org: "evil"}, "empty": {Exists: true, Org: "acme"},
	}}
	w.store, w.quorum = storetest.Open(t, w.clock.Now)
	w.credits = New(Options{
		Store: w.store, Commands: leadertest.Single(), Log: slog.New(slog.DiscardHandler),
		Project: func(_ store.Reader, p cloud.ProjectID) (Project, error) { return w.projects[p], nil },
	})
	return w
}

// as returns the context of a call by a user, with the idempotency key key if it is not empty.
func (w *world) as(user cloud.UserID, key string) context.Context {
	return auth.With(w.t.Context(), &cloud.Caller{User: user, Proof: cloud.ProofPassword, IdempotencyKey: key}, auth.RPC)
}

func (w *world) execute(key string, c ledger.Command) (Result, error) {
	return w.credits.Execute(w.as("ada", key), Request{Tenant: tenant, Command: c})
}

func (w *world) must(c ledger.Command) Result {
	w.t.Helper()
	done, err := w.execute("", c)
	require.NoError(w.t, err)
	return done
}

// funded returns a world in which tenant has a wallet with this balance.
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

// clean runs an audit, which must find no problem.
func (w *world) clean() {
	w.t.Helper()
	require.NoError(w.t, w.credits.Audit(w.t.Context(), func(f Finding) error {
		require.Empty(w.t, f.Problem, f.Project)
		return nil
	}))
}

// rows returns the number of records in the table due.
func (w *world) rows() (n int) {
	w.t.Helper()
	require.NoError(w.t, w.store.View(w.t.Context(), func(v *store.View) error {
		rows, _, err := due.List(v, 0)
		n = len(rows)
		return err
	}))
	return n
}
