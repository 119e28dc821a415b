package network

import (
	"maps"
	"net/url"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	// portLabels lists the ports of a VPC that have a label, at port-label/<vpc>/<label>/<port>. See labelPath.
	portLabels = store.NewTable[struct{}]("port-label")
	// selectorsIn lists the service IPs of a VPC that have a selector, at service-selector/<vpc>/<id>.
	selectorsIn = store.NewTable[struct{}]("service-selector")
)

// The backends of a service IP with a selector are not part of its record. When a port gets or loses a label, only the
// port's record and the index portLabels change. Hosts have the ports of the VPC with their labels, and apply the
// selector themselves. The record of the service IP has the health of the ports that hosts have reported about.

// labelPath returns a label as one part of a store path. It escapes slashes, because they separate the parts.
func labelPath(key, value string) string { return url.QueryEscape(key) + "=" + url.QueryEscape(value) }

// indexLabels adds a port to the index of its labels.
func indexLabels(tx *store.Tx, p *cloud.Port) {
	for key, value := range p.Labels {
		portLabels.Put(tx, &struct{}{}, string(p.VPC), labelPath(key, value), string(p.ID))
	}
}

// forgetLabels removes a port from the index of its labels.
func forgetLabels(tx *store.Tx, p *cloud.Port) {
	for key, value := range p.Labels {
		portLabels.Delete(tx, string(p.VPC), labelPath(key, value), string(p.ID))
	}
}

// relabel replaces the labels of a port. It removes the reports about the port's health, so that a service IP that
// selects the port again later uses it only after a new check.
func relabel(tx *store.Tx, p *cloud.Port, labels map[string]string) error {
	if err := forgetReports(tx, p); err != nil {
		return err
	}
	forgetLabels(tx, p)
	p.Labels = labels
	indexLabels(tx, p)
	return nil
}

// forgetReports removes the reports about a port from all service IPs with a selector. It reads no service IP if the
// port has no labels.
func forgetReports(tx *store.Tx, p *cloud.Port) error {
	if len(p.Labels) == 0 {
		return nil
	}
	all, _, err := selectorsIn.List(tx, 0, string(p.VPC))
	if err != nil {
		return err
	}
	for _, u := range all {
		s, err := serviceIPs.Get(tx, string(p.Project), u.Path[1])
		if err != nil {
			return err
		}
		if s == nil {
			continue
		}
		before := len(s.Reports)
		s.Reports = withoutPort(s.Reports, p.ID)
		if len(s.Reports) != before {
			s.UpdatedAt = tx.Now()
			serviceIPs.Put(tx, s, string(s.Project), string(s.ID))
		}
	}
	return nil
}

// selectPage is the number of index entries that resolveBackends reads at a time.
const selectPage = 500

// resolveBackends sets the backends and the status of a service IP with a selector. It does not change a service IP
// without a selector. The changed record must not be stored.
func resolveBackends(r store.Reader, s *cloud.ServiceIP) error {
	if len(s.Selector) == 0 {
		return nil
	}
	selected, err := selectedPorts(r, s)
	if err != nil {
		return err
	}
	s.Backends = s.SelectBackends(selected)
	setServiceStatus(s)
	return nil
}

// selectedPorts returns the first cloud.MaxBackends ports that a service IP with a selector selects, in the order of
// their IDs.
func selectedPorts(r store.Reader, s *cloud.ServiceIP) (out []*cloud.Port, err error) {
	key := slices.Min(slices.Collect(maps.Keys(s.Selector)))
	path := []string{string(s.VPC), labelPath(key, s.Selector[key])}
	for after := []string(nil); ; {
		entries, more, err := portLabels.ListAfter(r, selectPage, after, path...)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			after = e.Path
			p, err := ports.Get(r, string(s.Project), e.Path[2])
			if err != nil {
				return nil, err
			}
			if p == nil || !s.Selects(p) {
				continue
			}
			if out = append(out, p); len(out) == cloud.MaxBackends {
				return out, nil
			}
		}
		if !more {
			return out, nil
		}
	}
}
