package vm

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
)

var (
	placementsDesc = prometheus.NewDesc("trivet_placements_total",
		"Decisions of this member, as the leader, by result: a host was chosen for a VM (placed), or a call was refused or a VM began to wait because no host fits (no_host).",
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

// countRefusal counts a placement that found no host, and the rules that excluded the hosts. The parameter err is the
// error of the placement: countRefusal does nothing if err is not a noHostError. It must be called once for each call of
// the API, and once for each VM that begins to wait, not for the retries while the VM waits.
func (p *placements) countRefusal(err error) {
	var none *noHostError
	if !errors.As(err, &none) {
		return
	}
	p.noHost.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refused == nil {
		p.refused = map[schedule.Kind]int64{}
	}
	for _, r := range none.refused {
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
