package network

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// newEncryptionScript makes four hosts, of which h1, h2 and h3 encrypt. The VPC v has ports on h1, h2 and h4, and the
// VPC w has a port on h3 and the port w1 without a host.
func newEncryptionScript(t *testing.T) *feedScript {
	s := newFeedScript(t)
	s.instances = map[cloud.NodeID]string{"h1": "boot-1", "h2": "boot-2", "h3": "boot-3"}
	for _, name := range []string{"v", "w"} {
		s.createVPC(name)
	}
	for _, p := range []struct{ name, vpc, node string }{
		{"v1", "v", "h1"}, {"v2", "v", "h2"}, {"v4", "v", "h4"}, {"w3", "w", "h3"}, {"w1", "w", ""},
	} {
		s.createPort(p.name, p.vpc)
		if p.node != "" {
			s.bind(cloud.PortID(s.ids[p.name]), cloud.NodeID(p.node))
		}
	}
	for _, n := range []string{"1", "2", "3", "4"} {
		s.connect(cloud.NodeID("h"+n), "192.0.2."+n)
	}
	s.settle()
	return s
}

// peers returns the addresses of a host's peers.
func (s *feedScript) peers(node cloud.NodeID) (vteps []string) {
	for _, p := range s.agents[node].encryption.GetPeers() {
		vteps = append(vteps, p.GetVtep())
	}
	return vteps
}

// keys returns the states of the i-th peer of a host.
func (s *feedScript) keys(node cloud.NodeID, i int) *agentv1.EncryptedPeer {
	return s.agents[node].encryption.GetPeers()[i]
}

// requireConnected checks that each of two hosts, whose i-th and j-th peers are the other, can receive what the other
// one sends.
func (s *feedScript) requireConnected(a cloud.NodeID, i int, b cloud.NodeID, j int) {
	s.t.Helper()
	toB, toA := s.keys(a, i), s.keys(b, j)
	require.True(s.t, accepts(toA.GetReceive(), toB.GetSend()), "%s does not accept what %s sends", b, a)
	require.True(s.t, accepts(toB.GetReceive(), toA.GetSend()), "%s does not accept what %s sends", a, b)
	require.NotEqual(s.t, toB.GetSend().GetKey(), toA.GetSend().GetKey(), "each direction has a key of its own")
}

func accepts(receive []*agentv1.EspState, sent *agentv1.EspState) bool {
	for _, r := range receive {
		if r.GetSpi() == sent.GetSpi() && bytes.Equal(r.GetKey(), sent.GetKey()) {
			return true
		}
	}
	return false
}

// TestEncryptionKeys checks that each host that encrypts gets the keys of its pairs with hosts that encrypt and share a
// VPC with it, and no others; that the list follows the ports; and that a restarted host gets other keys.
func TestEncryptionKeys(t *testing.T) {
	s := newEncryptionScript(t)
	require.Equal(t, []string{"192.0.2.2"}, s.peers("h1"))
	require.Equal(t, []string{"192.0.2.1"}, s.peers("h2"))
	require.NotNil(t, s.agents["h3"].encryption)
	require.Empty(t, s.peers("h3"))
	require.Nil(t, s.agents["h4"].encryption, "a host that does not encrypt gets no keys")
	s.requireConnected("h1", 0, "h2", 0)

	s.bind(cloud.PortID(s.ids["w1"]), "h1")
	s.settle()
	require.Equal(t, []string{"192.0.2.2", "192.0.2.3"}, s.peers("h1"))
	require.Equal(t, []string{"192.0.2.1"}, s.peers("h3"))
	require.Equal(t, []string{"192.0.2.1"}, s.peers("h2"))
	s.requireConnected("h1", 1, "h3", 0)
	spis, keys := map[uint32]bool{}, map[string]bool{}
	for i := range 2 {
		for _, r := range s.keys("h1", i).GetReceive() {
			require.GreaterOrEqual(t, r.GetSpi(), uint32(256))
			spis[r.GetSpi()], keys[string(r.GetKey())] = true, true
			require.Len(t, r.GetKey(), len(cloud.ESPKey{}))
		}
	}
	require.Len(t, spis, 6, "the SPI identifies the sender and the epoch")
	require.Len(t, keys, 6)

	s.agents["h2"].encryption = nil
	s.bind(cloud.PortID(s.ids["w1"]), "h2")
	s.settle()
	require.Equal(t, []string{"192.0.2.2"}, s.peers("h1"))
	require.Equal(t, []string{"192.0.2.2"}, s.peers("h3"))
	require.Equal(t, []string{"192.0.2.1", "192.0.2.3"}, s.peers("h2"))

	before := s.keys("h1", 0)
	s.instances["h2"] = "boot-4"
	s.connect("h2", "192.0.2.2")
	s.settle()
	s.requireConnected("h1", 0, "h2", 0)
	after := s.keys("h1", 0)
	require.False(t, accepts(after.GetReceive(), before.GetReceive()[1]), "the key of the former instance is used")
	require.False(t, accepts([]*agentv1.EspState{after.GetSend()}, before.GetSend()), "the key of the former instance is used")

	delete(s.instances, "h2")
	s.connect("h2", "192.0.2.2")
	s.settle()
	require.Empty(t, s.peers("h1"), "h2 no longer encrypts")
	require.Nil(t, s.agents["h2"].encryption)
}

// TestEncryptionOfOneAddress checks that a host that reports the address of another host does not replace the keys of
// that host.
func TestEncryptionOfOneAddress(t *testing.T) {
	s := newEncryptionScript(t)
	before := s.agents["h1"].encryption.String()
	s.instances["a0"] = "boot-5" // the first host in the order of the names
	s.createPort("v5", "v")
	s.bind(cloud.PortID(s.ids["v5"]), "a0")
	s.connect("a0", "192.0.2.2")
	s.settle()
	require.Equal(t, []string{"192.0.2.2"}, s.peers("h1"))
	require.Equal(t, before, s.agents["h1"].encryption.String(), "the keys are those of the former host with the address")
}

// TestEncryptionWaitsForIndex checks that a stream gets no keys while the index still has a former instance of the
// host.
func TestEncryptionWaitsForIndex(t *testing.T) {
	x := newIndex()
	former := cloud.HostNetwork{VTEP: netip.MustParseAddr("192.0.2.1"), Encrypt: true, Instance: "boot-1", Number: 1}
	now := former
	now.Instance = "boot-2"
	x.setHost("h1", &former)
	s := &feedSession{node: "h1", host: now}
	require.Nil(t, s.takePeers(x))
	x.setHost("h1", &now)
	require.NotNil(t, s.takePeers(x))
	require.Nil(t, s.takePeers(x), "nothing has changed")
	off := &feedSession{node: "h1"}
	require.Nil(t, off.takePeers(x), "the host no longer encrypts")
}

// TestEncryptionSurvivesLeaderChange checks that a new leader sends the same keys.
func TestEncryptionSurvivesLeaderChange(t *testing.T) {
	s := newEncryptionScript(t)
	s.rotate(25*time.Hour, 1) // the first call records the first epoch
	before := s.keys("h1", 0)
	s.stop()
	s.lead()
	for node, vtep := range map[cloud.NodeID]string{"h1": "192.0.2.1", "h2": "192.0.2.2"} {
		s.connect(node, vtep)
	}
	delete(s.agents, "h3")
	delete(s.agents, "h4")
	s.settle()
	require.Equal(t, before.String(), s.keys("h1", 0).String())
	s.requireConnected("h1", 0, "h2", 0)
}

// rotate moves the clock, lets the leader rotate the keys, and checks the epoch afterwards.
func (s *feedScript) rotate(after time.Duration, epoch uint64) {
	s.t.Helper()
	s.clock.Advance(after)
	require.NoError(s.t, s.feed.RotateKeys(s.t.Context()))
	s.follow()
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	require.Equal(s.t, epoch, s.feed.index.epoch, "the keys are rotated before each host has received the former rotation")
}

// acknowledgeAll lets hosts receive and acknowledge everything.
func (s *feedScript) acknowledgeAll(nodes ...cloud.NodeID) {
	s.t.Helper()
	revision := s.settle()
	for _, node := range nodes {
		s.agents[node].acknowledge(revision)
	}
}

// TestKeyRotation checks that the keys are rotated daily, but only after all connected hosts have acknowledged the
// former rotation; that hosts with different epochs accept each other's packets; and that a host that is not connected
// delays the rotation for seven days at most.
func TestKeyRotation(t *testing.T) {
	s := newEncryptionScript(t)
	s.rotate(25*time.Hour, 1) // no host has acknowledged anything
	s.acknowledgeAll("h1", "h2", "h3")
	s.rotate(25*time.Hour, 1) // records the time of the first epoch
	s.acknowledgeAll("h1", "h2", "h3")
	s.rotate(23*time.Hour, 1)
	s.rotate(2*time.Hour, 2)

	// h1 has the new keys, h2 does not.
	former := s.agents["h2"].encryption
	s.settle()
	current := s.agents["h2"].encryption
	s.agents["h2"].encryption = former
	require.NotEqual(t, former.GetPeers()[0].GetSend().GetKey(), current.GetPeers()[0].GetSend().GetKey())
	s.requireConnected("h1", 0, "h2", 0)
	s.agents["h2"].encryption = current
	s.requireConnected("h1", 0, "h2", 0)

	s.acknowledgeAll("h1", "h3")
	s.rotate(25*time.Hour, 2) // h2 has not acknowledged
	s.acknowledgeAll("h1", "h2", "h3")
	s.rotate(time.Minute, 3)

	s.acknowledgeAll("h1", "h2", "h3")
	close(s.agents["h2"].requests)
	require.NoError(t, s.agents["h2"].end())
	delete(s.agents, "h2")
	s.rotate(6*24*time.Hour, 3)
	s.rotate(25*time.Hour, 4)

	// Without hosts that encrypt, there is nothing to rotate.
	s.update(func(tx *store.Tx) error {
		for _, node := range []cloud.NodeID{"h1", "h2", "h3"} {
			DeleteHostNetwork(tx, node)
		}
		return nil
	})
	s.rotate(8*24*time.Hour, 4)
}

// TestHostNumbers checks that hosts that encrypt get distinct numbers, which they keep.
func TestHostNumbers(t *testing.T) {
	w := newWorld(t)
	numbers := func() (out []uint32) {
		require.NoError(t, w.store.View(t.Context(), func(v *store.View) error {
			for _, node := range []cloud.NodeID{"h1", "h2", "h3"} {
				n, err := HostNetworkOf(v, node)
				require.NoError(t, err)
				out = append(out, n.Number)
			}
			return nil
		}))
		return out
	}
	on, off := cloud.HostNetwork{Encrypt: true, Instance: "a", Number: 77}, cloud.HostNetwork{}
	set := func(node cloud.NodeID, n cloud.HostNetwork) {
		t.Helper()
		w.update(func(tx *store.Tx) error { return SetHostNetwork(tx, node, n) })
	}
	set("h1", on)
	set("h2", off)
	set("h3", on)
	require.Equal(t, []uint32{1, 0, 2}, numbers())
	set("h2", on)
	set("h1", off)
	set("h1", on)
	require.Equal(t, []uint32{1, 3, 2}, numbers())
	before := w.store.Revision()
	set("h1", on)
	require.Equal(t, before, w.store.Revision(), "an equal report writes nothing")
	w.update(func(tx *store.Tx) error { DeleteHostNetwork(tx, "h1"); return nil })
	set("h1", on)
	require.Equal(t, []uint32{1, 3, 2}, numbers())
}
