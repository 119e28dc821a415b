package network

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestChoosePlace requires the rules in the comment of choosePlace.
func TestChoosePlace(t *testing.T) {
	type testHost struct {
		gatewayHost
		vpcs, load int
	}
	host := func(h gatewayHost) testHost { return testHost{gatewayHost: h} }
	good := host(gatewayHost{usable: true, ready: true})
	withVPC, busy := testHost{good.gatewayHost, 1, 0}, testHost{good.gatewayHost, 0, 2}
	lost := host(gatewayHost{usable: true, lost: true})
	unusable, unready := host(gatewayHost{ready: true}), host(gatewayHost{usable: true})
	type hosts = map[cloud.NodeID]testHost
	none := "no host with the external network internet is connected"
	for _, test := range []struct {
		name  string
		g     gateway
		hosts hosts
		want  place
	}{
		{"no host", gateway{}, hosts{}, place{reason: none}},
		{"no usable host", gateway{}, hosts{"a": unusable, "b": unready, "c": lost}, place{reason: none}},
		{"first host", gateway{}, hosts{"a": good, "b": good}, place{node: "a"}},
		{"host with the VPC", gateway{}, hosts{"a": good, "b": withVPC}, place{node: "b"}},
		{"host with fewer gateways", gateway{}, hosts{"a": busy, "b": good}, place{node: "b"}},
		{"stays", gateway{node: "a", reason: "r"}, hosts{"a": good, "b": withVPC}, place{node: "a", reason: "r"}},
		{"stays on a host that is not ready", gateway{node: "a"}, hosts{"a": unready, "b": good}, place{node: "a"}},
		{"leaves a lost host", gateway{node: "a"}, hosts{"a": lost, "b": good}, place{node: "b"}},
		{"leaves a removed host", gateway{node: "a"}, hosts{"b": good}, place{node: "b"}},
		{"no other than a lost host", gateway{node: "a"}, hosts{"a": lost, "b": unusable}, place{node: "a"}},
		{"no other than a removed host", gateway{node: "a"}, hosts{"b": unusable}, place{reason: none}},
		{"asks a host without the external network", gateway{node: "a"}, hosts{"a": unusable, "b": good}, place{former: "a"}},
		{"asks it also without another host", gateway{node: "a"}, hosts{"a": unusable}, place{former: "a"}},
		{"waits for the former host", gateway{former: "a"}, hosts{"a": unusable, "b": good}, place{former: "a"}},
		{"does not wait for a lost former host", gateway{former: "a"}, hosts{"a": lost, "b": good}, place{node: "b"}},
		{"does not wait for a removed former host", gateway{former: "a"}, hosts{"b": good}, place{node: "b"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.g.external = "internet"
			pool, vpcs := newHostPool(map[cloud.NodeID]int{}), map[cloud.NodeID]int{}
			for id, h := range test.hosts {
				if h.usable && h.ready && !h.lost {
					pool.add(id)
				}
				if h.vpcs > 0 {
					vpcs[id] = h.vpcs
				}
			}
			for id, h := range test.hosts { // the hosts get gateways after they were added
				pool.loads[id] = h.load
			}
			got := choosePlace(test.g, func(id cloud.NodeID) (gatewayHost, bool) {
				h, known := test.hosts[id]
				return h.gatewayHost, known
			}, func() cloud.NodeID { return pool.best(vpcs, test.g.node) })
			switch {
			case got.former != "":
				require.Contains(t, got.reason, "has withdrawn the address")
				got.reason = ""
			case got.node != "" && got.node != test.g.node:
				require.Contains(t, got.reason, "has not confirmed yet")
				got.reason = ""
			}
			require.Equal(t, test.want, got)
		})
	}
}

// TestHostPool requires that a pool finds the same host as a search over all hosts, also while hosts get gateways.
func TestHostPool(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		loads, vpcs := map[cloud.NodeID]int{}, map[cloud.NodeID]int{}
		pool := newHostPool(loads)
		var all []cloud.NodeID
		for i := range 1 + rng.IntN(8) {
			id := cloud.NodeID(fmt.Sprint(i))
			loads[id] = rng.IntN(4)
			if rng.IntN(4) > 0 {
				pool.add(id)
				all = append(all, id)
			}
			if rng.IntN(6) == 0 {
				vpcs[id] = 1
			}
		}
		for range 20 {
			from := cloud.NodeID(fmt.Sprint(rng.IntN(9)))
			candidates := slices.DeleteFunc(slices.Clone(all), func(id cloud.NodeID) bool { return id == from })
			want := cloud.NodeID("")
			if len(candidates) > 0 {
				want = slices.MinFunc(candidates, func(a, b cloud.NodeID) int {
					return cmp.Or(vpcs[b]-vpcs[a], loads[a]-loads[b], cmp.Compare(a, b))
				})
			}
			got := pool.best(vpcs, from)
			require.Equal(t, want, got)
			loads[got]++
		}
	}
}

// createGateway creates a NAT gateway with an address of its own for the script of a feed, and the external network
// "internet" if there is none.
func (s *feedScript) createGateway(name, vpc string, isDefault bool) {
	s.update(func(tx *store.Tx) error {
		if err := ensureInternet(tx); err != nil {
			return err
		}
		q := NATRequest{VPC: cloud.VPCID(s.ids[vpc]), External: "internet", OwnAddress: true, Default: isDefault}
		nat, err := createNAT(tx, acme, q)
		s.name(name, string(nat.ID))
		return err
	})
}

// ensureInternet creates the external network "internet" unless it exists.
func ensureInternet(tx *store.Tx) error {
	known, err := externals.Get(tx, "internet")
	if err != nil || known != nil {
		return err
	}
	addr := netip.MustParseAddr
	externals.Put(tx, &cloud.ExternalNetwork{
		Name: "internet", CIDR: netip.MustParsePrefix("203.0.113.0/24"),
		Pools: []cloud.AddressRange{{First: addr("203.0.113.10"), Last: addr("203.0.113.99")}},
	}, "internet")
	return nil
}

// createService creates a service IP for the script of a feed.
func (s *feedScript) createService(name, vpc string) {
	s.update(func(tx *store.Tx) error {
		out, err := createService(tx, acme, ServiceRequest{
			Subnet: cloud.SubnetID(s.ids[vpc+"-subnet"]), Service: cloud.ServiceIP{
				Affinity: cloud.AffinityNone, Ports: []cloud.ServicePort{{Protocol: cloud.ProtocolTCP, Port: 80, Target: 80}},
			},
		})
		s.name(name, string(out.ID))
		s.name(name+"-port", string(out.Port))
		return err
	})
}

// attach attaches a floating IP to a port or service IP, or detaches it. It creates a floating IP whose name is new.
func (s *feedScript) attach(name string, port cloud.PortID, service cloud.ServiceIPID) {
	s.update(func(tx *store.Tx) error {
		if id := s.ids[name]; id != "" {
			_, err := updateFloating(tx, acme, FloatingUpdate{ID: cloud.FloatingIPID(id), Port: &port, ServiceIP: &service})
			return err
		}
		if err := ensureInternet(tx); err != nil {
			return err
		}
		f, err := createFloating(tx, acme, FloatingRequest{External: "internet", Port: port, ServiceIP: service})
		s.name(name, string(f.ID))
		return err
	})
}

// assign runs AssignGateways until it changes nothing. Hosts that are connected are READY; those in lost send no
// heartbeats.
func (s *feedScript) assign(lost string) {
	var states []HostState
	for id := range s.agents {
		states = append(states, HostState{ID: id, State: cloud.NodeReady})
	}
	for id := range strings.SplitSeq(lost, ",") {
		states = append(states, HostState{ID: cloud.NodeID(id), State: cloud.NodeNotReady, Unresponsive: true})
	}
	s.follow()
	require.NoError(s.t, s.feed.AssignGateways(s.t.Context(), states))
	s.follow()
	before := s.gateways()
	require.NoError(s.t, s.feed.AssignGateways(s.t.Context(), states))
	require.Equal(s.t, before, s.gateways(), "a second assignment must change nothing")
}

// gateways returns the state of all NAT gateways and floating IPs, a line each.
func (s *feedScript) gateways() string {
	var lines []string
	add := func(id string, p cloud.Placement, status cloud.NetworkStatus, reason string) {
		line := s.names[id] + " node=" + string(p.Node)
		if p.Former != "" {
			line += " former=" + string(p.Former)
		}
		lines = append(lines, strings.TrimSpace(line+" "+statusText[status]+" "+reason))
	}
	require.NoError(s.t, s.store.View(s.t.Context(), func(v *store.View) error {
		all, _, err := natGateways.List(v, 0)
		if err != nil {
			return err
		}
		for _, r := range all {
			add(string(r.Value.ID), r.Value.Placement, r.Value.Status, r.Value.StatusReason)
		}
		floating, _, err := floatingIPs.List(v, 0)
		for _, r := range floating {
			add(string(r.Value.ID), r.Value.Placement, r.Value.Status, r.Value.StatusReason)
		}
		return err
	}))
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

// TestReleasedPort requires that the floating IP of a port has the port's host, also after a VM has released the port.
func TestReleasedPort(t *testing.T) {
	s := newFeedScript(t)
	s.createVPC("v")
	s.createPort("p", "v")
	s.attach("f", cloud.PortID(s.ids["p"]), "")
	change := func(change func(*store.Tx, *cloud.Port) error) cloud.NodeID {
		s.update(func(tx *store.Tx) error {
			p, err := find(tx, ports, kindPort, acme, s.ids["p"])
			if err != nil {
				return err
			}
			return change(tx, p)
		})
		f, err := s.networks.GetFloatingIP(s.as(acme, ""), acme, cloud.FloatingIPID(s.ids["f"]))
		require.NoError(t, err)
		require.Equal(t, cloud.NetworkPending, f.Status)
		return f.Node
	}
	require.Equal(t, cloud.NodeID("h1"), change(func(tx *store.Tx, p *cloud.Port) error { return BindNIC(tx, p, "h1", "web") }))
	require.Empty(t, change(func(tx *store.Tx, p *cloud.Port) error { return ReleaseNIC(tx, acme, p) }))
}

// TestUpdateNATGateway requires that a gateway without an address of its own is on one host only while it is not the
// default, and that a VPC has at most one default gateway.
func TestUpdateNATGateway(t *testing.T) {
	s := newFeedScript(t)
	s.createVPC("v")
	s.createGateway("own", "v", true)
	find := func(id string) *cloud.NATGateway {
		n, err := s.networks.GetNATGateway(s.as(acme, ""), acme, cloud.NATGatewayID(id))
		require.NoError(t, err)
		return n
	}
	change := func(id string, isDefault bool) error {
		_, err := s.networks.UpdateNATGateway(s.as(acme, ""), acme, NATUpdate{ID: cloud.NATGatewayID(id), Default: &isDefault}, [32]byte{})
		return err
	}
	plain, err := s.networks.CreateNATGateway(s.as(acme, ""), acme, NATRequest{VPC: cloud.VPCID(s.ids["v"]), External: "internet"}, [32]byte{})
	require.NoError(t, err)
	id := string(plain.Value.ID)
	require.Equal(t, cloud.NetworkPending, plain.Value.Status)
	s.externals = []string{"internet"}
	s.connect("h1", "192.0.2.1")
	s.assign("")
	require.Equal(t, cloud.NodeID("h1"), find(id).Node)
	require.ErrorContains(t, change(id, true), "is the default of")
	require.NoError(t, change(s.ids["own"], false))
	require.Equal(t, cloud.NodeID("h1"), find(s.ids["own"]).Node, "a gateway with an address stays on its host")
	require.NoError(t, change(id, true))
	require.Equal(t, cloud.NodeID(""), find(id).Node)
	require.Equal(t, cloud.NetworkActive, find(id).Status)
	require.NoError(t, change(id, false))
	require.Equal(t, cloud.NetworkPending, find(id).Status)
	s.assign("")
	require.Equal(t, uint64(2), find(id).BindingGeneration)
}
