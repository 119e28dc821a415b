package billing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestNewProjectDoesNotPayForADeletedOne creates a project with the ID of a deleted one that owes for hours. The new
// project must not pay for them, and must be able to create VMs.
func TestNewProjectDoesNotPayForADeletedOne(t *testing.T) {
	w := newWorld(t, on)
	w.fund(running)
	id := w.run("web")
	for range 3 {
		w.Clock.Advance(hour)
		w.bill()
	}
	w.stop(id)
	require.NoError(t, w.delete(id))
	_, sum := w.unpaidBills()
	require.EqualValues(t, 3*running, sum)
	w.order(ledger.Command{Op: ledger.DoClose})
	w.Update(func(tx *store.Tx) error { return tenant.DeleteProject(tx, acme.Project) })
	w.Clock.Advance(time.Second)
	w.Update(func(tx *store.Tx) error {
		_, err := tenant.CreateProject(tx, acme, "", tenant.Quota{})
		return err
	})
	_, err := w.tryCreate("web")
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "no wallet")
	require.NotContains(t, err.Error(), "owes")
	w.fund(10 * running)
	w.create("web")
	require.Equal(t, [3]int64{0, running, 9 * running}, w.figures(), "only the first hour of the new VM may be reserved")
	_, sum = w.unpaidBills()
	require.Zero(t, sum)
	require.NoError(t, w.clean())
}

// TestBillsOfADeletedProjectAreRemoved checks that Run deletes the unpaid bills of a deleted project.
func TestBillsOfADeletedProjectAreRemoved(t *testing.T) {
	w := newWorld(t, on)
	w.fund(running)
	id := w.run("web")
	for range 3 {
		w.Clock.Advance(hour)
		w.bill()
	}
	w.stop(id)
	require.NoError(t, w.delete(id))
	w.order(ledger.Command{Op: ledger.DoClose})
	w.Update(func(tx *store.Tx) error { return tenant.DeleteProject(tx, acme.Project) })
	w.bill()
	bills, _ := w.unpaidBills()
	require.Empty(t, bills)
}
