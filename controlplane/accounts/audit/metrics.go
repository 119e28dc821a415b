package audit

import "github.com/prometheus/client_golang/prometheus"

var (
	notedDesc = prometheus.NewDesc("trivet_audit_records_total",
		"Calls on this member that were audited separately from a change, by outcome: refused and failed calls, and successful "+
			"calls that changed no records. The audit records of successful changes are not counted.", []string{"outcome"}, nil)
	droppedDesc = prometheus.NewDesc("trivet_audit_records_dropped_total",
		"Calls of trivet_audit_records_total that have no audit record of their own, because there were too many different ones "+
			"within a second. A record with the outcome SUPPRESSED has their number.", nil, nil)
)

var _ prometheus.Collector = (*Service)(nil)

// Describe implements prometheus.Collector.
func (s *Service) Describe(out chan<- *prometheus.Desc) {
	out <- notedDesc
	out <- droppedDesc
}

// Collect implements prometheus.Collector. The number of outcomes is limited: they are OK and the names of gRPC codes.
func (s *Service) Collect(out chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for outcome, n := range s.noted {
		out <- prometheus.MustNewConstMetric(notedDesc, prometheus.CounterValue, float64(n), outcome)
	}
	out <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(s.dropped))
}
