package uplink

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestNetworkAssembly runs the scripts in testdata/networks. `stream term=` begins a stream of a session whose watch has
// seen the term. `message term= rev= deleted= complete` adds a message and prints the update that it completes.
func TestNetworkAssembly(t *testing.T) {
	datadriven.Walk(t, "testdata/networks", func(t *testing.T, path string) {
		var a networkAssembly
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			m := agentv1.SyncNetworksResponse{Complete: d.HasArg("complete")}
			d.ScanArgs(t, "term", &m.Term)
			if d.Cmd == "stream" {
				a.begin("n1", m.Term)
				return ""
			}
			d.ScanArgs(t, "rev", &m.Revision)
			d.MaybeScanArgs(t, "deleted", &m.Deleted)
			u, err := a.add(&m)
			switch {
			case err != nil:
				return "refused: " + err.Error()
			case u == nil:
				return "nothing new"
			}
			out := fmt.Sprintf("stream %d revision %d", u.Stream, u.Revision)
			if u.Snapshot {
				out += " snapshot"
			}
			return strings.TrimSpace(out + ": " + strings.Join(u.Deleted, " "))
		})
	})
}

// updates is a Networks that passes on the updates.
type updates chan cloud.NetworkUpdate

func (u updates) Apply(one cloud.NetworkUpdate) { u <- one }

// TestNetworks follows the networks of a host through two sessions: the snapshot, an acknowledgment with a failure, a
// change, and the next snapshot after the connection was lost.
func TestNetworks(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	got := make(updates, 100)
	a := open(t, t.TempDir(), func(o *Options) {
		o.Networks, o.HostNetwork = got, &agentv1.HostNetwork{Vtep: "192.0.2.1", UnderlayMtu: 1500}
	}, m).run(t)
	next(t, m.watches)
	m.send <- snapshot(2, 5, "a")
	first := next(t, m.hosts)
	require.EqualValues(t, Protocol, first.GetProtocol())
	require.Equal(t, "192.0.2.1", first.GetHost().GetVtep())

	const id = "0190a6b2-0000-7000-8000-000000000001"
	m.networks <- &agentv1.SyncNetworksResponse{Term: 2, Revision: 5, Vpcs: []*agentv1.HostVpc{{
		Vpc: &networkv1.Vpc{Id: id, CidrBlock: "10.0.0.0/16", Mtu: 1450},
	}}}
	m.networks <- &agentv1.SyncNetworksResponse{Term: 2, Revision: 6, Complete: true}
	u := next(t, got)
	require.True(t, u.Snapshot)
	require.EqualValues(t, "n1", u.Node)
	require.EqualValues(t, 6, u.Revision)
	require.EqualValues(t, id, u.VPCs[0].ID)

	a.AcknowledgeNetworks(cloud.NetworkAck{Stream: u.Stream, Revision: 6, Failures: []cloud.VPCFailure{{VPC: id, Error: "no bridge"}}})
	ack := next(t, m.hosts)
	require.EqualValues(t, 6, ack.GetAppliedRevision())
	require.Equal(t, "no bridge", ack.GetFailures()[0].GetError())
	a.ReportBackends([]cloud.BackendHealth{
		{VPC: id, Service: id, Port: id, Healthy: true}, {VPC: id, Service: id, Address: netip.MustParseAddr("10.0.1.9")},
	})
	report := next(t, m.hosts)
	require.EqualValues(t, 6, report.GetAppliedRevision())
	require.Equal(t, "no bridge", report.GetFailures()[0].GetError(), "a report does not withdraw the failures")
	require.Len(t, report.GetBackendHealth(), 2)
	require.Equal(t, id, report.GetBackendHealth()[0].GetPortId())
	require.True(t, report.GetBackendHealth()[0].GetHealthy())
	require.Equal(t, "10.0.1.9", report.GetBackendHealth()[1].GetAddress())
	m.networks <- &agentv1.SyncNetworksResponse{Term: 2, Revision: 8, Complete: true, Deleted: []string{id}}
	u = next(t, got)
	require.False(t, u.Snapshot)
	require.Equal(t, []string{id}, u.Deleted)

	m.networks <- nil
	next(t, m.watches)
	m.send <- snapshot(2, 9, "a")
	require.NotNil(t, next(t, m.hosts).GetHost())
	// An acknowledgment of the old stream is not sent on the new one.
	a.AcknowledgeNetworks(cloud.NetworkAck{Stream: u.Stream, Revision: 8})
	m.networks <- &agentv1.SyncNetworksResponse{Term: 2, Revision: 3, Complete: true}
	again := next(t, got)
	require.True(t, again.Snapshot)
	require.Greater(t, again.Stream, u.Stream)
	a.AcknowledgeNetworks(cloud.NetworkAck{Stream: again.Stream, Revision: 3})
	ack = next(t, m.hosts)
	require.EqualValues(t, 3, ack.GetAppliedRevision())
	require.Empty(t, ack.GetBackendHealth(), "a report is sent once")

	// A message of a lower term ends the session and is not delivered.
	m.networks <- &agentv1.SyncNetworksResponse{Term: 1, Revision: 10, Complete: true}
	next(t, m.watches)
	require.Empty(t, got)
}

// TestControlPlaneWithoutNetworks requires that a host works with a control plane that does not know SyncNetworks.
func TestControlPlaneWithoutNetworks(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	m.set(func() { m.networksErr = status.Error(codes.Unimplemented, "unknown method") })
	a := open(t, t.TempDir(), func(o *Options) { o.Networks = make(updates) }, m).run(t)
	next(t, m.watches)
	m.send <- snapshot(1, 1, "a")
	next(t, a.assigned)
	for line := ""; !strings.Contains(line, "does not know networks"); {
		line = next(t, a.logged)
	}
	m.send <- snapshot(1, 2, "b")
	require.Contains(t, next(t, a.assigned).VMs, cloud.VMID("b"))
	require.EqualValues(t, 1, a.Status().Sessions)
}
