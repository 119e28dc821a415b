package vpc

import (
	"net/netip"

	"github.com/trivet-cloud/trivet/nodeagent/health"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// maxReports is the limit of SyncNetworksRequest.backend_health in agent.v1.
const maxReports = 1000

// targetOf returns the target of the health check of a backend. It returns false if this host does not check the
// backend.
func targetOf(s *cloud.HostService, b *cloud.HostBackend) (health.Target, bool) {
	if !b.Reported || !b.Source.IsValid() {
		return health.Target{}, false
	}
	return health.Target{
		Address: netip.AddrPortFrom(b.Address, s.HealthPort()), Source: b.Source, Check: *s.Health,
	}, true
}

// targets returns the targets of the health checks of a VPC on this host.
func targets(w *wanted) (out []health.Target) {
	for i := range w.Services {
		s := &w.Services[i]
		for j := range s.Backends {
			if t, ok := targetOf(s, &s.Backends[j]); ok {
				out = append(out, t)
			}
		}
	}
	return out
}

// judge sets the health of the backends that this host reports to the results of its own checks. It returns the reports
// about backends whose health in the records differs. A backend without a result keeps the health of the record. So the
// host applies its results also without a connection to the control plane.
func judge(w *wanted, verdict func(health.Target) (healthy, known bool)) (reports []cloud.BackendHealth) {
	for i := range w.Services {
		s := &w.Services[i]
		for j := range s.Backends {
			b := &s.Backends[j]
			if !b.Reported {
				continue
			}
			healthy := true // an address that no host can check
			if t, ok := targetOf(s, b); ok {
				var known bool
				if healthy, known = verdict(t); !known {
					continue
				}
			}
			if b.Healthy != healthy || !b.Checked {
				r := cloud.BackendHealth{VPC: w.ID, Service: s.ID, Port: b.Port, Healthy: healthy}
				if b.Port == "" {
					r.Address = b.Address
				}
				reports = append(reports, r)
			}
			b.Healthy = healthy
		}
	}
	return reports
}

// verdicts returns a function that returns the result of the checks of a target of a VPC.
func (n *Networks) verdicts(id cloud.VPCID) func(health.Target) (healthy, known bool) {
	return func(t health.Target) (healthy, known bool) { return n.checker.Verdict(n.plane.path(id), t) }
}

// recheck is called when the result of a check in the namespace at path has changed. It makes the worker of the
// namespace's VPC apply the VPC again. The updates of the worker stay acknowledged.
func (n *Networks) recheck(path string) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	for id, w := range n.workers {
		if n.plane.path(id) != path {
			continue
		}
		select {
		case w.wakes <- struct{}{}:
		default:
		}
	}
}

// report passes the reports of all VPCs to Options.Report, if there are any. It repeats reports that the control plane
// has not recorded each time a VPC was applied. The caller holds mu.
func (n *Networks) report() {
	var all []cloud.BackendHealth
	for _, w := range n.workers {
		all = append(all, w.reports...)
	}
	if len(all) > 0 && n.o.Report != nil {
		n.o.Report(all[:min(len(all), maxReports)])
	}
}
