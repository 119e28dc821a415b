package billing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

// TestUnpaidMetric checks the number of projects with unpaid bills in the metrics: a project counts once for any number
// of bills, and no longer when it has paid.
func TestUnpaidMetric(t *testing.T) {
	w := newWorld(t, on)
	w.fund(4 * running)
	leads := true
	collector := NewUnpaidCollector(w.bills, func() bool { return leads })
	gather := func() map[string]float64 { return metricstest.Values(t, collector) }
	unpaid := func(n float64) map[string]float64 { return map[string]float64{"trivet_billing_unpaid_projects": n} }
	w.run("web")
	w.run("db")
	w.bill()
	require.Equal(t, unpaid(0), gather())
	for range 3 {
		w.Clock.Advance(hour)
		w.bill()
	}
	bills, _ := w.unpaidBills()
	require.Len(t, bills, 2)
	require.Equal(t, unpaid(1), gather())

	_, err := w.store.Update(t.Context(), func(tx *store.Tx) error {
		for _, p := range []cloud.ProjectID{"web1", "web-2"} {
			owed.Put(tx, &Bill{Project: p, Hours: 1}, string(p), number(cloud.Time(1)), "vm", number(uint64(1)))
		}
		return nil
	})
	require.NoError(t, err)
	w.Clock.Advance(29 * time.Second)
	require.Equal(t, unpaid(1), gather(), "the bills were read again before 30 seconds had passed")
	w.Clock.Advance(time.Second)
	require.Equal(t, unpaid(3), gather())
	leads = false
	require.Empty(t, gather(), "a member that does not lead exports the number")
	leads = true
	w.bills.opts.Rules.Enabled = false
	require.Empty(t, gather())
}
