package audit

import (
	"maps"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	recordsDesc = prometheus.NewDesc("trivet_audit_records_total",
		"Audited calls by outcome: OK, or the gRPC code of the error. A successful change is counted by the member that committed "+
			"it, and any other call by the member that received it.", []string{"outcome"}, nil)
	droppedDesc = prometheus.NewDesc("trivet_audit_records_dropped_total",
		"Refused and failed calls, and calls that changed no records, for which no audit record was written because there were "+
			"too many within a second. A record with the outcome SUPPRESSED has their number.", nil, nil)
)

var _ prometheus.Collector = (*Service)(nil)

// Describe implements prometheus.Collector.
func (s *Service) Describe(out chan<- *prometheus.Desc) {
	out <- recordsDesc
	out <- droppedDesc
}

// Collect implements prometheus.Collector. The number of outcomes is limited: they are OK and the names of gRPC codes.
func (s *Service) Collect(out chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := maps.Clone(s.noted)
	if s.opts.Audited != nil {
		counts[OK] += s.opts.Audited.Load()
	}
	for outcome, n := range counts {
		out <- prometheus.MustNewConstMetric(recordsDesc, prometheus.CounterValue, float64(n), outcome)
	}
	out <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(s.dropped))
}
