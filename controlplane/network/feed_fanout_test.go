package network

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// fill creates a VPC with a number of ports on a number of hosts, and returns the ports. Hosts are named h0, h1 and so
// on. The records have what hosts need, but not the records of addresses.
func (w *feedWorld) fill(portCount, hosts int) (out []cloud.PortID) {
	w.t.Helper()
	var vpc cloud.VPC
	w.update(func(tx *store.Tx) (err error) {
		for i := range hosts {
			host := cloud.HostNetwork{VTEP: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), UnderlayMTU: 1500}
			if err := SetHostNetwork(tx, cloud.NodeID(fmt.Sprintf("h%d", i)), host); err != nil {
				return err
			}
		}
		vpc, err = createVPC(tx, acme, VPCRequest{CIDR: netip.MustParsePrefix("10.0.0.0/8")})
		return err
	})
	for len(out) < portCount {
		w.update(func(tx *store.Tx) error {
			for n := 0; n < 1000 && len(out) < portCount; n++ {
				id := cloud.PortID(fmt.Sprintf("port-%05d", len(out)))
				ports.Put(tx, &cloud.Port{
					ID: id, Project: acme.Project, VPC: vpc.ID, Node: cloud.NodeID(fmt.Sprintf("h%d", len(out)%hosts)),
					IP: netip.AddrFrom4([4]byte{10, 1, byte(len(out) >> 8), byte(len(out))}), Status: cloud.NetworkPending,
					BindingGeneration: 1,
				}, string(acme.Project), string(id))
				out = append(out, id)
			}
			return nil
		})
	}
	return out
}

// TestFeedFanOut adds a port to a VPC with 10,000 ports (fewer with the race detector) on 50 hosts. Each host gets at most one message with one port,
// and the number of records that the feed reads does not depend on the number of ports.
func TestFeedFanOut(t *testing.T) {
	const hosts, portCount = 50, fanOutPorts
	w := newFeedWorld(t)
	all := w.fill(portCount, hosts)
	for i := range hosts {
		w.connect(cloud.NodeID(fmt.Sprintf("h%d", i)), fmt.Sprintf("192.0.2.%d", i+1))
	}
	w.settle()
	for _, a := range w.agents {
		require.GreaterOrEqual(t, len(a.state), portCount+1)
		a.log = nil
	}
	before := w.feed.reads.Load()
	vpc := cloud.VPCID(vpcOf(w.agents["h0"].state[string(all[0])]))
	revision, err := w.store.Update(t.Context(), func(tx *store.Tx) error {
		ports.Put(tx, &cloud.Port{
			ID: "new", Project: acme.Project, VPC: vpc, Node: "h3", IP: netip.MustParseAddr("10.9.0.1"), Status: cloud.NetworkPending,
		}, string(acme.Project), "new")
		return nil
	})
	require.NoError(t, err)
	messages := 0
	for node, a := range w.agents {
		a.receive(revision)
		for _, m := range a.log {
			messages++
			require.Len(t, recordsOf(m), 1, node)
			require.Equal(t, "new", m.GetPorts()[0].GetPort().GetId())
		}
	}
	require.LessOrEqual(t, messages, hosts)
	require.LessOrEqual(t, w.feed.reads.Load()-before, int64(hosts+1), "the feed reads other records than the new port")
}

// TestFeedActivatesInBatches acknowledges a snapshot with more pending ports than one transaction changes.
func TestFeedActivatesInBatches(t *testing.T) {
	w := newFeedWorld(t)
	w.fill(2*maxAcknowledged+1, 1)
	a := w.connect("h0", "192.0.2.1")
	w.settle()
	require.Greater(t, len(a.log), 1, "the snapshot is one message")
	for _, m := range a.log[:len(a.log)-1] {
		if m.GetRevision() == a.log[0].GetRevision() && len(m.GetPorts()) == maxMessagePorts {
			require.False(t, m.GetComplete())
		}
	}
	before := w.quorum.Committed.Load()
	a.acknowledge(a.revision)
	require.Equal(t, int64(3), w.quorum.Committed.Load()-before)
	require.Equal(t, int64(2*maxAcknowledged+1), a.charged.Load())
	require.NoError(t, w.store.View(t.Context(), func(v *store.View) error {
		all, _, err := ports.List(v, 0)
		for _, r := range all {
			require.Equal(t, cloud.NetworkActive, r.Value.Status)
		}
		return err
	}))
	// The change of the status is not sent.
	a.log = nil
	w.settle()
	require.Empty(t, a.show(nil))
}

// TestFeedSlowReader changes more records than a session may have unsent while its host reads nothing.
func TestFeedSlowReader(t *testing.T) {
	w := newFeedWorld(t)
	w.fill(1, 1)
	a := w.connect("h0", "192.0.2.1")
	w.settle()
	vpc := cloud.VPCID(vpcOf(a.state["port-00000"]))
	s := w.session("h0")
	w.feed.mu.Lock()
	before := w.feed.index.entries[recordKey{feedPort, acme.Project, "port-00000"}].hash
	w.feed.mu.Unlock()
	// The session takes this change to send it, and then waits for the host.
	w.change("port-00000", func(p *cloud.Port) { p.Mbps = 7 })
	require.Eventually(t, func() bool {
		w.feed.mu.Lock()
		defer w.feed.mu.Unlock()
		return w.feed.index.entries[recordKey{feedPort, acme.Project, "port-00000"}].hash != before && len(s.unsent) == 0
	}, patience, time.Millisecond)
	for first := 0; first <= maxUnsent; first += 1000 {
		w.update(func(tx *store.Tx) error {
			for i := first; i < first+1000; i++ {
				id := fmt.Sprintf("more-%05d", i)
				ports.Put(tx, &cloud.Port{ID: cloud.PortID(id), Project: acme.Project, VPC: vpc}, string(acme.Project), id)
			}
			return nil
		})
	}
	select {
	case err := <-a.ended:
		require.True(t, fault.Is(err, fault.OutOfRange), "%v", err)
	case <-time.After(patience):
		t.Fatal("the stream of a host that reads nothing does not end")
	}
	again := w.connect("h0", "192.0.2.1")
	w.settle()
	require.Greater(t, len(again.state), maxUnsent)
}

// TestFeedRefusesRequests sends requests that the Feed must not accept.
func TestFeedRefusesRequests(t *testing.T) {
	w := newFeedWorld(t)
	a := w.connect("h0", "192.0.2.1")
	w.settle()
	a.acknowledge(a.revision + 1)
	require.ErrorContains(t, a.end(), "was not sent yet")
	delete(w.agents, "h0")
	require.ErrorContains(t, w.connect("h0", "host-1").end(), "host.vtep")
	_, err := hostNetworkFrom(nil)
	require.ErrorContains(t, err, "is required in the first message")
	_, err = hostNetworkFrom(&agentv1.HostNetwork{Missing: make([]string, maxHostTexts+1)})
	require.ErrorContains(t, err, "at most 64")
	_, err = hostNetworkFrom(&agentv1.HostNetwork{ExternalNetworks: []string{fmt.Sprintf("%257s", "x")}})
	require.ErrorContains(t, err, "at most 256 bytes")
}
