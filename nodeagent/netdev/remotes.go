package netdev

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// maxRemoteChanges is the greatest number of different ports of a subnet for which UpdateRemotes writes single entries.
const maxRemoteChanges = 64

// UpdateRemotes is like Prepare for a VPC that differs from last only in the ports on other hosts. The kernel must
// still have the entries that Prepare or UpdateRemotes wrote for last. UpdateRemotes writes the entries of the ports
// that differ, and reads nothing, so its duration does not depend on the number of ports that are equal. It calls
// Prepare instead if the difference is large, if the ports are not sorted by MAC address, or if entries of other ports
// could depend on the difference.
func (h *Host) UpdateRemotes(ctx context.Context, vpc, last cloud.HostVPC) (Result, error) {
	if !sameSubnets(vpc.Subnets, last.Subnets) {
		return h.Prepare(ctx, vpc)
	}
	want, have := newState(), newState()
	for i := range vpc.Subnets {
		ok, err := h.compareRemotes(&vpc.Subnets[i], &last.Subnets[i], want, have)
		if err != nil {
			return Result{}, fmt.Errorf("update VPC %s: subnet %s: %w", vpc.ID, vpc.Subnets[i].ID, err)
		}
		if !ok {
			return h.Prepare(ctx, vpc)
		}
	}
	p := &planner{want: want, have: have}
	p.addEntries()
	p.deleteEntries()
	if len(p.changes) == 0 {
		return Result{}, nil
	}
	unlock, err := h.lock(ctx, vpc.ID)
	if err != nil {
		return Result{}, fmt.Errorf("update VPC %s: %w", vpc.ID, err)
	}
	defer unlock()
	var result Result
	err = h.enter(ctx, vpc.ID, func(k *kernel) (err error) {
		result.Changes, _, err = k.apply(p.changes, want)
		return err
	})
	if err != nil {
		return result, fmt.Errorf("update VPC %s: %w", vpc.ID, err)
	}
	return result, nil
}

func sameSubnets(a, b []cloud.HostSubnet) bool {
	return slices.EqualFunc(a, b, func(x, y cloud.HostSubnet) bool { return x.ID == y.ID && x.VNI == y.VNI })
}

// compareRemotes adds the entries of the remote ports of a subnet that differ from last: to want as they are in s, and
// to have as they are in last. It returns false if Prepare is needed.
func (h *Host) compareRemotes(s, last *cloud.HostSubnet, want, have *state) (ok bool, err error) {
	added, removed, ok := differentRemotes(s.Remotes, last.Remotes)
	if len(added) == 0 && len(removed) == 0 || !ok {
		return ok, nil
	}
	if len(added) > maxRemoteChanges || len(removed) > maxRemoteChanges {
		return false, nil
	}
	// The entries of an address pair depend on the pairs of all other ports of the subnet.
	hasPairs := func(r cloud.RemotePort) bool { return len(r.Pairs) > 0 }
	if slices.ContainsFunc(s.Remotes, hasPairs) || slices.ContainsFunc(last.Remotes, hasPairs) {
		return false, nil
	}
	for _, list := range [][]cloud.RemotePort{added, removed} {
		for i := range list {
			if isLocal(s, &list[i]) {
				return false, nil
			}
		}
	}
	u := underlay{vtep: h.opts.VTEP}
	for i := range added {
		if err := checkAddedRemote(s, &added[i], &u); err != nil {
			return false, err
		}
	}
	for _, one := range []struct {
		state   *state
		remotes []cloud.RemotePort
	}{{want, added}, {have, removed}} {
		one.state.links[Bridge(s.VNI)] = link{kind: bridgeLink}
		one.state.links[vxlanOf(s.VNI)] = link{kind: vxlanLink}
		for i := range one.remotes {
			one.state.addRemote(s, &one.remotes[i])
		}
	}
	return true, nil
}

// differentRemotes returns the ports of each of two lists that are not in the other one with the same state. It returns
// false if a list is not sorted by MAC address or has a MAC address twice.
func differentRemotes(want, have []cloud.RemotePort) (added, removed []cloud.RemotePort, ok bool) {
	if !sortedByMAC(want) || !sortedByMAC(have) {
		return nil, nil, false
	}
	for len(want) > 0 || len(have) > 0 {
		order := 0
		switch {
		case len(want) == 0:
			order = 1
		case len(have) == 0:
			order = -1
		default:
			order = bytes.Compare(want[0].MAC[:], have[0].MAC[:])
		}
		if order == 0 && want[0].Equal(&have[0]) {
			want, have = want[1:], have[1:]
			continue
		}
		if order <= 0 {
			added, want = append(added, want[0]), want[1:]
		}
		if order >= 0 {
			removed, have = append(removed, have[0]), have[1:]
		}
	}
	return added, removed, true
}

func sortedByMAC(list []cloud.RemotePort) bool {
	for i := 1; i < len(list); i++ {
		if bytes.Compare(list[i-1].MAC[:], list[i].MAC[:]) >= 0 {
			return false
		}
	}
	return true
}

// isLocal reports whether a port on this host has an address of r. This is possible while the port migrates, or after
// the port has been given the address of r.
func isLocal(s *cloud.HostSubnet, r *cloud.RemotePort) bool {
	return slices.ContainsFunc(s.Ports, func(p cloud.HostPort) bool {
		return p.MAC == r.MAC || sharesAddress(p.IP, p.IP6, r)
	})
}

func sharesAddress(ip, ip6 netip.Addr, r *cloud.RemotePort) bool {
	return ip.IsValid() && ip == r.IP || ip6.IsValid() && ip6 == r.IP6
}

// checkAddedRemote makes the checks of checkSubnet for one remote port. The MAC addresses are known to be different.
func checkAddedRemote(s *cloud.HostSubnet, r *cloud.RemotePort, u *underlay) error {
	if err := checkRemote(r, u); err != nil {
		return err
	}
	if err := addStation(uses{}, "remote port "+r.MAC.String(), r.MAC, r.IP, r.IP6); err != nil {
		return err
	}
	for i := range s.Remotes {
		if o := &s.Remotes[i]; o.MAC != r.MAC && sharesAddress(o.IP, o.IP6, r) {
			return fmt.Errorf("remote ports %s and %s both have %s or %s", o.MAC, r.MAC, r.IP, r.IP6)
		}
	}
	return nil
}
