package peering

import (
	"errors"
	"io"
	"net"
	"os"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// serve runs a TCP and a UDP server at port 7000 in a namespace, until the test ends. The servers send back what they
// receive.
func (l *lab) serve(name string) {
	l.t.Helper()
	t := l.t
	var listener net.Listener
	var socket *net.UDPConn
	require.NoError(t, l.In(name, func() (err error) {
		if listener, err = net.Listen("tcp", ":7000"); err != nil {
			return err
		}
		socket, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 7000})
		return err
	}))
	t.Cleanup(func() { socket.Close() })
	nettest.Accept(t, listener, func(conn net.Conn) { _, _ = io.Copy(conn, conn) }) // until the client closes it
	go func() {
		buffer := make([]byte, 1<<16)
		for {
			n, from, err := socket.ReadFromUDP(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = socket.WriteToUDP(buffer[:n], from)
			}
		}
	}()
}

// dial connects from a namespace to port 7000 of an address within the time.
func (l *lab) dial(network, from, to string, within time.Duration) (conn net.Conn, err error) {
	err = l.In(from, func() error {
		conn, err = net.DialTimeout(network, net.JoinHostPort(to, "7000"), within)
		return err
	})
	if err == nil {
		l.t.Cleanup(func() { conn.Close() })
	}
	return conn, err
}

// exchange sends data over a connection to a server of serve, and waits until as much data has returned. It sends
// datagrams again while no reply arrives.
func exchange(conn net.Conn, size int, within time.Duration) error {
	deadline := time.Now().Add(within)
	data := make([]byte, size)
	for received := 0; received < size; {
		if received == 0 {
			_ = conn.SetDeadline(deadline)
			if _, err := conn.Write(data); err != nil {
				return err
			}
		}
		wait := deadline
		if conn.LocalAddr().Network() == "udp" {
			wait = time.Now().Add(within / 3)
		}
		_ = conn.SetReadDeadline(wait)
		n, err := conn.Read(data[received:])
		if errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(deadline) {
			continue
		}
		if err != nil {
			return err
		}
		received += n
	}
	return nil
}

// reaches returns an error unless a namespace exchanges data with port 7000 of an address within the given time.
func (l *lab) reaches(network, from, to string, within time.Duration) error {
	conn, err := l.dial(network, from, to, within)
	if err != nil {
		return err
	}
	defer conn.Close()
	return exchange(conn, 100, within)
}

func (l *lab) requireReaches(network, from, to string) {
	l.t.Helper()
	require.NoError(l.t, l.reaches(network, from, to, patience), "%s does not reach %s over %s", from, to, network)
}

func (l *lab) requireBlocked(network, from, to, message string) {
	l.t.Helper()
	require.Error(l.t, l.reaches(network, from, to, blocked), message)
}

// ping sends an ICMP echo request from a namespace and waits for the answer.
func (l *lab) ping(from, to string, within time.Duration) error {
	var conn net.PacketConn
	if err := l.In(from, func() (err error) {
		conn, err = net.ListenPacket("ip4:icmp", "0.0.0.0")
		return err
	}); err != nil {
		return err
	}
	defer conn.Close()
	echo := &icmp.Echo{ID: os.Getpid() & 0xffff, Seq: 1, Data: []byte("data")}
	message := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: echo}
	packet, err := message.Marshal(nil)
	if err != nil {
		return err
	}
	_ = conn.SetDeadline(time.Now().Add(within))
	if _, err := conn.WriteTo(packet, &net.IPAddr{IP: net.ParseIP(to)}); err != nil {
		return err
	}
	for buffer := make([]byte, 1500); ; {
		n, source, err := conn.ReadFrom(buffer)
		if err != nil {
			return err
		}
		answer, err := icmp.ParseMessage(cloud.ProtocolICMP, buffer[:n])
		if err == nil && answer.Type == ipv4.ICMPTypeEchoReply && source.String() == to {
			return nil
		}
	}
}
