package credit

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// book implements ledgertest.Book by Service.
type book struct{ *world }

func (b book) Do(project cloud.ProjectID, c ledger.Command) (ledger.Outcome, error) {
	b.clock.Set(time.UnixMilli(c.At))
	done, err := b.credits.Execute(b.as("ada", ""), Request{Tenant: cloud.Tenant{Org: "o", Project: project}, Command: c})
	return done.Outcome, err
}

func (b book) Wallet(project cloud.ProjectID) (*ledger.Wallet, error) {
	w, err := b.credits.Wallet(b.t.Context(), cloud.Tenant{Project: project})
	if fault.Is(err, fault.NotFound) {
		return nil, nil
	}
	return w, err
}

func (b book) Audit() error {
	return b.credits.Audit(b.t.Context(), func(f Finding) error {
		if f.Problem != "" {
			return fmt.Errorf("%s: %s", f.Project, f.Problem)
		}
		return nil
	})
}

// TestRecordsMatchTheModel runs the commands of ledgertest on Service, with its records in the store.
// TRIVET_CREDIT_COMMANDS sets the number of commands.
func TestRecordsMatchTheModel(t *testing.T) {
	commands := 20_000
	if text := os.Getenv("TRIVET_CREDIT_COMMANDS"); text != "" {
		n, err := strconv.Atoi(text)
		require.NoError(t, err)
		commands = n
	}
	const seeds = 4
	for seed := range uint64(seeds) {
		w := newWorld(t)
		w.credits.opts.Project = nil // the model has no projects
		require.NoError(t, ledgertest.Run(seed+1, commands/seeds, book{w}))
	}
}

// TestWalletOfAnotherTenant uses wallets and reservations with the ID of another org or project. A project has one
// wallet, in its own org. A wallet of another org must not be found.
func TestWalletOfAnotherTenant(t *testing.T) {
	w := newWorld(t)
	create := func(t cloud.Tenant) error {
		_, err := w.credits.Execute(w.as("root", ""), Request{Tenant: t, Command: ledger.Command{Op: ledger.DoCreate}})
		return err
	}
	require.True(t, fault.Is(create(cloud.Tenant{Org: "evil", Project: "web"}), fault.FailedPrecondition))
	require.NoError(t, create(tenant))
	require.True(t, fault.Is(create(tenant), fault.AlreadyExists))
	require.True(t, fault.Is(create(cloud.Tenant{Org: "new", Project: "unknown"}), fault.NotFound))
	require.True(t, fault.Is(create(cloud.Tenant{Project: "x"}), fault.InvalidArgument), "a wallet must have an org")
	wrong := cloud.Tenant{Org: "evil", Project: "web"}
	_, err := w.credits.Wallet(t.Context(), wrong)
	require.True(t, fault.Is(err, fault.NotFound))
	_, err = w.credits.Execute(w.as("eve", ""), Request{Tenant: wrong, Command: ledger.Command{Op: ledger.DoTopUp, Amount: 1}})
	require.True(t, fault.Is(err, fault.NotFound))
	id := w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 100}).Transactions[0].ID
	require.NoError(t, cloud.CheckUUID("id", id))
	// The same reservation ID in two projects means two reservations. Ending one must not end the other.
	theirs := func(c ledger.Command) error {
		_, err := w.credits.Execute(w.as("eve", ""), Request{Tenant: other, Command: c})
		return err
	}
	require.NoError(t, theirs(ledger.Command{Op: ledger.DoCreate, Amount: 10}))
	w.must(reserveCommand)
	both := reserveCommand
	both.Amount = 5
	require.NoError(t, theirs(both))
	require.NoError(t, theirs(ledger.Command{Op: ledger.DoRelease, Reservation: reserveCommand.Reservation}))
	own, err := w.credits.Reservation(t.Context(), tenant, reserveCommand.Reservation)
	require.NoError(t, err)
	require.Equal(t, ledger.Pending, own.Status)
	require.EqualValues(t, reserveCommand.Amount, w.wallet().Reserved())
	w.clean()
	_, err = w.credits.Reservation(t.Context(), tenant, uuid.NewString())
	require.True(t, fault.Is(err, fault.NotFound))
	_, err = w.credits.Reservation(t.Context(), tenant, "r")
	require.True(t, fault.Is(err, fault.InvalidArgument))
}
