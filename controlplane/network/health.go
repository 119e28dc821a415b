package network

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// setServiceStatus sets the status of a service IP according to its backends. ACTIVE: a backend is healthy. PENDING: no
// backend is healthy and one has not been checked, or there are no backends. ERROR: all backends have been checked and
// none is healthy.
func setServiceStatus(s *cloud.ServiceIP) {
	isHealthy := func(b cloud.Backend) bool { return b.Healthy }
	isUnchecked := func(b cloud.Backend) bool { return !b.Checked }
	switch {
	case slices.ContainsFunc(s.Backends, isHealthy):
		s.Status, s.StatusReason = cloud.NetworkActive, ""
	case len(s.Backends) == 0:
		s.Status, s.StatusReason = cloud.NetworkPending, "it has no backends"
	case slices.ContainsFunc(s.Backends, isUnchecked):
		s.Status, s.StatusReason = cloud.NetworkPending, "no backend is healthy, and not all have been checked yet"
	default:
		s.Status, s.StatusReason = cloud.NetworkError, "no backend is healthy"
	}
}

// carryHealth sets the health of the backends of a service IP that was created or changed. Without a health check they
// are healthy. Backends of former that are checked in the same way keep their health, also those that a selector has
// selected. Others are unhealthy until a host has checked them.
func carryHealth(s, former *cloud.ServiceIP) {
	for i := range s.Backends {
		b := &s.Backends[i]
		b.Healthy, b.Checked = s.Health == nil, false
		if s.Health == nil || former == nil || former.Health == nil || !sameCheck(s, former) {
			continue
		}
		for _, f := range former.Backends {
			if f.Port == b.Port && f.Address == b.Address {
				b.Healthy, b.Checked = f.Healthy, f.Checked
			}
		}
	}
	s.Reports = nil
	if len(s.Selector) > 0 && s.Health != nil && former != nil && former.Health != nil && sameCheck(s, former) {
		s.Reports = former.Reports
	}
	setServiceStatus(s)
}

// sameCheck reports whether two service IPs with health checks check their backends in the same way.
func sameCheck(a, b *cloud.ServiceIP) bool {
	return *a.Health == *b.Health && (a.Health.Port != 0 || a.Ports[0].Target == b.Ports[0].Target)
}

// forgetHealth marks the backends with a port as unchecked in all service IPs with a health check. The port's host has
// changed, so the reports of the former host are no longer valid.
func forgetHealth(tx *store.Tx, port *cloud.Port) error {
	if err := forgetReports(tx, port); err != nil {
		return err
	}
	users, _, err := backendsOf.List(tx, 0, string(port.ID))
	if err != nil {
		return err
	}
	for _, u := range users {
		s, err := serviceIPs.Get(tx, string(port.Project), u.Path[1])
		if err != nil {
			return err
		}
		if s == nil || s.Health == nil {
			continue
		}
		for i := range s.Backends {
			if b := &s.Backends[i]; b.Port == port.ID {
				b.Healthy, b.Checked = false, false
			}
		}
		setServiceStatus(s)
		s.UpdatedAt = tx.Now()
		serviceIPs.Put(tx, s, string(s.Project), string(s.ID))
	}
	return nil
}

// setHealth records the health of backends of a service IP as the host node reported it. It returns how many backends
// have changed. Reports about ports of other hosts, and about backends that the service IP does not have, are ignored:
// a host may report about a port that it has just lost.
func setHealth(
	tx *store.Tx, node cloud.NodeID, s *cloud.ServiceIP, reports []cloud.BackendHealth,
) (changed int, err error) {
	for _, r := range reports {
		may, err := mayReport(tx, node, s, r)
		if err != nil {
			return 0, err
		}
		if !may {
			continue
		}
		if len(s.Selector) > 0 {
			n, err := setSelectedHealth(tx, s, r)
			if err != nil {
				return 0, err
			}
			changed += n
			continue
		}
		for i := range s.Backends {
			b := &s.Backends[i]
			if b.Port == r.Port && b.Address == r.Address && (!b.Checked || b.Healthy != r.Healthy) {
				b.Healthy, b.Checked = r.Healthy, true
				changed++
			}
		}
	}
	return changed, nil
}

// setSelectedHealth records the health of a port that a service IP selects. It returns 1 if the health has changed, and
// otherwise 0. If the service IP already has cloud.MaxBackends reports, setSelectedHealth first removes the reports
// about ports that are no longer selected.
func setSelectedHealth(tx *store.Tx, s *cloud.ServiceIP, r cloud.BackendHealth) (changed int, err error) {
	for i := range s.Reports {
		if b := &s.Reports[i]; b.Port == r.Port {
			if b.Healthy == r.Healthy {
				return 0, nil
			}
			b.Healthy = r.Healthy
			return 1, nil
		}
	}
	if len(s.Reports) >= cloud.MaxBackends {
		selected, err := selectedPorts(tx, s)
		if err != nil {
			return 0, err
		}
		s.Reports = slices.DeleteFunc(s.Reports, func(b cloud.Backend) bool {
			return !slices.ContainsFunc(selected, func(p *cloud.Port) bool { return p.ID == b.Port })
		})
		if len(s.Reports) >= cloud.MaxBackends {
			return 0, nil
		}
	}
	s.Reports = append(s.Reports, cloud.Backend{Port: r.Port, Healthy: r.Healthy, Checked: true})
	return 1, nil
}

// mayReport reports whether a host may report the health of a backend of a service IP. The host has a port of the
// service IP's VPC. It may report if the backend's port is bound to it, or if no port of the VPC has the backend's
// address. For a service IP with a selector, the selector must also select the port.
func mayReport(tx *store.Tx, node cloud.NodeID, s *cloud.ServiceIP, r cloud.BackendHealth) (bool, error) {
	id := &r.Port
	if r.Port == "" {
		if len(s.Selector) > 0 {
			return false, nil
		}
		var err error
		if id, err = portAt.Get(tx, string(s.VPC), r.Address.String()); err != nil || id == nil {
			return err == nil, err
		}
	}
	p, err := ports.Get(tx, string(s.Project), string(*id))
	if err != nil || p == nil || len(s.Selector) > 0 && !s.Selects(p) {
		return false, err
	}
	return p.Node == node || mutant.On(mutant.ForeignHealth), nil
}
