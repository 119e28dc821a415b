package vm

import (
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
)

var (
	placementsDesc = prometheus.NewDesc("trivet_placements_total",
		"Attempts of this member, as the leader, to choose a host for a VM, by result. A retried transaction counts again.",
		[]string{"result"}, nil)
	refusedHostsDesc = prometheus.NewDesc("trivet_placement_refused_hosts_total",
		"Hosts that were excluded when a placement found no host, by the first rule that excluded the host.",
		[]string{"reason"}, nil)
)

// placements counts the results of Service.choose since the member started.
type placements struct {
	placed, noHost atomic.Int64

	mu      sync.Mutex // guards refused
	refused map[schedule.Kind]int64
}

// refuse counts a placement that found no host, and the rules that excluded the hosts.
func (p *placements) refuse(refused []schedule.Refusal) {
	p.noHost.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refused == nil {
		p.refused = map[schedule.Kind]int64{}
	}
	for _, r := range refused {
		p.refused[r.Kind]++
	}
}

func (p *placements) collect(out chan<- prometheus.Metric) {
	out <- prometheus.MustNewConstMetric(placementsDesc, prometheus.CounterValue, float64(p.placed.Load()), "placed")
	out <- prometheus.MustNewConstMetric(placementsDesc, prometheus.CounterValue, float64(p.noHost.Load()), "no_host")
	p.mu.Lock()
	defer p.mu.Unlock()
	for kind, n := range p.refused {
		out <- prometheus.MustNewConstMetric(refusedHostsDesc, prometheus.CounterValue, float64(n), string(kind))
	}
}
