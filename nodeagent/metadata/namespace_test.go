package metadata

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func testLog(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// loopbackAddresses returns the addresses of lo, without those of the host itself.
func loopbackAddresses(t *testing.T, h *netlink.Handle) map[netip.Addr]bool {
	t.Helper()
	lo, err := h.LinkByName("lo")
	require.NoError(t, err)
	list, err := listAddresses(h, lo)
	require.NoError(t, err)
	out := map[netip.Addr]bool{}
	for a := range list {
		if !a.IsLoopback() {
			out[a] = true
		}
	}
	return out
}

// loopbackIndex is the index of the interface lo in every namespace.
const loopbackIndex = 1

// countChanges counts the kernel's notifications about changes of the interface lo and its addresses in a namespace.
func countChanges(t *testing.T, name string) *atomic.Int64 {
	t.Helper()
	var count atomic.Int64
	stop := make(chan struct{})
	namespace := openNamespace(t, name)
	addresses, links := make(chan netlink.AddrUpdate), make(chan netlink.LinkUpdate)
	require.NoError(t, netlink.AddrSubscribeAt(namespace, addresses, stop))
	require.NoError(t, netlink.LinkSubscribeAt(namespace, links, stop))
	var readers sync.WaitGroup
	t.Cleanup(func() { close(stop); readers.Wait() })
	readers.Go(func() {
		for a := range addresses {
			if a.LinkIndex == loopbackIndex {
				count.Add(1)
			}
		}
	})
	readers.Go(func() {
		for l := range links {
			if l.Index == loopbackIndex {
				count.Add(1)
			}
		}
	})
	return &count
}

// TestSetIsIdempotent: the second Set with the same state neither changes the namespace nor disturbs connections, and
// Set repairs addresses that were removed.
func TestSetIsIdempotent(t *testing.T) {
	s := newTestServer(t, Limits{})
	a := newTestNetwork(t, "a")
	guest := a.addGuest(t, 5)
	vpc := VPC{"vpc-a", a.name, true}
	require.NoError(t, s.Set(t.Context(), vpc))
	h := handleAt(t, a.name)
	require.Equal(t, map[netip.Addr]bool{Address: true, Address6: true}, loopbackAddresses(t, h))

	c := dial(t, guest, Address)
	require.Equal(t, "web", get(t, c, "/latest/meta-data/instance-id"))
	changes := countChanges(t, a.name)
	for range 3 {
		require.NoError(t, s.Set(t.Context(), vpc))
	}
	require.Equal(t, "web", get(t, c, "/latest/meta-data/instance-id"), "the connection is the same")

	// The removal below is the first change. Its notification arrives after those of changes before it.
	lo, err := h.LinkByName("lo")
	require.NoError(t, err)
	require.NoError(t, h.AddrDel(lo, &netlink.Addr{IPNet: netlink.NewIPNet(Address.AsSlice())}))
	require.Eventually(t, func() bool { return changes.Load() > 0 }, testTimeout, 10*time.Millisecond)
	require.EqualValues(t, 1, changes.Load())
	require.NoError(t, s.Set(t.Context(), vpc))
	require.Equal(t, "web", get(t, dial(t, guest, Address), "/latest/meta-data/instance-id"))
}

// TestSetFollowsTheWantedState adds and removes IPv6, and follows a namespace that was replaced.
func TestSetFollowsTheWantedState(t *testing.T) {
	s := newTestServer(t, Limits{})
	a := newTestNetwork(t, "a")
	guest := a.addGuest(t, 5)
	h := handleAt(t, a.name)
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, false}))
	require.Equal(t, map[netip.Addr]bool{Address: true}, loopbackAddresses(t, h))
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, true}))
	require.Equal(t, "web", get(t, dial(t, guest, Address6), "/latest/meta-data/instance-id"))
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, false}))
	require.Equal(t, map[netip.Addr]bool{Address: true}, loopbackAddresses(t, h))
	require.Equal(t, "web", get(t, dial(t, guest, Address), "/latest/meta-data/instance-id"))

	require.NoError(t, netns.DeleteNamed(a.name))
	require.ErrorContains(t, s.Set(t.Context(), VPC{"vpc-a", a.name, false}), "open network namespace")
	again := newTestNetwork(t, "a")
	again.guests = a.guests // whose namespaces still exist
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", again.name, false}))
	require.Equal(t, "web", get(t, dial(t, again.addGuest(t, 5), Address), "/latest/meta-data/instance-id"))
}

// TestSetReopensListener: Set opens a listener again whose server ended by itself.
func TestSetReopensListener(t *testing.T) {
	s := newTestServer(t, Limits{})
	a := newTestNetwork(t, "a")
	guest := a.addGuest(t, 5)
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, false}))
	l := s.listeners[listenerKey{"vpc-a", Address}]
	require.NoError(t, l.server.Close())
	require.Eventually(t, l.ended, testTimeout, 10*time.Millisecond)
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, false}))
	require.Equal(t, "web", get(t, dial(t, guest, Address), "/latest/meta-data/instance-id"))
}

// TestRemove closes the listeners and connections of one VPC, and leaves those of others.
func TestRemove(t *testing.T) {
	s := newTestServer(t, Limits{})
	a, b := newTestNetwork(t, "a"), newTestNetwork(t, "b")
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, true}))
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-b", b.name, true}))
	guest, other := a.addGuest(t, 5), b.addGuest(t, 5)
	removed, kept := dial(t, guest, Address), dial(t, other, Address)
	require.Equal(t, "web", get(t, removed, "/latest/meta-data/instance-id"))
	s.Remove("vpc-a")
	s.Remove("vpc-a")
	requireClosed(t, removed)
	require.Equal(t, "other", get(t, kept, "/latest/meta-data/instance-id"))
	_, err := dialFrom(openNamespace(t, guest), Address)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, true}), "the addresses can be used again at once")
	require.Equal(t, "web", get(t, dial(t, guest, Address), "/latest/meta-data/instance-id"))

	s.Close()
	requireClosed(t, kept)
	require.ErrorContains(t, s.Set(t.Context(), VPC{"vpc-a", a.name, true}), "closed")
}

// TestConnectionLimit: a port that has the maximum number of connections gets no more until one is closed, and other
// ports are not affected.
func TestConnectionLimit(t *testing.T) {
	s := newTestServer(t, Limits{Connections: 2})
	a := newTestNetwork(t, "a")
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, true}))
	guest, neighbour, unknown := a.addGuest(t, 5), a.addGuest(t, 7), a.addGuest(t, 99)
	first, second := dial(t, guest, Address), dial(t, guest, Address6)
	require.Equal(t, "web", get(t, first, "/latest/meta-data/instance-id"))
	require.Equal(t, "web", get(t, second, "/latest/meta-data/instance-id"))
	requireRefused(t, guest, Address)
	require.Equal(t, "bare", get(t, dial(t, neighbour, Address), "/latest/meta-data/instance-id"))

	dial(t, unknown, Address)
	dial(t, unknown, Address)
	requireRefused(t, unknown, Address)

	require.NoError(t, first.Close())
	require.Eventually(t, func() bool {
		s.gate.mu.Lock()
		defer s.gate.mu.Unlock()
		return s.gate.open[caller{"vpc-a", "port-web"}] == 1
	}, testTimeout, 10*time.Millisecond)
	require.Equal(t, "web", get(t, dial(t, guest, Address), "/latest/meta-data/instance-id"))
}

// TestHTTPLimits: a header that is too large is refused, a body that is too large is refused, and a connection without
// a complete request is closed.
func TestHTTPLimits(t *testing.T) {
	s := newTestServer(t, Limits{HeaderBytes: 1024, BodyBytes: 100})
	a := newTestNetwork(t, "a")
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, false}))
	guest := a.addGuest(t, 5)
	status := func(request string) string {
		c := dial(t, guest, Address)
		_, err := io.WriteString(c, request)
		require.NoError(t, err)
		line, err := bufio.NewReader(c).ReadString('\n')
		require.NoError(t, err)
		return strings.TrimSpace(strings.TrimPrefix(line, "HTTP/1.1 "))
	}
	const host = "Host: 169.254.169.254\r\n"
	const tooLarge = "413 Request Entity Too Large"
	get := "GET / HTTP/1.1\r\n" + host
	body := strings.Repeat("x", 101)
	require.Equal(t, "431 Request Header Fields Too Large", status(get+"X: "+strings.Repeat("x", 6000)+"\r\n\r\n"))
	require.Equal(t, "200 OK", status(get+"Content-Length: 100\r\n\r\n"+body[:100]))
	require.Equal(t, tooLarge, status(get+"Content-Length: 1000000\r\n\r\n"+body))
	require.Equal(t, tooLarge, status(get+"Transfer-Encoding: chunked\r\n\r\n65\r\n"+body+"\r\n"))
	require.Equal(t, "405 Method Not Allowed", status("OPTIONS * HTTP/1.1\r\n"+host+"\r\n"))

	impatient := newTestServer(t, Limits{RequestTime: time.Second})
	b := newTestNetwork(t, "b")
	require.NoError(t, impatient.Set(t.Context(), VPC{"vpc-b", b.name, false}))
	guest = b.addGuest(t, 5)
	c := dial(t, guest, Address)
	_, err := io.WriteString(c, "GET / HT")
	require.NoError(t, err)
	requireClosed(t, c)
	requireClosed(t, dial(t, guest, Address))
}

// TestAddressMovesToAnotherPort: an open connection of the old port gets no data of the new one.
func TestAddressMovesToAnotherPort(t *testing.T) {
	var current atomic.Pointer[Instance]
	before, after := testInstance(t, "before", "vpc-a", 5), testInstance(t, "after", "vpc-a", 5)
	current.Store(before)
	s := newServerWithLookup(t, Limits{}, func(cloud.VPCID, netip.Addr) (*Instance, bool) {
		i := current.Load()
		return i, i != nil
	})
	a := newTestNetwork(t, "a")
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, false}))
	guest := a.addGuest(t, 5)
	c := dial(t, guest, Address)
	require.Equal(t, "before", get(t, c, "/latest/meta-data/instance-id"))
	current.Store(after)
	require.Equal(t, "Not Found\n", get(t, c, "/latest/meta-data/instance-id"))
	requireClosed(t, c)
	require.Equal(t, "after", get(t, dial(t, guest, Address), "/latest/meta-data/instance-id"))
	current.Store(nil)
	require.Equal(t, "Not Found\n", get(t, dial(t, guest, Address), "/latest/meta-data/instance-id"))
}

// TestConcurrentUse calls Set and Remove for several VPCs while guests send requests. The race detector checks the
// rest.
func TestConcurrentUse(t *testing.T) {
	s := newTestServer(t, Limits{RequestsPerSecond: 1e9, Burst: 1e9})
	networks := map[cloud.VPCID]*testNetwork{"vpc-a": newTestNetwork(t, "a"), "vpc-b": newTestNetwork(t, "b")}
	var work sync.WaitGroup
	failures := make(chan error, 100)
	for id, n := range networks {
		guest := openNamespace(t, n.addGuest(t, 5))
		for range 2 {
			work.Go(func() {
				for round := range 10 {
					if err := s.Set(t.Context(), VPC{id, n.name, round%2 == 0}); err != nil {
						failures <- err
					}
					if round%3 == 0 {
						s.Remove(id)
					}
				}
			})
		}
		work.Go(func() {
			for range 20 {
				if c, err := dialFrom(guest, Address); err == nil { // otherwise the listener is closed
					_, _ = io.WriteString(c, "GET /latest/meta-data/instance-id HTTP/1.0\r\n\r\n")
					_, _ = io.Copy(io.Discard, c)
					_ = c.Close()
				}
			}
		})
	}
	work.Wait()
	close(failures)
	for err := range failures {
		require.NoError(t, err)
	}
}

// get sends a request on an open connection and returns the response's body.
func get(t *testing.T, c net.Conn, path string) string {
	t.Helper()
	_, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: metadata\r\n\r\n", path)
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return string(body)
}

// requireClosed waits until the server closes the connection, after any response.
func requireClosed(t *testing.T, c net.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, c)
	require.True(t, err == nil || errors.Is(err, syscall.ECONNRESET), "%v", err)
}

// requireRefused opens a connection that the server closes because the guest has too many. The reset can arrive before
// the guest's connect has returned.
func requireRefused(t *testing.T, guest string, address netip.Addr) {
	t.Helper()
	c, err := dialFrom(openNamespace(t, guest), address)
	if errors.Is(err, syscall.ECONNRESET) {
		return
	}
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(testTimeout)))
	requireClosed(t, c)
}
