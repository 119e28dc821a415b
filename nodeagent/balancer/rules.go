package balancer

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/bits"
	"net/netip"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// bridgeChains renders the rules that drop broadcasts and multicasts which return to the port that sent them. It
// returns nil if no port has HostPort.Hairpin.
func bridgeChains(vpc *cloud.HostVPC) []netfilter.Chain {
	var devices []string
	for i := range vpc.Subnets {
		for _, p := range vpc.Subnets[i].Ports {
			if p.Hairpin {
				devices = append(devices, fmt.Sprintf("%q . %[1]q", p.Device))
			}
		}
	}
	if len(devices) == 0 {
		return nil
	}
	reflected := netfilter.Chain{Name: "reflected", Kind: "filter", Hook: "forward", Priority: -190, Policy: "accept"}
	reflected.Rules = []string{
		fmt.Sprintf("iifname . oifname %s ether daddr & 01:00:00:00:00:00 != 00:00:00:00:00:00 drop", netfilter.Elements(devices)),
	}
	return []netfilter.Chain{reflected}
}

// chains renders the rules that translate addresses. It returns nil if the VPC has no services.
func chains(vpc *cloud.HostVPC) []netfilter.Chain {
	if len(vpc.Services) == 0 {
		return nil
	}
	destination := netfilter.Chain{Name: "destination", Kind: "nat", Hook: "prerouting", Priority: -100, Policy: "accept"}
	// Before the rules of package firewall, whose priority is 0.
	refuse := netfilter.Chain{Name: "refuse", Kind: "filter", Hook: "input", Priority: -10, Policy: "accept"}
	hairpin := netfilter.Chain{Name: "hairpin", Kind: "nat", Hook: "postrouting", Priority: 90, Policy: "accept"}
	var services []netfilter.Chain
	var dispatch, addresses []string
	loops := map[netip.Addr][]string{} // pairs of equal addresses by gateway
	for i := range vpc.Services {
		s := &vpc.Services[i]
		for _, a := range addressesOf(s) {
			addresses = append(addresses, a.String())
		}
		for _, b := range s.Backends {
			if g := gatewayOf(vpc, b.Address); g.IsValid() {
				loops[g] = append(loops[g], fmt.Sprintf("%s . %[1]s", b.Address))
			}
		}
		choice := choose(s)
		if choice == "" {
			continue
		}
		for _, p := range s.Ports {
			protocol := protocolName(p.Protocol)
			name := fmt.Sprintf("service-%s-%s-%d", s.Address, protocol, p.Port)
			for _, a := range addressesOf(s) {
				dispatch = append(dispatch, fmt.Sprintf("%s . %s . %d : goto %s", a, protocol, p.Port, name))
			}
			services = append(services, netfilter.Chain{Name: name, Rules: []string{
				fmt.Sprintf("ct mark set ct mark | %#x", connectionMark),
				fmt.Sprintf("meta l4proto %s dnat to %s:%d", protocol, choice, p.Target),
			}})
		}
	}
	if len(dispatch) > 0 {
		destination.Rules = []string{"ip daddr . meta l4proto . th dport vmap " + netfilter.Elements(dispatch)}
	}
	set := netfilter.Elements(addresses)
	refuse.Rules = []string{
		fmt.Sprintf("ip daddr %s meta l4proto tcp reject with tcp reset", set),
		fmt.Sprintf("ip daddr %s meta l4proto != icmp reject with icmp port-unreachable", set),
	}
	for i := range vpc.Subnets {
		if g := vpc.Subnets[i].Gateway; len(loops[g]) > 0 {
			hairpin.Rules = append(hairpin.Rules, fmt.Sprintf("ct mark and %#x != 0 ip saddr . ip daddr %s snat to %s",
				connectionMark, netfilter.Elements(loops[g]), g))
		}
	}
	all := []netfilter.Chain{destination, refuse, hairpin}
	if returning := returningChain(vpc); len(returning.Rules) > 0 {
		all = append(all, returning)
	}
	return append(all, services...)
}

// returningChain renders the rules by which packets of connections from outside to the floating IPs of service IPs pass
// the host with the floating IP in both directions. A connection gets the VNI of the floating IP in its mark where it
// arrives: on the host with the floating IP from the edge namespace, and on the host of the backend from the transit
// device. The packets of the connection get the same mark, and packages netdev and edge have routing rules for this
// mark. On the backend's host only the answers get the mark, because the packets in the other direction are for the
// backend.
func returningChain(vpc *cloud.HostVPC) netfilter.Chain {
	c := netfilter.Chain{Name: "returning", Kind: "filter", Hook: "prerouting", Priority: -150, Policy: "accept"}
	for i := range vpc.Gateways {
		g := &vpc.Gateways[i]
		if g.ServiceIP == "" {
			continue
		}
		arriving, direction := fmt.Sprintf("iifname %q", cloud.TransitDevice(g.VNI)), "ct direction reply "
		if g.Local() {
			arriving, direction = fmt.Sprintf("iifname %q ip daddr %s", cloud.EdgeDevicePrefix+"*", g.Address), ""
		}
		c.Rules = append(c.Rules, fmt.Sprintf("%s ct state new ct mark set ct mark | %#x", arriving, g.VNI))
		if !mutant.On(mutant.LoseReturn) {
			c.Rules = append(c.Rules, fmt.Sprintf("%sct mark and %#x == %#x meta mark set meta mark | %#[3]x",
				direction, vniMask, g.VNI))
		}
	}
	return c
}

// vniMask selects the bits of the marks of connections and packets that have the VNI of a floating IP.
const vniMask = 1<<24 - 1

// addressesOf returns the address of a service IP and its floating IP.
func addressesOf(s *cloud.HostService) []netip.Addr {
	if !s.Floating.IsValid() {
		return []netip.Addr{s.Address}
	}
	return []netip.Addr{s.Address, s.Floating}
}

func protocolName(p uint8) string {
	if p == cloud.ProtocolUDP {
		return "udp"
	}
	return "tcp"
}

// gatewayOf returns the gateway of the subnet with an address, or an invalid one.
func gatewayOf(vpc *cloud.HostVPC, a netip.Addr) netip.Addr {
	for i := range vpc.Subnets {
		if vpc.Subnets[i].CIDR.Contains(a) {
			return vpc.Subnets[i].Gateway
		}
	}
	return netip.Addr{}
}

// isUsable reports whether a backend gets new connections.
func isUsable(b *cloud.HostBackend) bool { return b.Healthy || mutant.On(mutant.BalanceUnhealthy) }

// choose returns the nft expression that selects the address of a backend. It returns "" if no backend is usable.
func choose(s *cloud.HostService) string {
	var usable []*cloud.HostBackend
	for i := range s.Backends {
		if isUsable(&s.Backends[i]) {
			usable = append(usable, &s.Backends[i])
		}
	}
	switch {
	case len(usable) == 0:
		return ""
	case len(usable) == 1:
		return usable[0].Address.String()
	case s.Affinity == cloud.AffinityClientIP:
		slots := slotsFor(len(s.Backends))
		seed := fnv.New32a()
		seed.Write(s.Address.AsSlice())
		return fmt.Sprintf("jhash ip saddr mod %d seed %#x map %s", slots, seed.Sum32(), slotMap(usable, slots))
	}
	var divisor, total uint32
	for _, b := range usable {
		divisor = gcd(divisor, b.Weight)
	}
	var ranges []string
	for _, b := range usable {
		first := total
		total += b.Weight / divisor
		ranges = append(ranges, rangeOf(first, total-1, b.Address))
	}
	return fmt.Sprintf("numgen random mod %d map { %s }", total, strings.Join(ranges, ", "))
}

// rangeOf returns the element of a map that assigns the numbers from first to last to an address.
func rangeOf(first, last uint32, a netip.Addr) string {
	if first == last {
		return fmt.Sprintf("%d : %s", first, a)
	}
	return fmt.Sprintf("%d-%d : %s", first, last, a)
}

func gcd(a, b uint32) uint32 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Limits of the number of slots of a service IP with affinity.
const minSlots, maxSlots, slotsPerBackend = 64, 4096, 16

// slotsFor returns the number of slots for a number of backends, healthy and unhealthy. The failure of a backend
// therefore leaves the number of slots as it is, and the other backends keep their clients.
func slotsFor(backends int) uint32 {
	n := uint32(1) << bits.Len32(uint32(backends*slotsPerBackend-1))
	return min(max(n, minSlots), maxSlots)
}

// slotMap assigns each slot to the backend with the highest score (weighted rendezvous hashing). All hosts have the
// same result.
func slotMap(usable []*cloud.HostBackend, slots uint32) string {
	var ranges []string
	owner := func(slot uint32) netip.Addr {
		var best netip.Addr
		highest := math.Inf(-1)
		for _, b := range usable {
			if score := scoreOf(slot, b); score > highest {
				best, highest = b.Address, score
			}
		}
		return best
	}
	first, address := uint32(0), owner(0)
	for slot := uint32(1); slot < slots; slot++ {
		if a := owner(slot); a != address {
			ranges = append(ranges, rangeOf(first, slot-1, address))
			first, address = slot, a
		}
	}
	ranges = append(ranges, rangeOf(first, slots-1, address))
	return "{ " + strings.Join(ranges, ", ") + " }"
}

// scoreOf returns the score of a backend for a slot: the logarithm of a number between 0 and 1, divided by the weight.
// The number is a hash of the slot and of the backend's address.
func scoreOf(slot uint32, b *cloud.HostBackend) float64 {
	h := fnv.New64a()
	h.Write(b.Address.AsSlice())
	x := h.Sum64() ^ uint64(slot)*0x9e3779b97f4a7c15
	// The finalizer of SplitMix64 spreads the difference of inputs over all bits. The FNV hashes of similar addresses
	// differ in a few bits only.
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	return math.Log((float64(x>>11)+0.5)/(1<<53)) / float64(b.Weight)
}
