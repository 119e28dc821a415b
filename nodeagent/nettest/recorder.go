package nettest

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// Recorder records the IPv4 packets that the devices of a namespace receive, also those of devices that are added
// later.
type Recorder struct {
	t  *testing.T
	fd int
}

// Record begins to record in a namespace. The recording ends with the test.
func Record(t *testing.T, namespace string) *Recorder {
	t.Helper()
	r := &Recorder{t: t, fd: -1}
	require.NoError(t, nsthread.InNamed(namespace, func() (err error) {
		protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_IP))
		r.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(protocol))
		return err
	}))
	t.Cleanup(func() { unix.Close(r.fd) })
	require.NoError(t, unix.SetsockoptInt(r.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, recordBuffer))
	return r
}

// recordBuffer is the size in bytes of the receive buffer of a Recorder. The default has room for about 250 packets.
const recordBuffer = 64 << 20

// UDP returns the number of datagrams to a UDP port that have arrived since the last call of a method of r.
func (r *Recorder) UDP(port uint16) int {
	r.t.Helper()
	return r.count(func(protocol uint8, packet []byte) bool {
		return protocol == unix.IPPROTO_UDP && len(packet) >= 8 && binary.BigEndian.Uint16(packet[2:]) == port
	})
}

// TCPData returns the number of TCP segments with data, from or to a port, that have arrived since the last call of a
// method of r.
func (r *Recorder) TCPData(port uint16) int {
	r.t.Helper()
	return r.count(func(protocol uint8, packet []byte) bool {
		return protocol == unix.IPPROTO_TCP && len(packet) >= 20 && len(packet) > int(packet[12]>>4)*4 &&
			(binary.BigEndian.Uint16(packet) == port || binary.BigEndian.Uint16(packet[2:]) == port)
	})
}

// count returns the number of received packets for which match returns true. The arguments of match are the packet's
// protocol, and its content after the IPv4 header. The test fails if the buffer of the socket has overflowed.
func (r *Recorder) count(match func(protocol uint8, content []byte) bool) (count int) {
	r.t.Helper()
	packet := make([]byte, 65536)
	for {
		n, from, err := unix.Recvfrom(r.fd, packet, 0)
		if errors.Is(err, unix.EAGAIN) {
			stats, err := unix.GetsockoptTpacketStats(r.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
			require.NoError(r.t, err)
			require.Zero(r.t, stats.Drops, "packets that did not fit into the buffer of the socket")
			return count
		}
		if errors.Is(err, unix.ENETDOWN) {
			continue // the device was removed
		}
		require.NoError(r.t, err)
		if link, ok := from.(*unix.SockaddrLinklayer); !ok || link.Pkttype == unix.PACKET_OUTGOING || n < 20 {
			continue
		}
		length := min(n, int(binary.BigEndian.Uint16(packet[2:]))) // without the padding of Ethernet
		if header := int(packet[0]&15) * 4; header <= length && match(packet[9], packet[header:length]) {
			count++
		}
	}
}
