package netdev

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestPortCounters sends frames of known lengths through a tap, and pings between veth pairs. The counters are those of
// the guest: Sent counts what the guest sends. The IFB device of a port with a limit does not add to the counters.
func TestPortCounters(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 11, 0}, place{1, 12, 0})[0]
	vpc.Subnets[0].Ports[1].Mbps = 100
	_, err := h.PortCounters(t.Context(), "a")
	require.ErrorContains(t, err, "of VPC a", "the VPC has no namespace")
	_, err = h.Prepare(t.Context(), vpc)
	require.NoError(t, err)

	guest := h.openTap(vpc, "p1-10")
	before, err := h.PortCounters(t.Context(), "a")
	require.NoError(t, err)
	require.Len(t, before, 1, "ports without a device are missing")
	for range 3 {
		require.NoError(t, guest.send(cloud.GatewayMAC, guest.mac, 0x0800, make([]byte, 1000)))
	}
	after, err := h.PortCounters(t.Context(), "a")
	require.NoError(t, err)
	require.EqualValues(t, 3, after["p1-10"].SentPackets-before["p1-10"].SentPackets)
	require.EqualValues(t, 3*(14+1000), after["p1-10"].SentBytes-before["p1-10"].SentBytes)
	guest.resolve(netip.MustParseAddr("10.0.1.1"))
	answered, err := h.PortCounters(t.Context(), "a")
	require.NoError(t, err)
	require.Greater(t, answered["p1-10"].ReceivedPackets, before["p1-10"].ReceivedPackets)
	require.Greater(t, answered["p1-10"].ReceivedBytes, before["p1-10"].ReceivedBytes)

	for _, id := range []cloud.PortID{"p1-11", "p1-12"} {
		h.attach(vpc, id)
	}
	_, err = h.Activate(t.Context(), vpc)
	require.NoError(t, err)
	requireReach(l, "a", place{1, 11, 0}, place{1, 12, 0})
	all, err := h.PortCounters(t.Context(), "a")
	require.NoError(t, err)
	require.Len(t, all, 3)
	require.Positive(t, all["p1-11"].SentBytes)
	require.Positive(t, all["p1-11"].ReceivedBytes)
}
