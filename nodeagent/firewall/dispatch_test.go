package firewall

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// route evaluates the rules of dispatchChains for a packet from an address whose element in the set of lists has the
// given counter; nil means that there is no such element. It returns the chain of a list, noRuleChain or "" if the
// packet passes, the number of comparisons, and the number of chains of the tree on the way.
func route(t *testing.T, chains map[string][]string, name string, counter *listID) (to string, compared, depth int) {
	t.Helper()
	next := func(target string) (string, int, int) {
		if _, exists := chains[target]; !exists {
			return target, compared, depth
		}
		to, c, d := route(t, chains, target, counter)
		return to, compared + c, depth + d + 1
	}
	for _, rule := range chains[name] {
		fields := strings.Fields(rule)
		target := fields[len(fields)-1]
		if len(fields) == 2 {
			return next(target)
		}
		compared++
		if counter == nil {
			continue
		}
		operator, limit := fields[len(fields)-4], uint64(0)
		if strings.HasPrefix(operator, "--packets-") {
			var err error
			limit, err = strconv.ParseUint(fields[len(fields)-3], 10, 64)
			require.NoError(t, err)
		}
		n := uint64(*counter)
		if operator == "--packets-lt" && n < limit || operator == "--packets-eq" && n == limit ||
			!strings.HasPrefix(operator, "--packets-") {
			return next(target)
		}
	}
	return "", compared, depth
}

func randomLists(random *rand.Rand, count int) *dispatched {
	lists := map[netip.Prefix]listID{}
	for a := parseAddr("10.0.0.0"); len(lists) < count; a = a.Next() {
		lists[netip.PrefixFrom(a, 32)] = listID(random.Uint64())
	}
	return &dispatched{lists: listSet{name: "lists", lists: lists}, unlimited: map[listID]bool{}}
}

// TestDispatch evaluates the chains for sets of up to 20,000 lists. Each list is found with few comparisons, and an
// unknown one is dropped. The kernel permits 16 levels of calls, of which the other chains use 5.
func TestDispatch(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for count, most := range map[int]int{0: 0, 1: 1, 4: 4, 5: 6, 20: 10, 1000: 24, 20_000: 34} {
		set := randomLists(random, count)
		chains := dispatchChains(set, nil)
		total := 0
		for _, id := range set.lists.lists {
			to, compared, depth := route(t, chains, egressChain, &id)
			require.Equal(t, egressPrefix+id.String(), to)
			require.LessOrEqual(t, compared, most)
			require.LessOrEqual(t, depth, 16-5)
			total += compared
		}
		for _, id := range append(slices.Collect(maps.Values(set.lists.lists)), 0, 1<<63, 1<<64-1) {
			if unknown := id + 1; count > 0 {
				to, _, _ := route(t, chains, egressChain, &unknown)
				require.Equal(t, noRuleChain, to)
			}
		}
		delete(chains, egressChain)
		delete(chains, noRuleChain)
		ingress := chains[ingressChain]
		chains[ingressChain] = ingress[:len(ingress)-1] // the rule for packets with the mark toPort
		to, compared, _ := route(t, chains, ingressChain, nil)
		require.Empty(t, to, "an address without a list")
		require.LessOrEqual(t, compared, maxLeaf+1)
		t.Logf("%d lists: %d chains, %.1f comparisons", count, len(chains), float64(total)/float64(max(count, 1)))
	}
}

// TestSeparate looks up addresses at the borders of prefixes in the result of separate. An address must have the list
// of the longest prefix of the argument that contains it, and not two lists.
func TestSeparate(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		lists := map[netip.Prefix]groupList{}
		for range 1 + random.IntN(8) {
			a := netip.AddrFrom4([4]byte{10, 0, byte(random.IntN(4)), byte(random.IntN(256))})
			lists[netip.PrefixFrom(a, 1+random.IntN(32)).Masked()] = newGroupList([]cloud.SecurityGroupID{
				cloud.SecurityGroupID(fmt.Sprint(random.IntN(3))),
			})
		}
		got := separate(lists)
		addresses := map[netip.Addr]bool{parseAddr("0.0.0.0"): true, parseAddr("255.255.255.255"): true}
		for p := range lists {
			for _, a := range []netip.Addr{p.Addr(), p.Addr().Prev(), cloud.Last(p), cloud.Last(p).Next()} {
				addresses[a] = a.IsValid()
			}
		}
		for a := range addresses {
			longest, want := -1, groupList(nil)
			found := map[string]bool{}
			for p, list := range lists {
				if p.Contains(a) && p.Bits() > longest {
					longest, want = p.Bits(), list
				}
			}
			for p, list := range got {
				if p.Contains(a) {
					found[fmt.Sprint(list)] = true
				}
			}
			if longest < 0 {
				require.Empty(t, found, "%v in %v", a, lists)
				continue
			}
			require.Equal(t, map[string]bool{fmt.Sprint(want): true}, found, "%v in %v", a, lists)
		}
	}
}

// TestUnlimitedLists checks that ranges whose lists permit all egress are not divided, and that limited lists are found
// among unlimited ones.
func TestUnlimitedLists(t *testing.T) {
	set := randomLists(rand.New(rand.NewPCG(7, 8)), 1000)
	ids := slices.Sorted(maps.Values(set.lists.lists))
	for _, id := range ids {
		set.unlimited[id] = true
	}
	for _, id := range ids {
		to, compared, _ := route(t, dispatchChains(set, nil), egressChain, &id)
		require.Equal(t, "RETURN", to)
		require.Equal(t, 1, compared)
	}
	limited := map[listID]bool{ids[0]: true, ids[500]: true, ids[501]: true, ids[999]: true}
	for id := range limited {
		delete(set.unlimited, id)
	}
	chains := dispatchChains(set, nil)
	for _, id := range ids {
		want := map[bool]string{false: "RETURN", true: egressPrefix + id.String()}[limited[id]]
		to, _, _ := route(t, chains, egressChain, &id)
		require.Equal(t, want, to)
		to, _, _ = route(t, chains, ingressChain, &id)
		require.Equal(t, ingressPrefix+id.String(), to)
	}
}

// TestListsOfTheLastCallStay checks which chains the table keeps while elements of the set still have the lists of the
// last call. It keeps the chains of a list if an address changes from this list to another one, or if the list limits
// the egress of an address that is removed.
func TestListsOfTheLastCallStay(t *testing.T) {
	changed, removed := netip.MustParsePrefix("10.0.0.5/32"), netip.MustParsePrefix("10.0.0.6/32")
	const before, open, after listID = 1 << 62, 2 << 62, 3 << 62
	want := newTable(map[string][]string{}, dispatched{
		lists:     listSet{name: "lists", lists: map[netip.Prefix]listID{changed: after}},
		unlimited: map[listID]bool{after: true},
	})
	rules := func(id listID, limited bool) map[string][]string {
		chains := map[string][]string{ingressPrefix + id.String(): {"-j " + noRuleChain}}
		if limited {
			chains[egressPrefix+id.String()] = []string{"-j " + noRuleChain}
		}
		return chains
	}
	for _, c := range []struct {
		name   string
		have   map[netip.Prefix]listID
		kernel map[string][]string
		old    listID
		to     string // where egress with the old list goes; empty if no table is necessary
	}{
		{"unchanged", map[netip.Prefix]listID{changed: after}, rules(after, false), after, ""},
		{"a limited list", map[netip.Prefix]listID{changed: before}, rules(before, true), before,
			egressPrefix + before.String()},
		{"an unlimited list", map[netip.Prefix]listID{changed: open}, rules(open, false), open, "RETURN"},
		{"a limited address leaves", map[netip.Prefix]listID{changed: after, removed: before}, rules(before, true), before,
			egressPrefix + before.String()},
		{"an unlimited address leaves", map[netip.Prefix]listID{changed: after, removed: open}, rules(open, false), open,
			""},
		{"a list by hand", map[netip.Prefix]listID{changed: before}, rules(open, true), before, ""},
	} {
		between, necessary := want.withLists(c.have, kernelTable{chains: c.kernel})
		require.Equal(t, c.to != "", necessary, c.name)
		if !necessary {
			continue
		}
		chains := between.kernel().chains
		to, _, _ := route(t, chains, egressChain, &c.old)
		if to == noRuleChain { // the content of the kernel's chain
			require.Contains(t, chains, c.to, c.name)
		} else {
			require.Equal(t, c.to, to, c.name)
		}
		require.Contains(t, chains, ingressPrefix+c.old.String(), c.name)
	}
}

// TestNewListChangesFewChains adds a list to many and compares the chains.
func TestNewListChangesFewChains(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	set := randomLists(random, 1000)
	before := dispatchChains(set, nil)
	for range 100 {
		after, changed := dispatchChains(set, []listID{listID(random.Uint64())}), 0
		for name, rules := range after {
			if !slices.Equal(before[name], rules) {
				changed++
			}
		}
		for name := range before {
			if _, exists := after[name]; !exists {
				changed++
			}
		}
		require.LessOrEqual(t, changed, 2*5, "for both directions, a chain and its parts")
	}
}

// TestManyLists checks that packets are subject to the rules of their own port's groups if each of many ports has
// groups of its own, and that a packet to or from an address with an unknown list is dropped.
func TestManyLists(t *testing.T) {
	s := newCallStage(t)
	all := allowAll(cloud.Ingress, cloud.Egress)
	subnet := &s.vpc.Subnets[0]
	for i := range 40 {
		id := cloud.SecurityGroupID(fmt.Sprint("other", i))
		s.group(id, all...)
		subnet.Ports = append(subnet.Ports, cloud.HostPort{
			ID: cloud.PortID(id), Device: fmt.Sprint("other", i), MAC: cloud.MAC{2, 9, 0, 0, 0, byte(i)},
			IP: parseAddr(fmt.Sprint("10.0.0.", 100+i)), IP6: parseAddr(fmt.Sprint("fd00::", 100+i)),
			Secured: true, Groups: []cloud.SecurityGroupID{id},
		})
	}
	s.group("client", allowAll(cloud.Egress)...)
	var servers []*endpoint
	client := s.add(t, 0, 5, "client")
	for i := range 4 {
		id := cloud.SecurityGroupID(fmt.Sprint("server", i))
		ports := cloud.PortRange{First: uint16(i + 1), Last: uint16(i + 1)}
		s.group(id,
			cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolUDP, Ports: ports},
			cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolUDP, Ports: ports, IPv6: true})
		servers = append(servers, s.add(t, i%2, 6+i, id))
	}
	s.set(t)
	for i, server := range servers {
		for port := range servers {
			want := map[bool]string{true: "arrives", false: "group"}[i == port]
			for _, ipv6 := range []bool{false, true} {
				got := s.verdict(t, call{client, server, ipv6, udpTo(uint16(port + 1))})
				require.Equal(t, want, got, "server %d, port %d, IPv6 %t", i, port, ipv6)
			}
		}
		require.Equal(t, "group", s.verdict(t, call{server, client, false, udpTo(1)}), "no egress rule")
	}
	require.Equal(t, Result{}, s.set(t), "packets change no counter of an element")

	s.group("server0", all...)
	s.set(t)
	require.Equal(t, "arrives", s.verdict(t, call{client, servers[0], false, udpTo(77)}))
	own := newGroupList([]cloud.SecurityGroupID{"server0"}).id()
	for i, id := range []listID{0, own - 1, own + 1, 1<<64 - 2} {
		runIn(t, s.ns, "", "ipset", "-exist", "add", "trivet-lists4", servers[0].port.IP.String(),
			"packets", fmt.Sprint(uint64(id)))
		port := uint16(100 + i)
		require.Equal(t, "group", s.verdict(t, call{client, servers[0], false, udpTo(port)}), "list %s", id)
	}
	require.Equal(t, 1, s.set(t).Writes)
	require.Equal(t, "arrives", s.verdict(t, call{client, servers[0], false, udpTo(99)}))
}

// TestChangedListLosesNoFlow gives a port other groups, all of which permit a flow, while flows begin one after the
// other. No other port has the port's groups, so that the chains of its list are deleted each time.
func TestChangedListLosesNoFlow(t *testing.T) {
	l := newLab(t)
	client, server := l.add(t, 0, 5, "a"), l.add(t, 1, 6, "b")
	l.group("a", allowAll(cloud.Ingress, cloud.Egress)...)
	l.group("b", allowAll(cloud.Ingress, cloud.Egress)...)
	client.configure(t, l)
	server.configure(t, l)
	l.set(t)
	back := listenUDP(t, server, 5000, false)
	go func() {
		buffer := make([]byte, 100)
		for {
			n, from, err := back.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			_, _ = back.WriteToUDPAddrPort(buffer[:n], from)
		}
	}()
	flows := make([]*net.UDPConn, 4000)
	for i := range flows {
		flows[i] = listenUDP(t, client, uint16(10_000+i), false)
	}
	stop, result := make(chan struct{}), make(chan error, 1)
	go func() { result <- beginFlows(flows, back.LocalAddr().(*net.UDPAddr).AddrPort(), stop) }()
	for i := range 10 {
		l.change(server, func(p *cloud.HostPort) {
			p.Groups = []cloud.SecurityGroupID{"b", cloud.SecurityGroupID(fmt.Sprint(i))}
		})
		require.LessOrEqual(t, l.set(t).Restores, 4)
	}
	close(stop)
	require.NoError(t, <-result)
}

// beginFlows sends a datagram from one socket after the other until stop is closed, each after the answer to the
// previous one. It fails if an answer does not arrive.
func beginFlows(flows []*net.UDPConn, to netip.AddrPort, stop chan struct{}) error {
	buffer := make([]byte, 100)
	for i, flow := range flows {
		select {
		case <-stop:
			return nil
		case <-time.After(time.Millisecond): // the flows last for several changes
		}
		if _, err := flow.WriteToUDPAddrPort([]byte("datagram"), to); err != nil {
			return err
		}
		if err := flow.SetReadDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if _, err := flow.Read(buffer); err != nil {
			return fmt.Errorf("flow %d: its first datagram or the answer was lost: %w", i, err)
		}
	}
	return nil
}
