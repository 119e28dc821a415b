package peering

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// randomStates returns the number of states of TestRandomPeerings: TRIVET_PEERING_STATES, or 5.
func randomStates(t *testing.T) int {
	if text := os.Getenv("TRIVET_PEERING_STATES"); text != "" {
		n, err := strconv.Atoi(text)
		require.NoError(t, err)
		return n
	}
	return 5
}

// randomStage is a host with the VPCs 1 to 4. VPC n has the subnets 10.n.1.0/24 and 10.n.2.0/24, each with the port
// 10.n.m.10.
type randomStage struct {
	*lab
	host   *labHost
	random *rand.Rand
	vpcs   []*cloud.HostVPC
}

// TestRandomPeerings gives VPCs random peerings and route tables, with interruptions and changes by hand between them.
// Packets must pass between two ports if the route tables of both lead to the same peering, and only then. The kernel's
// state must be the one that a new host would have.
func TestRandomPeerings(t *testing.T) {
	l := newLab(t)
	s := &randomStage{lab: l, host: l.hosts[0], random: rand.New(rand.NewPCG(7, 0))}
	for n := 1; n <= 4; n++ {
		s.vpcs = append(s.vpcs, randomVPC(n))
	}
	verdicts := map[bool]int{}
	s.converge()
	for _, v := range s.vpcs {
		for i := range v.Subnets {
			s.serve(s.host.guest(v, v.Subnets[i].Ports[0].ID))
		}
	}
	for round := range randomStates(t) {
		for range s.random.IntN(4) {
			s.disturb()
		}
		s.randomize()
		s.converge()
		s.requireModel(round, verdicts)
		before := s.dump()
		for _, v := range s.vpcs {
			require.NoError(t, s.host.links.Remove(t.Context(), v.ID))
			require.NoError(t, s.host.devices.Remove(t.Context(), v.ID))
		}
		s.converge()
		require.Equal(t, s.dump(), before, "round %d: the state differs from that of a new host", round)
	}
	require.NotZero(t, verdicts[true])
	require.NotZero(t, verdicts[false])
}

func randomVPC(n int) *cloud.HostVPC {
	v := &cloud.HostVPC{
		ID: cloud.VPCID(fmt.Sprint("v", n)), MTU: uint16(1400 - 10*n), CIDR: parsePrefix(fmt.Sprintf("10.%d.0.0/16", n)),
		CIDR6: parsePrefix(fmt.Sprintf("fd00:%d::/48", n)), Groups: labGroups(),
	}
	for m := 1; m <= 2; m++ {
		s := cloud.HostSubnet{
			ID: cloud.SubnetID(fmt.Sprint("s", m)), VNI: uint32(100*n + m), CIDR: parsePrefix(fmt.Sprintf("10.%d.%d.0/24", n, m)),
			Gateway: parseAddr(fmt.Sprintf("10.%d.%d.1", n, m)), CIDR6: parsePrefix(fmt.Sprintf("fd00:%d:0:%d::/64", n, m)),
		}
		s.Ports = []cloud.HostPort{{
			ID: cloud.PortID(fmt.Sprint("p", m)), Device: fmt.Sprint("port", m), MAC: cloud.MAC{2, 0, 0, 1, byte(n), byte(m)},
			IP:  parseAddr(fmt.Sprintf("10.%d.%d.10", n, m)),
			IP6: parseAddr(fmt.Sprintf("fd00:%d:0:%d::10", n, m)), Secured: true, Groups: []cloud.SecurityGroupID{"open"},
		}}
		v.Subnets = append(v.Subnets, s)
	}
	return v
}

// randomize gives the VPCs random peerings, and their subnets random routes.
func (s *randomStage) randomize() {
	for _, v := range s.vpcs {
		v.Peerings = nil
	}
	for i, a := range s.vpcs {
		for _, b := range s.vpcs[i+1:] {
			if s.random.IntN(3) == 0 {
				continue
			}
			id := cloud.PeeringID(fmt.Sprintf("peering-%s-%s-%d", a.ID, b.ID, s.random.IntN(2)))
			a.Peerings = append(a.Peerings, cloud.HostPeering{ID: id, Peer: b.ID, CIDR: b.CIDR, CIDR6: b.CIDR6, MTU: b.MTU})
			b.Peerings = append(b.Peerings, cloud.HostPeering{ID: id, Peer: a.ID, CIDR: a.CIDR, CIDR6: a.CIDR6, MTU: a.MTU})
		}
	}
	for _, v := range s.vpcs {
		for i := range v.Subnets {
			v.Subnets[i].Routes = s.routes(v)
		}
	}
}

// routes returns random routes of a subnet. Most of them lead to the peering with the VPC of the destination.
func (s *randomStage) routes(v *cloud.HostVPC) (out []cloud.HostRoute) {
	for _, peer := range s.vpcs {
		if peer == v {
			continue
		}
		n := int(peer.CIDR.Addr().As4()[1])
		for _, destination := range []string{
			fmt.Sprintf("10.%d.0.0/16", n), fmt.Sprintf("10.%d.1.0/24", n), fmt.Sprintf("10.%d.2.10/32", n),
			fmt.Sprintf("fd00:%d::/48", n), fmt.Sprintf("fd00:%d:0:1::/64", n),
		} {
			if s.random.IntN(2) == 0 {
				continue
			}
			r := cloud.HostRoute{Destination: parsePrefix(destination), Target: cloud.RouteBlackhole}
			at := slices.IndexFunc(v.Peerings, func(p cloud.HostPeering) bool { return p.Peer == peer.ID })
			if s.random.IntN(8) == 0 {
				at = s.random.IntN(len(v.Peerings)+1) - 1
			}
			if at >= 0 && s.random.IntN(5) > 0 {
				r.Target, r.Peering = cloud.RoutePeering, v.Peerings[at].ID
			}
			out = append(out, r)
		}
	}
	return out
}

// apply applies a VPC as the agent does.
func (s *randomStage) apply(ctx context.Context, v *cloud.HostVPC) (Result, error) {
	h := s.host
	prepared, err := h.devices.Prepare(ctx, *v)
	if err != nil {
		return Result{}, err
	}
	for _, id := range prepared.Missing {
		name := h.guest(v, id)
		if _, err := os.Stat(s.Path(name)); err != nil {
			s.Add(name)
		}
		if err := h.devices.AttachVeth(ctx, *v, id, netdev.Endpoint{Namespace: s.Path(name), Device: "eth0"}); err != nil {
			return Result{}, err
		}
	}
	ns, err := netns.GetFromPath(h.devices.Path(v.ID))
	if err != nil {
		return Result{}, err
	}
	defer ns.Close()
	if _, err = h.firewall.Set(ctx, ns, *v); err != nil {
		return Result{}, err
	}
	r, err := h.links.Set(ctx, v)
	if err == nil {
		_, err = h.devices.Activate(ctx, *v)
	}
	return r, err
}

// converge applies the VPCs in random order, and then once more the VPCs for which another call has made new devices.
// After that, applying the VPCs must change nothing.
func (s *randomStage) converge() {
	s.t.Helper()
	s.random.Shuffle(len(s.vpcs), func(i, j int) { s.vpcs[i], s.vpcs[j] = s.vpcs[j], s.vpcs[i] })
	again := map[cloud.VPCID]bool{}
	for _, v := range s.vpcs {
		r, err := s.apply(s.t.Context(), v)
		require.NoError(s.t, err)
		delete(again, v.ID)
		for _, id := range r.Connected {
			again[id] = true
		}
	}
	for _, v := range s.vpcs {
		if again[v.ID] {
			_, err := s.apply(s.t.Context(), v)
			require.NoError(s.t, err)
		}
	}
	for _, v := range s.vpcs {
		r, err := s.host.links.Set(s.t.Context(), v)
		require.NoError(s.t, err)
		require.Empty(s.t, r, "VPC %s: %+v", v.ID, v)
	}
}

// disturb applies a random state in part, or damages the kernel's state.
func (s *randomStage) disturb() {
	s.t.Helper()
	v := s.vpcs[s.random.IntN(len(s.vpcs))]
	inside := s.host.inside(v.ID)
	switch s.random.IntN(5) {
	case 0:
		s.randomize()
		_, err := s.apply(s.t.Context(), v)
		require.NoError(s.t, err)
	case 1:
		s.randomize()
		ctx, cancel := context.WithTimeout(s.t.Context(), time.Duration(s.random.IntN(40))*time.Millisecond)
		defer cancel()
		_, _ = s.host.links.Set(ctx, v)
	case 2:
		require.NoError(s.t, s.host.devices.Remove(s.t.Context(), v.ID))
		_, err := s.apply(s.t.Context(), v)
		require.NoError(s.t, err)
	case 3:
		for _, line := range strings.Split(s.IP(inside, "-o link show"), "\n") {
			fields := strings.Fields(line)
			if len(fields) > 1 && strings.HasPrefix(fields[1], cloud.PeeringDevices) {
				name, _, _ := strings.Cut(strings.TrimSuffix(fields[1], ":"), "@")
				s.IP(inside, "link %s", []string{"delete " + name, "set " + name + " down", "set " + name + " mtu 1300"}[s.random.IntN(3)])
				return
			}
		}
	case 4:
		s.IP(inside, "route flush table all proto %d", netdev.PeeringProtocol)
		s.Exec(inside, "nft", "add table inet trivet-peering; delete table inet trivet-peering")
	}
}

// routed returns the peering to which a subnet's routes lead packets for an address, or "".
func routed(s *cloud.HostSubnet, to netip.Addr) cloud.PeeringID {
	var best *cloud.HostRoute
	for i := range s.Routes {
		r := &s.Routes[i]
		if r.Destination.Contains(to) && (best == nil || r.Destination.Bits() > best.Destination.Bits()) {
			best = r
		}
	}
	if best == nil || best.Target != cloud.RoutePeering {
		return ""
	}
	return best.Peering
}

// passes reports whether packets from a port of one VPC reach a port of another.
func passes(v *cloud.HostVPC, from *cloud.HostSubnet, w *cloud.HostVPC, to *cloud.HostSubnet, ipv6 bool) bool {
	source, destination := from.Ports[0].IP, to.Ports[0].IP
	if ipv6 {
		source, destination = from.Ports[0].IP6, to.Ports[0].IP6
	}
	out := routed(from, destination)
	at := slices.IndexFunc(v.Peerings, func(p cloud.HostPeering) bool { return p.ID == out })
	return at >= 0 && v.Peerings[at].Peer == w.ID && routed(to, source) == out
}

// requireModel sends packets between random ports of different VPCs, and counts the verdicts.
func (s *randomStage) requireModel(round int, verdicts map[bool]int) {
	s.t.Helper()
	var mu sync.Mutex // guards problems
	var problems []string
	var running sync.WaitGroup
	for range 24 {
		v, w := s.vpcs[s.random.IntN(len(s.vpcs))], s.vpcs[s.random.IntN(len(s.vpcs))]
		if v == w {
			continue
		}
		from, to := &v.Subnets[s.random.IntN(2)], &w.Subnets[s.random.IntN(2)]
		network, address := "udp4", to.Ports[0].IP
		if s.random.IntN(3) == 0 {
			network, address = "tcp6", to.Ports[0].IP6
		}
		want := passes(v, from, w, to, network == "tcp6")
		verdicts[want]++
		within := blocked
		if want {
			within = patience
		}
		guest := s.host.guest(v, from.Ports[0].ID)
		running.Go(func() {
			if err := s.reaches(network, guest, address.String(), within); (err == nil) != want {
				mu.Lock()
				defer mu.Unlock()
				problems = append(problems, fmt.Sprintf("%s from %s to %s: want %t, got %v", network, guest, address, want, err))
			}
		})
	}
	running.Wait()
	require.Empty(s.t, problems, "round %d", round)
}

// dump returns the kernel's routes, devices of peerings and rules for them in the namespaces of the VPCs.
func (s *randomStage) dump() string {
	s.t.Helper()
	var b strings.Builder
	for n := 1; n <= len(s.vpcs); n++ {
		name := s.host.inside(cloud.VPCID(fmt.Sprint("v", n)))
		for _, command := range []string{"-4 route show table all", "-6 route show table all", "-4 rule", "-6 rule", "-o link show"} {
			lines := strings.Split(s.IP(name, "%s", command), "\n")
			for i, line := range lines {
				if command == "-o link show" && !strings.Contains(line, ": "+cloud.PeeringDevices) {
					lines[i] = "" // the number and the states of other devices change by themselves
				} else if command == "-o link show" {
					_, line, _ = strings.Cut(line, ": ")
					device, rest, _ := strings.Cut(line, ": ")
					device, _, _ = strings.Cut(device, "@")
					flags, _, _ := strings.Cut(rest, " qdisc")
					lines[i] = device + " " + flags
				}
			}
			lines = slices.DeleteFunc(lines, func(line string) bool {
				return line == "" || strings.Contains(line, "fe80::") || strings.HasPrefix(line, "multicast")
			})
			slices.Sort(lines)
			fmt.Fprintf(&b, "%s: %s\n%s\n", name, command, strings.Join(lines, "\n"))
		}
		for _, line := range strings.Split(s.Exec(name, "nft", "list", "tables"), "\n") {
			if strings.Contains(line, table.Name) {
				b.WriteString(s.Exec(name, "nft", "list", "table", "inet", table.Name))
			}
		}
	}
	return b.String()
}
