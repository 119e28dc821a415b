package firewall

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestChangesLoseNothing changes rules, members and ports while an exchange of datagrams goes on that all of the states
// permit. Each datagram is sent after the answer to the previous one, so a single loss ends the exchange.
func TestChangesLoseNothing(t *testing.T) {
	for name, apply := range map[string]func(*lab, *testing.T) Result{"Set": (*lab).set, "Update": (*lab).update} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			testChanges(t, l, func() { apply(l, t) })
		})
	}
}

func testChanges(t *testing.T, l *lab, apply func()) {
	client, server := l.add(t, 0, 5, "a"), l.add(t, 1, 6, "a")
	l.group("a", allowAll(cloud.Ingress, cloud.Egress)...)
	client.configure(t, l)
	server.configure(t, l)
	apply()
	there, back := listenUDP(t, client, 4000, false), listenUDP(t, server, 5000, false)
	go func() { // answers
		buffer := make([]byte, 100)
		for {
			n, from, err := back.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			_, _ = back.WriteToUDPAddrPort(buffer[:n], from)
		}
	}()
	stop, result := make(chan struct{}), make(chan error, 1)
	var exchanged atomic.Int64
	go func() { result <- exchange(there, back.LocalAddr().(*net.UDPAddr).AddrPort(), stop, &exchanged) }()
	progress := func() {
		now := exchanged.Load()
		require.Eventually(t, func() bool { return exchanged.Load() > now+10 || len(result) > 0 }, patience, time.Millisecond)
	}
	progress()
	extra := parseAddr("10.0.0.77")
	for i := range 10 {
		rule := cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP, Group: "b",
			Ports: cloud.PortRange{First: uint16(i), Last: uint16(i + 1)}}
		l.group("a", append(l.rules("a"), rule)...)
		l.members("b", extra)
		apply()
		extra = extra.Next()
		l.change(server, func(p *cloud.HostPort) {
			p.Groups = []cloud.SecurityGroupID{"a", cloud.SecurityGroupID(fmt.Sprint(i))}
		})
		l.vpc.Subnets[0].Ports = append(l.vpc.Subnets[0].Ports, cloud.HostPort{
			ID: cloud.PortID(fmt.Sprint(i)), Device: fmt.Sprint("x", i), MAC: cloud.MAC{2, 1, 0, 0, 0, byte(i)},
			IP: extra, Secured: true,
		})
		apply()
		progress()
	}
	close(stop)
	require.NoError(t, <-result)
}

// exchange sends datagrams, each after the answer to the previous one, until stop is closed. It fails if an answer does
// not arrive within 10 s.
func exchange(socket *net.UDPConn, to netip.AddrPort, stop chan struct{}, exchanged *atomic.Int64) error {
	buffer := make([]byte, 100)
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		if _, err := socket.WriteToUDPAddrPort(binary.BigEndian.AppendUint64(nil, uint64(exchanged.Load())), to); err != nil {
			return err
		}
		if err := socket.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			return err
		}
		if _, err := io.ReadAtLeast(socket, buffer, 8); err != nil {
			if os.IsTimeout(err) {
				return fmt.Errorf("datagram %d or its answer was lost", exchanged.Load())
			}
			return err
		}
		exchanged.Add(1)
	}
}
