package credit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

// TestWalletMetrics checks the balances in the metrics: reserved credit counts, closed wallets and wallets of earlier
// incarnations of a project do not.
func TestWalletMetrics(t *testing.T) {
	w := funded(t, 100)
	w.must(ledger.Command{Op: ledger.DoReserve, Amount: 30})
	w.must(ledger.Command{Op: ledger.DoCharge, Amount: 25})
	_, err := w.store.Update(t.Context(), func(tx *store.Tx) error {
		put := func(org cloud.OrgID, p cloud.ProjectID, i cloud.Incarnation, s ledger.WalletStatus, balance int64) {
			one := &ledger.Wallet{Org: org, Project: p, Incarnation: i, Status: s, Accounts: ledger.Accounts{Wallet: balance}}
			wallets.Put(tx, one, account(one))
		}
		put("acme", "again", 0, ledger.Active, 1)
		put("acme", "again", 5, ledger.Suspended, 2)
		put("acme", "again", 9, ledger.Closed, 3)
		put("evil", "lair", 0, ledger.Closed, 4)
		return nil
	})
	require.NoError(t, err)

	leads := true
	collector := NewWalletCollector(w.store, func() bool { return leads })
	gather := func() map[string]float64 { return metricstest.Values(t, collector) }
	want := map[string]float64{"trivet_wallet_balance acme " + string(tenant.Project): 75, "trivet_wallet_balance acme again": 2}
	require.Equal(t, want, gather())
	w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 5})
	w.clock.Advance(29 * time.Second)
	require.Equal(t, want, gather(), "all wallets were read again before 30 seconds had passed")
	w.clock.Advance(time.Second)
	require.EqualValues(t, 80, gather()["trivet_wallet_balance acme "+string(tenant.Project)])
	leads = false
	require.Empty(t, gather(), "a member that does not lead exports wallets")
}
