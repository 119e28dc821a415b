package network

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// peer proposes a peering from vpc to the VPC with. If the peering exists, peer accepts it.
func (s *feedScript) peer(name, vpc, with string) {
	s.update(func(tx *store.Tx) error {
		if id, exists := s.ids[name]; exists {
			_, err := acceptPeering(tx, s.owners[with], cloud.PeeringID(id))
			return err
		}
		p, err := createPeering(tx, s.owners[vpc], PeeringRequest{
			VPC: cloud.VPCID(s.ids[vpc]), PeerVPC: cloud.VPCID(s.ids[with]), Peer: s.owners[with],
		})
		s.name(name, string(p.ID))
		return err
	})
}

func (s *feedScript) unpeer(name string) {
	s.update(func(tx *store.Tx) error {
		for _, owner := range []cloud.Tenant{acme, evil} {
			if p, err := peerings.Get(tx, string(owner.Project), s.ids[name]); err != nil || p != nil {
				_, err := deletePeering(tx, owner, cloud.PeeringID(s.ids[name]))
				return err
			}
		}
		return fmt.Errorf("no peering %s", name)
	})
	delete(s.ids, name)
}

// togglePeering deletes the peering of the VPCs vn and vn+1, or creates it.
func (s *feedScript) togglePeering(n int) {
	name := fmt.Sprint("peering", n)
	if s.ids[name] != "" {
		s.unpeer(name)
	} else {
		s.peer(name, fmt.Sprint("v", n), fmt.Sprint("v", (n+1)%3))
	}
}

// TestFeedPeeringFanOut counts the messages and reads that a new port costs if its VPC has a peering. Each host of one
// of the two VPCs gets one message with the port, and the feed reads the port once for each host.
func TestFeedPeeringFanOut(t *testing.T) {
	const hosts = 5
	s := newFeedScript(t)
	for i, vpc := range []string{"a", "b", "c"} {
		s.createVPCOf(acme, vpc, fmt.Sprintf("10.%d.0.0/16", i))
	}
	for i := range 3 * hosts {
		name := fmt.Sprint("p", i)
		s.createPort(name, string("abc"[i%3]))
		node := cloud.NodeID(fmt.Sprint("h", i))
		s.connect(node, fmt.Sprintf("192.0.2.%d", i+1))
		s.bind(cloud.PortID(s.ids[name]), node)
	}
	s.peer("ab", "a", "b")
	s.peer("bc", "b", "c")
	s.settle()
	for _, a := range s.agents {
		a.log = nil
	}
	before := s.feed.reads.Load()
	s.createPort("new", "a")
	s.settle()
	got := map[string]int{}
	for i := range 3 * hosts {
		for _, m := range s.agents[cloud.NodeID(fmt.Sprint("h", i))].log {
			got[string("abc"[i%3])] += len(recordsOf(m))
		}
	}
	require.Equal(t, map[string]int{"a": hosts, "b": hosts, "c": 0}, got, "records by the VPC of the host's port")
	require.LessOrEqual(t, s.feed.reads.Load()-before, int64(2*hosts+1))
}
