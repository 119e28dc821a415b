package credit

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var balanceDesc = prometheus.NewDesc("trivet_wallet_balance",
	"Balance of the project's wallet in units of credit, including what is reserved. A closed wallet has no series.",
	[]string{"org", "project"}, nil)

// WalletCollector exports the balances of all wallets that are not closed. Only the leader exports values, because the
// labels have names of tenants.
type WalletCollector struct {
	leads    func() bool
	balances *store.Expiring[map[cloud.Tenant]int64]
}

var _ prometheus.Collector = (*WalletCollector)(nil)

// NewWalletCollector returns a WalletCollector of the wallets in s. leads reports whether this member leads.
func NewWalletCollector(s *store.Store, leads func() bool) *WalletCollector {
	return &WalletCollector{leads, store.NewExpiring(s, store.MetricsTTL, readBalances)}
}

// Describe implements prometheus.Collector.
func (c *WalletCollector) Describe(out chan<- *prometheus.Desc) { out <- balanceDesc }

// Collect implements prometheus.Collector. It exports nothing if this member does not lead, or if the records cannot be
// read.
func (c *WalletCollector) Collect(out chan<- prometheus.Metric) {
	if !c.leads() {
		return
	}
	balances, err := c.balances.Get()
	if err != nil {
		return
	}
	for t, balance := range balances {
		out <- prometheus.MustNewConstMetric(balanceDesc, prometheus.GaugeValue, float64(balance),
			string(t.Org), string(t.Project))
	}
}

// readBalances returns the balances of the wallets that are not closed. If a project ID has wallets of several
// incarnations, only the one of the last incarnation counts, because Prometheus refuses two series with the same labels.
func readBalances(v *store.View) (map[cloud.Tenant]int64, error) {
	all, _, err := wallets.List(v, 0)
	balances, last := map[cloud.Tenant]int64{}, map[cloud.Tenant]cloud.Incarnation{}
	for _, r := range all {
		w := r.Value
		t := cloud.Tenant{Org: w.Org, Project: w.Project}
		if w.Status == ledger.Closed || w.Incarnation < last[t] {
			continue
		}
		balances[t], last[t] = w.Balance(), w.Incarnation
	}
	return balances, err
}
