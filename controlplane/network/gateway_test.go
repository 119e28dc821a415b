package network

import (
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
	good := gatewayHost{usable: true, ready: true}
	withVPC, busy := gatewayHost{usable: true, ready: true, hasVPC: true}, gatewayHost{usable: true, ready: true, load: 2}
	lost := gatewayHost{usable: true, lost: true}
	unusable, unready := gatewayHost{ready: true}, gatewayHost{usable: true}
	type hosts = map[cloud.NodeID]gatewayHost
	none := "waits for a host: no host with the external network internet is connected"
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
			got := choosePlace(test.g, test.hosts)
			switch {
			case got.former != "":
				require.Contains(t, got.reason, "has the gateway no longer")
				got.reason = ""
			case got.node != "" && got.node != test.g.node:
				require.Contains(t, got.reason, "waits until host")
				got.reason = ""
			}
			require.Equal(t, test.want, got)
		})
	}
}

// createGateway creates a NAT gateway with an address of its own for the script of a feed, and the external network
// "internet" if there is none.
func (s *feedScript) createGateway(name, vpc string, isDefault bool) {
	s.update(func(tx *store.Tx) error {
		known, err := externals.Get(tx, "internet")
		if err != nil {
			return err
		}
		if known == nil {
			addr := netip.MustParseAddr
			externals.Put(tx, &cloud.ExternalNetwork{
				Name: "internet", CIDR: netip.MustParsePrefix("203.0.113.0/24"),
				Pools: []cloud.AddressRange{{First: addr("203.0.113.10"), Last: addr("203.0.113.99")}},
			}, "internet")
		}
		q := NATRequest{VPC: cloud.VPCID(s.ids[vpc]), External: "internet", OwnAddress: true, Default: isDefault}
		nat, err := createNAT(tx, acme, q)
		s.name(name, string(nat.ID))
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

// gateways returns the state of all NAT gateways, a line each.
func (s *feedScript) gateways() string {
	var lines []string
	require.NoError(s.t, s.store.View(s.t.Context(), func(v *store.View) error {
		all, _, err := natGateways.List(v, 0)
		for _, r := range all {
			n := r.Value
			line := s.names[string(n.ID)] + " node=" + string(n.Node)
			if n.Former != "" {
				line += " former=" + string(n.Former)
			}
			lines = append(lines, strings.TrimSpace(line+" "+statusText[n.Status]+" "+n.StatusReason))
		}
		return err
	}))
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
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
