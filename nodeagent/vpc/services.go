package vpc

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// addServices adds the service IPs of the VPC. node is this host.
//
// The host of a backend's port reports the backend's health. Another host cannot check the backend: the replies go to
// the gateway's address, which every host has, and so stay on the backend's host. An address that no port of the VPC
// has, for example one of a peered VPC, cannot be checked. The host of the VPC's first port reports it as healthy.
func (w *wanted) addServices(node cloud.NodeID, one *vpcTable) {
	if len(one.services) == 0 {
		return
	}
	byAddress, first := map[netip.Addr]*cloud.PortOnHost{}, cloud.NodeID("")
	labelled := labelledPorts{}
	for _, key := range slices.Sorted(maps.Keys(one.ports)) {
		p := one.ports[key]
		byAddress[p.IP] = p
		labelled.add(&p.Port)
		if first == "" {
			first = p.Node
		}
	}
	floating := map[cloud.ServiceIPID]netip.Addr{}
	for _, n := range one.nats {
		if n.ServiceIP != "" {
			floating[n.ServiceIP] = n.Address
		}
	}
	for _, key := range slices.Sorted(maps.Keys(one.services)) {
		s := one.services[key]
		if w.subnetOf(s.Address) == nil && !one.record.ServiceCIDR.Contains(s.Address) {
			w.problem("service IP %s: neither a subnet nor the VPC's service range has its address %s", s.ID, s.Address)
			continue
		}
		if slices.ContainsFunc(w.Services, func(o cloud.HostService) bool { return o.Address == s.Address }) {
			w.problem("service IP %s: another one has its address %s", s.ID, s.Address)
			continue
		}
		out := cloud.HostService{
			ID: s.ID, Name: s.Name, Address: s.Address, Floating: floating[s.ID], Ports: s.Ports, Affinity: s.Affinity,
			Health: s.Health,
		}
		backends := s.Backends
		if len(s.Selector) > 0 {
			backends = s.SelectBackends(labelled.candidates(s.Selector))
		}
		for _, b := range backends {
			port := byAddress[b.Address]
			if b.Port != "" {
				port = one.ports[b.Port]
			}
			backend, ok := w.backend(b, port, node, first)
			if !ok {
				w.problem("service IP %s: a backend has no IPv4 address: port %q, address %q", s.ID, b.Port, b.Address)
				continue
			}
			if s.Health == nil {
				backend.Reported, backend.Source = false, netip.Addr{}
			}
			out.Backends = append(out.Backends, backend)
		}
		slices.SortFunc(out.Backends, func(a, b cloud.HostBackend) int {
			return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Port, b.Port))
		})
		w.Services = append(w.Services, out)
	}
}

// label is a label of a port.
type label struct{ key, value string }

// labelledPorts has the ports with each label, in the order of their IDs. It reduces the number of ports with which a
// selector is compared.
type labelledPorts map[label][]*cloud.Port

// add adds a port under each of its labels. Ports must be added in the order of their IDs.
func (l labelledPorts) add(p *cloud.Port) {
	for key, value := range p.Labels {
		l[label{key, value}] = append(l[label{key, value}], p)
	}
}

// candidates returns the ports that have the rarest label of a selector.
func (l labelledPorts) candidates(selector map[string]string) (fewest []*cloud.Port) {
	begun := false
	for key, value := range selector {
		if have := l[label{key, value}]; !begun || len(have) < len(fewest) {
			fewest, begun = have, true
		}
	}
	return fewest
}

// backend returns the state of a backend for this host, node. If the backend's port is on this host, backend sets its
// Hairpin. port is the port with the backend's address, or nil. A backend whose port has no host is not healthy. first
// is the host that reports about addresses without a port.
func (w *wanted) backend(
	b cloud.Backend, port *cloud.PortOnHost, node, first cloud.NodeID,
) (out cloud.HostBackend, ok bool) {
	out = cloud.HostBackend{Address: b.Address, Port: b.Port, Weight: b.Weight, Healthy: b.Healthy, Checked: b.Checked}
	if port == nil {
		out.Reported = first == node
		return out, b.Address.Is4()
	}
	out.Address = port.IP
	out.Healthy = b.Healthy && port.Node != ""
	s := w.subnetOf(port.IP)
	if s == nil || port.Node != node {
		return out, true
	}
	out.Reported, out.Source = true, s.Gateway
	for i := range s.Ports {
		if s.Ports[i].ID == port.ID {
			s.Ports[i].Hairpin = true
		}
	}
	return out, true
}

// subnetOf returns the subnet with an IPv4 address, or nil.
func (w *wanted) subnetOf(a netip.Addr) *cloud.HostSubnet {
	i := slices.IndexFunc(w.Subnets, func(s cloud.HostSubnet) bool { return s.CIDR.Contains(a) })
	if i < 0 {
		return nil
	}
	return &w.Subnets[i]
}
