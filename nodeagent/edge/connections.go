package edge

import (
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// revoke deletes the tracked connections that the wanted state translates differently. The rules must be in effect.
func (a *application) revoke(r *Result) error {
	if mutant.On(mutant.KeepTranslated) {
		return nil
	}
	translated := map[netip.Addr]netip.Addr{} // VPCs' ends of veth pairs to the host's addresses
	var failed error
	for _, c := range a.connected {
		if c.source(a.externals) == c.far {
			translated[c.far] = externalOf(a.externals, c.NAT.External).Address.Addr()
		}
	}
	for _, list := range byVPC(a.connected) {
		if err := list[0].inside.deleteConnections(obsoleteIn(a.externals, list), r); err != nil {
			failed = errors.Join(failed, &VPCError{list[0].ID, err})
		}
	}
	return errors.Join(failed, a.edge.deleteConnections(func(f *netlink.ConntrackFlow) bool {
		source := netfilter.Address(f.Forward.SrcIP)
		return linkPrefix.Contains(source) && translated[source] != netfilter.Address(f.Reverse.DstIP)
	}, r))
}

// obsoleteIn selects tracked connections in a VPC's namespace that pass the edge. It selects a tracked connection if no
// connection in list has its translated addresses, or if its packets now leave through a device with another
// translation. The reply tuple of a tracked connection contains the translated addresses.
func obsoleteIn(all []external, list []*connection) netfilter.Selection {
	fixed, floating, sources := map[netip.Addr]netip.Addr{}, map[netip.Addr]netip.Addr{}, map[netip.Addr]bool{}
	services := map[netip.Addr]bool{} // package balancer deletes connections to floating IPs of service IPs
	for _, c := range list {
		if c.gateway != nil && c.gateway.Mark != 0 {
			services[c.gateway.Address] = true
		}
		for _, f := range c.Floating {
			fixed[f.Address], floating[f.Fixed] = f.Fixed, f.Address
		}
		if source := c.source(all); source.IsValid() {
			sources[source] = true
		}
	}
	return func(f *netlink.ConntrackFlow) bool {
		if f.Mark&connectionMark == 0 {
			return false
		}
		if f.Mark&reroutedMark != 0 {
			return true
		}
		if services[netfilter.Address(f.Forward.DstIP)] {
			return false
		}
		inward := fixed[netfilter.Address(f.Forward.DstIP)]
		if inward.IsValid() && inward == netfilter.Address(f.Reverse.SrcIP) {
			return false
		}
		outward := netfilter.Address(f.Reverse.DstIP)
		return !sources[outward] && outward != floating[netfilter.Address(f.Forward.SrcIP)]
	}
}

// deleteConnections deletes the tracked IPv4 connections of the namespace that f selects.
func (s *space) deleteConnections(f netfilter.Selection, r *Result) error {
	n, err := netfilter.DeleteConnections(s.ctx, s.Handle, f)
	r.Revoked += n
	if n > 0 {
		s.changed("conntrack -D: %d connections", n)
	}
	return err
}
