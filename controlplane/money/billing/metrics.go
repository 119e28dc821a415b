package billing

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

var unpaidDesc = prometheus.NewDesc("trivet_billing_unpaid_projects",
	"Projects with hours that are not paid. They can create no VMs and no volumes, and with the policy stop their VMs are "+
		"stopped.", nil, nil)

// UnpaidCollector exports the number of projects with unpaid bills. Only the leader exports it, and only if billing is
// enabled. A project whose bill was made, but not charged yet, counts for at most about Service.Every.
type UnpaidCollector struct {
	bills  *Service
	leads  func() bool
	unpaid *store.Expiring[int]
}

var _ prometheus.Collector = (*UnpaidCollector)(nil)

// NewUnpaidCollector returns an UnpaidCollector of the bills of s. leads reports whether this member leads.
func NewUnpaidCollector(s *Service, leads func() bool) *UnpaidCollector {
	return &UnpaidCollector{s, leads, store.NewExpiring(s.opts.Store, store.MetricsTTL, countUnpaid)}
}

// Describe implements prometheus.Collector.
func (c *UnpaidCollector) Describe(out chan<- *prometheus.Desc) { out <- unpaidDesc }

// Collect implements prometheus.Collector. It exports nothing if billing is not enabled, if this member does not lead,
// or if the records cannot be read.
func (c *UnpaidCollector) Collect(out chan<- prometheus.Metric) {
	if !c.bills.opts.Rules.Enabled || !c.leads() {
		return
	}
	if n, err := c.unpaid.Get(); err == nil {
		out <- prometheus.MustNewConstMetric(unpaidDesc, prometheus.GaugeValue, float64(n))
	}
}

// countUnpaid returns the number of projects with unpaid bills. It reads one bill of each project.
func countUnpaid(v *store.View) (n int, err error) {
	for after := []string(nil); ; n++ {
		first, _, err := page(v, owed, 1, after)
		if err != nil || len(first) == 0 {
			return n, err
		}
		after = afterProject(first[0].Path[0])
	}
}
