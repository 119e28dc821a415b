package netdev

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// transfer sends a number of bytes by TCP from one guest to another and returns the time that it took.
func (l *lab) transfer(from, to, addr string, bytes int) time.Duration {
	l.t.Helper()
	var listener net.Listener
	require.NoError(l.t, l.in(to, func() (err error) { listener, err = net.Listen("tcp", addr+":0"); return err }))
	defer listener.Close()
	received := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			var n int64
			n, err = io.Copy(io.Discard, conn)
			conn.Close()
			if err == nil && n != int64(bytes) {
				err = fmt.Errorf("received %d of %d bytes", n, bytes)
			}
		}
		received <- err
	}()
	start := time.Now()
	require.NoError(l.t, l.in(from, func() error {
		conn, err := net.DialTCP("tcp", nil, listener.Addr().(*net.TCPAddr))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write(make([]byte, bytes))
		return err
	}))
	require.NoError(l.t, <-received)
	return time.Since(start)
}

// TestBandwidth requires that a port with a limit neither receives nor sends faster, on a veth pair, and that the limit
// can be changed and removed.
func TestBandwidth(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 11, 0})[0]
	h.apply(vpc)
	requireReach(l, "a", place{1, 10, 0}, place{1, 11, 0}) // the devices have a carrier
	unlimited := l.dump(h.vpcName("a"))
	port := &vpc.Subnets[0].Ports[0]
	port.Mbps = 16 // 2 MB/s
	changes := texts(h.apply(vpc))
	limiter := limiterOf(port)
	require.Equal(t, []string{
		"ip link add " + limiter + " type ifb",
		"ip link set " + limiter + " alias trivet:p1-10",
		"sysctl -w net/ipv6/conf/" + limiter + "/disable_ipv6=1",
		"tc qdisc replace dev " + limiter + " root tbf rate 2000000bps burst 65536 limit 165536",
		"ip link set " + limiter + " up",
		"tc qdisc replace dev port1-10 root tbf rate 2000000bps burst 65536 limit 165536",
		"tc qdisc add dev port1-10 ingress; tc filter add dev port1-10 ingress protocol all u32 match u32 0 0 " +
			"action mirred egress redirect dev " + limiter,
	}, changes)
	require.Empty(t, h.apply(vpc))

	limited, other := h.endpoint("a", "p1-10"), h.endpoint("a", "p1-11")
	// At 2 MB/s, what exceeds the burst and the queue takes at least this time.
	const size = 2 << 20
	least := time.Duration(float64(size-165536) / 2e6 * float64(time.Second))
	require.GreaterOrEqual(t, l.transfer(limited, other, "10.0.1.11", size), least, "from the limited port")
	require.GreaterOrEqual(t, l.transfer(other, limited, "10.0.1.10", size), least, "to the limited port")
	requireReach(l, "a", place{1, 10, 0}, place{1, 11, 0})

	before := l.dump(h.vpcName("a"))
	name := h.vpcName("a")
	tc := func(command string) func() { return func() { l.tc(name, "%s", command) } }
	for _, test := range []struct {
		name   string
		damage func()
		repair []string
	}{
		{"limit deleted", tc("qdisc delete dev port1-10 root"), changes[5:6]},
		{"limit changed", tc("qdisc replace dev port1-10 root tbf rate 9mbit burst 99k limit 999999"), changes[5:6]},
		{"limit of the IFB device deleted", tc("qdisc delete dev " + limiter + " root"), changes[3:4]},
		{"redirection deleted", tc("qdisc delete dev port1-10 ingress"), changes[6:7]},
		{"filter deleted", tc("filter delete dev port1-10 ingress"),
			[]string{"tc qdisc delete dev port1-10 ingress", changes[6]}},
		{"further filter", tc("filter add dev port1-10 ingress protocol ip u32 match u32 0 0 action mirred egress redirect dev lo"), nil},
		{"IFB device down", func() { l.ip(name, "link set %s down", limiter) }, changes[4:5]},
		{"IFB device deleted", func() { l.ip(name, "link delete %s", limiter) }, nil},
		{"port recreated", func() { l.ip(name, "link delete port1-10") }, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			l.t = t
			test.damage()
			h.requireRepair(vpc, test.repair, before)
			requireReach(l, "a", place{1, 10, 0}, place{1, 11, 0})
		})
	}
	l.t = t

	port.Mbps = maxMbps
	require.Len(t, h.apply(vpc), 2)
	require.Empty(t, h.apply(vpc))
	port.Mbps = maxMbps + 1
	_, err := h.Prepare(t.Context(), vpc)
	require.ErrorContains(t, err, "above 100000 Mbit/s")
	port.Mbps = 0
	require.Equal(t, []string{
		"tc qdisc delete dev port1-10 root", "tc qdisc delete dev port1-10 ingress", "ip link delete " + limiter,
	}, texts(h.apply(vpc)))
	h.lab.requireSame(func() string { return unlimited }, func() string { return l.dump(name) })
	require.NoError(t, h.Detach(t.Context(), "a", "p1-10"))
}

// TestBandwidthOfTap requires that the limit of a tap is set before the tap is up, that packets of its guest pass the
// IFB device, and that another tap of the same port uses the IFB device that exists.
func TestBandwidthOfTap(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 11, 0})[0]
	port := &vpc.Subnets[0].Ports[0]
	port.Mbps = 8
	_, err := h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	h.attach(vpc, "p1-11")
	for range 2 {
		guest := h.openTap(vpc, "p1-10")
		require.Empty(t, h.apply(vpc))
		require.Equal(t, cloud.GatewayMAC, guest.resolve(vpc.Subnets[0].Gateway))
		require.Regexp(t, `Sent [1-9]`, l.tc(h.vpcName("a"), "-s qdisc show dev %s root", limiterOf(port)))
		require.Regexp(t, `Sent [1-9]`, l.tc(h.vpcName("a"), "-s qdisc show dev port1-10 root"))
		require.NoError(t, guest.file.Close())
	}
	require.NoError(t, h.Detach(t.Context(), "a", "p1-10"))
	require.NotContains(t, l.ip(h.vpcName("a"), "link"), limiterOf(port))
}
