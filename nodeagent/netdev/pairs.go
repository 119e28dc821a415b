package netdev

import (
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// maxPairHostBits limits the address pairs of remote ports that get entries to prefixes of 2^4 addresses. Each address
// needs a neighbour entry.
const maxPairHostBits = 4

// addPairs adds the forwarding entries of the address pairs of remote ports.
//
// An address gets entries if exactly one port of the subnet has it. Ports that share an address, as with VRRP, decide
// among themselves which of them uses it, and change that at any time. A static entry would lead to the wrong one.
func (w *state) addPairs(s *cloud.HostSubnet) {
	if !slices.ContainsFunc(s.Remotes, func(r cloud.RemotePort) bool { return len(r.Pairs) > 0 }) {
		return
	}
	c := claimPairs(s)
	bridge, overlay := Bridge(s.VNI), vxlanOf(s.VNI)
	for i := range s.Remotes {
		r := &s.Remotes[i]
		for _, pair := range r.Pairs {
			mac := pairMAC(pair, r.MAC)
			if mac != r.MAC {
				if !usable(mac) || !c.macs.only(mac, r.MAC) {
					continue
				}
				w.fdb[station{bridge, mac}] = fdbEntry{device: overlay, sticky: true}
				w.tunnels[station{overlay, mac}] = r.VTEP
			}
			for _, a := range pairAddresses(s, pair) {
				if c.addrs.only(a, r.MAC) {
					w.neighbours[neighbour{bridge, a}] = mac
				}
			}
		}
	}
}

// owners has for each address the MAC address of the port that has it, or the zero MAC address if several ports do.
type owners[K comparable] map[K]cloud.MAC

func (o owners[K]) add(key K, port cloud.MAC) {
	if other, owned := o[key]; owned && other != port {
		port = cloud.MAC{}
	}
	o[key] = port
}

func (o owners[K]) only(key K, port cloud.MAC) bool { return o[key] == port }

// claims are the owners of the IP and MAC addresses of a subnet.
type claims struct {
	addrs owners[netip.Addr]
	macs  owners[cloud.MAC]
}

// claimPairs returns the owners of all addresses that ports of the subnet have or may use. A port that migrates is in
// Ports and in Remotes, and counts once.
func claimPairs(s *cloud.HostSubnet) claims {
	c := claims{owners[netip.Addr]{}, owners[cloud.MAC]{}}
	claim := func(port cloud.MAC, pairs []cloud.AddressPair, addrs ...netip.Addr) {
		c.macs.add(port, port)
		for _, a := range addrs {
			c.addrs.add(a, port)
		}
		for _, pair := range pairs {
			c.macs.add(pairMAC(pair, port), port)
			for _, a := range pairAddresses(s, pair) {
				c.addrs.add(a, port)
			}
		}
	}
	claim(cloud.GatewayMAC, nil, s.Gateway, s.Gateway6())
	for i := range s.Ports {
		claim(s.Ports[i].MAC, s.Ports[i].Pairs, s.Ports[i].IP, s.Ports[i].IP6)
	}
	for i := range s.Remotes {
		claim(s.Remotes[i].MAC, s.Remotes[i].Pairs, s.Remotes[i].IP, s.Remotes[i].IP6)
	}
	return c
}

func pairMAC(pair cloud.AddressPair, port cloud.MAC) cloud.MAC {
	if pair.MAC == (cloud.MAC{}) {
		return port
	}
	return pair.MAC
}

// pairAddresses returns the addresses of a pair within the subnet, or none if the prefix has too many.
func pairAddresses(s *cloud.HostSubnet, pair cloud.AddressPair) []netip.Addr {
	if !pair.CIDR.IsValid() || pair.CIDR.Addr().BitLen()-pair.CIDR.Bits() > maxPairHostBits {
		return nil
	}
	var addrs []netip.Addr
	for a := pair.CIDR.Masked().Addr(); pair.CIDR.Contains(a); a = a.Next() {
		if s.CIDR.Contains(a) || s.CIDR6.Contains(a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// usable reports whether a port may have the MAC address: multicast addresses and that of the gateway are excluded.
func usable(mac cloud.MAC) bool {
	return mac != (cloud.MAC{}) && mac[0]&1 == 0 && mac != cloud.GatewayMAC
}
