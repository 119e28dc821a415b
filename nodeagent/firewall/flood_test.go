package firewall

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// floodLimit is the highest limit of connections up to which TestFloodStaysInItsVPC fills the table. At this limit the
// entries take about 100 MB of the kernel's memory.
const floodLimit = 300_000

// TestFloodStaysInItsVPC begins more connections in one VPC than the kernel tracks in a namespace. The number of
// tracked connections stays at the limit, an established connection of the same VPC continues, and another VPC, which
// has the same addresses, can begin connections.
func TestFloodStaysInItsVPC(t *testing.T) {
	flooded, other := newCallStage(t), newCallStage(t)
	var clients, servers []*endpoint
	for _, s := range []*callStage{flooded, other} {
		s.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
		clients = append(clients, s.add(t, 0, 5, "open"))
		servers = append(servers, s.add(t, 0, 6, "open"))
		s.set(t)
	}
	limit := flooded.counters(t).ConnectionLimit
	if limit > floodLimit {
		t.Skipf("the host's net.netfilter.nf_conntrack_max is %d: filling the table would take too much memory", limit)
	}
	reply := func(source, destination netip.Addr, tag string) []byte {
		return udp(at(source, 53), at(destination, 4000), tag)
	}
	require.Equal(t, "arrives", flooded.verdict(t, call{clients[0], servers[0], false, udpTo(53)}))
	require.Equal(t, "arrives", flooded.verdict(t, call{servers[0], clients[0], false, reply}))
	flood(t, flooded, clients[0], servers[0], int(limit+limit/10))
	full := flooded.counters(t)
	require.LessOrEqual(t, full.Connections, limit)
	require.Greater(t, full.Connections, limit*9/10)
	require.Equal(t, "arrives", flooded.verdict(t, call{servers[0], clients[0], false, reply}), "established")
	require.Less(t, other.counters(t).Connections, uint64(10))
	require.Equal(t, "arrives", other.verdict(t, call{clients[1], servers[1], false, udpTo(53)}), "in another VPC")
	require.Zero(t, other.drops(t).Full)
	flooded.forget(t)
}

// flood sends the first packets of UDP connections with different ports.
func flood(t *testing.T, s *callStage, from, to *endpoint, connections int) {
	t.Helper()
	packet := udp(at(from.port.IP, 1), at(to.port.IP, 1), "")
	binary.BigEndian.PutUint16(packet[26:], 0) // no checksum
	frame := ethernet(to.port.MAC, from.port.MAC, unix.ETH_P_IP, packet)
	ports := frame[14+20:]
	for i := range connections {
		binary.BigEndian.PutUint32(ports, uint32(i)+1<<26) // source ports from 1024
		s.wires[from].Send(t, frame)
	}
}
