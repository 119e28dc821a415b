package netdev

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// serveText answers TCP connections to port 80 in the namespace of the thread with a text.
func serveText(t *testing.T, text string) error {
	listener, err := net.Listen("tcp", ":80")
	if err != nil {
		return err
	}
	nettest.Accept(t, listener, func(conn net.Conn) {
		fmt.Fprint(conn, text)
		conn.Close()
	})
	return nil
}

// dialText connects from the namespace of the thread. A dial with a timeout would continue on another thread.
func dialText(addr string) (net.Conn, error) {
	conn, err := net.DialTCP("tcp", nil, &net.TCPAddr{IP: net.ParseIP(addr), Port: 80})
	if err != nil {
		return nil, err
	}
	return conn, conn.SetDeadline(time.Now().Add(10 * time.Second))
}

func TestNewRefuses(t *testing.T) {
	l := newLab(t, 1)
	vtep := l.hosts[0].vtep
	for _, test := range []struct {
		options Options
		want    string
	}{
		{Options{}, "VTEP"},
		{Options{VTEP: netip.IPv4Unspecified()}, "VTEP"},
		{Options{VTEP: netip.MustParseAddr("::ffff:192.0.2.1")}, "VTEP"},
		{Options{VTEP: vtep, Prefix: "../x"}, "prefix"},
		{Options{VTEP: vtep, Namespace: l.path("none")}, "no such file"},
		{Options{VTEP: vtep, Namespace: l.path("h1"), Device: "eth9"}, "find underlay device eth9"},
	} {
		_, err := New(test.options)
		require.ErrorContains(t, err, test.want)
	}
	h, err := New(Options{VTEP: vtep}) // in the namespace of the process
	require.NoError(t, err)
	defer h.Close()
	require.Equal(t, "/run/netns/trivet-vpc-1", h.Path("vpc-1"))
	_, err = h.Prepare(t.Context(), cloud.HostVPC{ID: "../../etc", MTU: 1450})
	require.ErrorContains(t, err, "not a file name")
	long := cloud.VPCID(fmt.Sprintf("%0250d", 1))
	_, err = h.Prepare(t.Context(), cloud.HostVPC{ID: long, MTU: 1450})
	require.ErrorContains(t, err, "limit is 255")
	require.Error(t, h.Remove(t.Context(), "../../etc"))
}

// TestUnderlays covers an underlay with IPv6, another UDP port, and no given device.
func TestUnderlays(t *testing.T) {
	for name, options := range map[string]Options{
		"IPv6":      {Device: "eth0"},
		"UDP port":  {Device: "eth0", UDPPort: 8472},
		"no device": {},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, 2)
			for i, h := range l.hosts {
				o := options
				if name == "IPv6" {
					h.vtep = netip.MustParseAddr(fmt.Sprintf("fd99::%d", i+1))
				}
				o.VTEP = h.vtep
				h.open(o)
			}
			vpcs := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 20, 1}, place{2, 30, 1})
			for i, h := range l.hosts {
				if name == "IPv6" {
					_, err := h.Prepare(t.Context(), vpcs[i])
					require.ErrorContains(t, err, "needs an MTU of 1520")
					vpcs[i].MTU = 1430
				}
				h.apply(vpcs[i])
				require.Empty(t, h.apply(vpcs[i]))
			}
			requireReach(l, "a", place{1, 10, 0}, place{1, 20, 1})
			requireReach(l, "a", place{1, 10, 0}, place{2, 30, 1})
			from := l.hosts[0].endpoint("a", "p1-10")
			require.NoError(t, l.ping(from, netip.MustParseAddr("10.0.1.20"), int(vpcs[0].MTU), 5*time.Second))
		})
	}
}

// TestUnderlayDeviceReplaced requires that VXLAN devices follow an underlay device that was recreated.
func TestUnderlayDeviceReplaced(t *testing.T) {
	l := newLab(t, 2)
	vpcs := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 20, 1})
	for i, h := range l.hosts {
		h.apply(vpcs[i])
	}
	h := l.hosts[0]
	l.ip("h1", "link delete eth0")
	_, err := h.Prepare(t.Context(), vpcs[0])
	require.ErrorContains(t, err, "find underlay device eth0")
	l.ip("h1", "link add eth0 type veth peer name h1 netns %su", l.prefix)
	l.ip("u", "link set h1 master underlay up")
	l.ip("h1", "address add 192.0.2.1/24 dev eth0")
	l.ip("h1", "link set eth0 up")
	require.NotEmpty(t, h.apply(vpcs[0]))
	require.Empty(t, h.apply(vpcs[0]))
	requireReach(l, "a", place{1, 10, 0}, place{1, 20, 1})
}

func TestConcurrentCalls(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	var wait sync.WaitGroup
	for i := range 12 {
		id, vni := fmt.Sprintf("v%d", i%4), uint32(100+10*(i%4))
		vpc := testVPC(l, id, vni, place{1, 10, 0})[0]
		wait.Go(func() {
			for range 3 {
				if _, err := h.Prepare(t.Context(), vpc); err != nil {
					t.Error(err)
				}
				if tap, err := h.OpenTap(t.Context(), vpc, "p1-10"); err == nil {
					tap.Close()
				}
				// Another goroutine may have removed the VPC.
				if _, err := h.Activate(t.Context(), vpc); err != nil && !os.IsNotExist(unwrapAll(err)) {
					t.Error(err)
				}
				if i < 4 {
					if err := h.Remove(t.Context(), vpc.ID); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wait.Wait()
	require.Empty(t, h.locks.inUse)
	requireNoThreads(t)
}

// unwrapAll returns the innermost error.
func unwrapAll(err error) error {
	for {
		inner, ok := err.(interface{ Unwrap() error })
		if !ok {
			return err
		}
		err = inner.Unwrap()
	}
}

func TestContext(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0})[0]
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	result, err := h.Prepare(canceled, vpc)
	require.ErrorIs(t, err, context.Canceled)
	require.LessOrEqual(t, len(result.Changes), 1) // the namespace

	// A call waits for its turn no longer than its context.
	unlock, err := h.lock(t.Context(), "a")
	require.NoError(t, err)
	_, err = h.Prepare(canceled, vpc)
	require.ErrorIs(t, err, context.Canceled)
	unlock()
	h.apply(vpc)
}
