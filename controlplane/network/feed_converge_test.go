package network

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestFeedConverges makes random changes while hosts are connected. In the end the state that each host has built from
// its messages must be the one that a new stream of the host begins with.
func TestFeedConverges(t *testing.T) {
	for seed := range uint64(5) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := newFeedScript(t)
		hosts := []cloud.NodeID{"h0", "h1", "h2"}
		for i, node := range hosts {
			s.connect(node, fmt.Sprintf("192.0.2.%d", i+1))
		}
		var all []cloud.PortID
		for i := range 3 {
			s.createVPCOf(acme, fmt.Sprint("v", i), fmt.Sprintf("10.%d.0.0/16", i))
			for n := range 3 {
				name := fmt.Sprintf("p%d-%d", i, n)
				s.createPort(name, fmt.Sprint("v", i))
				all = append(all, cloud.PortID(s.ids[name]))
			}
		}
		for range 60 {
			port := all[random.IntN(len(all))]
			switch random.IntN(8) {
			case 0:
				s.bind(port, "")
			case 1:
				s.change(port, func(p *cloud.Port) { p.Mbps++ })
			case 2:
				s.addRule()
			case 3:
				s.moveFloating("f", port)
			case 4, 5:
				s.togglePeering(random.IntN(3))
			default:
				s.bind(port, hosts[random.IntN(len(hosts))])
			}
			if random.IntN(8) == 0 {
				s.settle()
			}
		}
		s.update(func(tx *store.Tx) error { // a host gets another underlay address
			return SetHostNetwork(tx, "h1", cloud.HostNetwork{UnderlayMTU: 1500})
		})
		s.settle()
		for i, node := range hosts {
			former := s.agents[node]
			if node == "h1" {
				continue // its new stream sets the address again
			}
			now := s.connect(node, fmt.Sprintf("192.0.2.%d", i+1))
			require.ErrorIs(t, former.end(), errNewerStream)
			s.settle()
			require.Equal(t, slices.Sorted(maps.Keys(now.state)), slices.Sorted(maps.Keys(former.state)), "seed %d, %s", seed, node)
			for id, r := range now.state {
				require.True(t, proto.Equal(r, former.state[id]), "seed %d, %s: %v, not %v", seed, node, former.state[id], r)
			}
		}
	}
}

// TestFeedOfVPCNeededAgain checks that a host whose need of a VPC ends and begins again between two messages has no
// record that was deleted meanwhile.
func TestFeedOfVPCNeededAgain(t *testing.T) {
	s := newFeedScript(t)
	agent := s.connect("h1", "192.0.2.1")
	s.createVPC("v")
	for _, name := range []string{"first", "other", "second"} {
		s.createPort(name, "v")
	}
	id := func(name string) cloud.PortID { return cloud.PortID(s.ids[name]) }
	s.bind(id("first"), "h1")
	s.settle()
	require.Contains(t, agent.state, s.ids["other"])

	s.bindMany(map[cloud.PortID]cloud.NodeID{id("first"): ""}, id("other"), map[cloud.PortID]cloud.NodeID{id("second"): "h1"})
	s.settle()
	require.Contains(t, agent.state, s.ids["second"])
	require.NotContains(t, agent.state, s.ids["other"])
}

// bindMany binds ports to hosts, deletes a port and binds further ports, faster than the feed sends messages.
func (w *feedWorld) bindMany(before map[cloud.PortID]cloud.NodeID, deleted cloud.PortID, after map[cloud.PortID]cloud.NodeID) {
	w.t.Helper()
	for id, node := range before {
		w.bind(id, node)
	}
	w.update(func(tx *store.Tx) error {
		p, err := find(tx, ports, kindPort, acme, string(deleted))
		if err != nil {
			return err
		}
		return removePort(tx, acme, p)
	})
	for id, node := range after {
		w.bind(id, node)
	}
}
