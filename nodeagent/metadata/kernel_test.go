package metadata

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// testNetwork is a VPC's network namespace with a bridge, which has the subnet's gateway addresses, as on a host.
type testNetwork struct {
	name   string // of the namespace
	guests int
}

// newTestNetwork makes the namespace of a VPC, and removes it and those of its guests at the end of the test.
func newTestNetwork(t *testing.T, vpc string) *testNetwork {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root")
	}
	n := &testNetwork{name: fmt.Sprintf("mdtest-%d-%s", os.Getpid(), vpc)}
	addNamespace(t, n.name)
	h := handleAt(t, n.name)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	require.NoError(t, h.LinkAdd(bridge))
	addAddress(t, h, bridge, "10.0.0.1/24")
	addAddress(t, h, bridge, "fd00:10::1/64")
	require.NoError(t, h.LinkSetUp(bridge))
	return n
}

// addGuest makes a namespace that is connected to the bridge and has the addresses 10.0.0.number and fd00:10::number.
// It returns the namespace's name.
func (n *testNetwork) addGuest(t *testing.T, number int) string {
	t.Helper()
	n.guests++
	guest := fmt.Sprintf("%s-g%d", n.name, n.guests)
	addNamespace(t, guest)
	inside, outside := handleAt(t, guest), handleAt(t, n.name)
	target := openNamespace(t, guest)
	port := fmt.Sprintf("port%d", number)
	require.NoError(t, outside.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: port}, PeerName: "eth0", PeerNamespace: netlink.NsFd(target),
	}))
	bridge, err := outside.LinkByName("br0")
	require.NoError(t, err)
	link, err := outside.LinkByName(port)
	require.NoError(t, err)
	require.NoError(t, outside.LinkSetMaster(link, bridge))
	require.NoError(t, outside.LinkSetUp(link))
	eth0, err := inside.LinkByName("eth0")
	require.NoError(t, err)
	addAddress(t, inside, eth0, fmt.Sprintf("10.0.0.%d/24", number))
	addAddress(t, inside, eth0, fmt.Sprintf("fd00:10::%d/64", number))
	require.NoError(t, inside.LinkSetUp(eth0))
	for _, gateway := range []string{"10.0.0.1", "fd00:10::1"} {
		require.NoError(t, inside.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: net.ParseIP(gateway)}))
	}
	return guest
}

func addNamespace(t *testing.T, name string) {
	t.Helper()
	t.Cleanup(func() {
		if err := netns.DeleteNamed(name); err != nil && !os.IsNotExist(err) {
			t.Errorf("delete namespace %s: %v", name, err)
		}
	})
	require.NoError(t, nsthread.Do(func() error {
		created, err := netns.NewNamed(name)
		if err != nil {
			return err
		}
		return created.Close()
	}))
}

func openNamespace(t *testing.T, name string) netns.NsHandle {
	t.Helper()
	h, err := netns.GetFromName(name)
	require.NoError(t, err)
	t.Cleanup(func() { _ = h.Close() })
	return h
}

func handleAt(t *testing.T, name string) *netlink.Handle {
	t.Helper()
	h, err := netlink.NewHandleAt(openNamespace(t, name), unix.NETLINK_ROUTE)
	require.NoError(t, err)
	t.Cleanup(h.Close)
	return h
}

func addAddress(t *testing.T, h *netlink.Handle, link netlink.Link, address string) {
	t.Helper()
	a, err := netlink.ParseAddr(address)
	require.NoError(t, err)
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	require.NoError(t, h.AddrAdd(link, a))
}

// dialFrom opens a connection from a namespace to a listener.
func dialFrom(namespace netns.NsHandle, address netip.Addr) (c net.Conn, err error) {
	err = nsthread.In(namespace, func() (err error) {
		d := net.Dialer{Timeout: testTimeout}
		c, err = d.Dial("tcp", netip.AddrPortFrom(address, httpPort).String())
		return err
	})
	return c, err
}

// testTimeout bounds the waits of the tests. It is not reached unless a test fails.
const testTimeout = 20 * time.Second

// dial opens a connection from a guest to a listener.
func dial(t *testing.T, guest string, address netip.Addr) net.Conn {
	t.Helper()
	c, err := dialFrom(openNamespace(t, guest), address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(testTimeout)))
	return c
}

// guestClient returns an HTTP client whose connections come from a guest.
func guestClient(t *testing.T, guest string) *http.Client {
	t.Helper()
	namespace := openNamespace(t, guest)
	transport := &http.Transport{DialContext: func(_ context.Context, _, address string) (net.Conn, error) {
		parsed, err := netip.ParseAddrPort(address)
		if err != nil {
			return nil, err
		}
		return dialFrom(namespace, parsed.Addr())
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: testTimeout}
}

// fetch sends a request and returns the status and the body. The header is given as names and values.
func fetch(t *testing.T, c *http.Client, method string, address netip.Addr, path string, header ...string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+netip.AddrPortFrom(address, httpPort).String()+path, nil)
	require.NoError(t, err)
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	response, err := c.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(body)
}

// TestGuestsGetTheirOwnData: the guests of two VPCs with the same addresses each get their own data, over IPv4 and
// IPv6.
func TestGuestsGetTheirOwnData(t *testing.T) {
	s := newTestServer(t, Limits{})
	a, b := newTestNetwork(t, "a"), newTestNetwork(t, "b")
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, true}))
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-b", b.name, true}))
	web, bare, other := guestClient(t, a.addGuest(t, 5)), guestClient(t, a.addGuest(t, 7)), guestClient(t, b.addGuest(t, 5))
	unknown := guestClient(t, a.addGuest(t, 99))
	for _, c := range []struct {
		client  *http.Client
		address netip.Addr
		want    string
	}{{web, Address, "web"}, {web, Address6, "web"}, {bare, Address, "bare"}, {other, Address, "other"}, {other, Address6, "other"}} {
		status, body := fetch(t, c.client, "GET", c.address, "/latest/meta-data/instance-id")
		require.Equal(t, http.StatusOK, status)
		require.Equal(t, c.want, body)
	}
	for _, path := range []string{"/", "/latest/meta-data/instance-id", "/nocloud/user-data"} {
		status, body := fetch(t, unknown, "GET", Address, path)
		require.Equal(t, http.StatusNotFound, status)
		require.Equal(t, "Not Found\n", body)
	}
	status, body := fetch(t, web, "HEAD", Address, "/latest/meta-data/instance-id")
	require.Equal(t, http.StatusOK, status)
	require.Empty(t, body)
}

// TestTokensOverTheNetwork: the token of a guest is not accepted from another guest of the VPC, nor from a guest with
// the same address in another VPC.
func TestTokensOverTheNetwork(t *testing.T) {
	s := newTestServer(t, Limits{})
	a, b := newTestNetwork(t, "a"), newTestNetwork(t, "b")
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, false}))
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-b", b.name, false}))
	web, db, other := guestClient(t, a.addGuest(t, 5)), guestClient(t, a.addGuest(t, 6)), guestClient(t, b.addGuest(t, 5))

	status, token := fetch(t, db, "PUT", Address, tokenPath, tokenTTLHeader, "60")
	require.Equal(t, http.StatusOK, status)
	const path = "/latest/meta-data/instance-id"
	status, body := fetch(t, db, "GET", Address, path, tokenHeader, token)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "db", body)
	status, _ = fetch(t, db, "GET", Address, path)
	require.Equal(t, http.StatusUnauthorized, status, "db requires tokens")
	status, _ = fetch(t, web, "GET", Address, path, tokenHeader, token)
	require.Equal(t, http.StatusUnauthorized, status)
	status, _ = fetch(t, other, "GET", Address, path, tokenHeader, token)
	require.Equal(t, http.StatusUnauthorized, status)
	status, _ = fetch(t, db, "PUT", Address, tokenPath, tokenTTLHeader, "60", "X-Forwarded-For", "203.0.113.1")
	require.Equal(t, http.StatusForbidden, status)
}

// TestPacketsHaveHopLimitOne captures the packets of a connection in the guest, and checks the TTL of those from the
// listener, from the SYN-ACK on.
func TestPacketsHaveHopLimitOne(t *testing.T) {
	s := newTestServer(t, Limits{})
	a := newTestNetwork(t, "a")
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, true}))
	guest := a.addGuest(t, 5)
	for _, address := range []netip.Addr{Address, Address6} {
		capture := capturePackets(t, guest)
		client := guestClient(t, guest)
		status, _ := fetch(t, client, "GET", address, "/latest/user-data")
		require.Equal(t, http.StatusOK, status)
		client.CloseIdleConnections()
		var handshake, data bool
		var packets int
		for !data || !handshake {
			p, ok := parsePacket(capture())
			if !ok || p.source != netip.AddrPortFrom(address, httpPort) {
				continue
			}
			packets++
			require.EqualValues(t, 1, p.hopLimit, "packet %d from %s", packets, address)
			handshake = handshake || p.syn
			data = data || strings.Contains(string(p.payload), "echo web")
		}
	}
}

// capturePackets returns a function that returns the next packet that the guest's interface receives or sends.
func capturePackets(t *testing.T, guest string) func() []byte {
	t.Helper()
	protocol := int(uint16(unix.ETH_P_ALL>>8 | unix.ETH_P_ALL<<8&0xff00))
	socket := -1
	require.NoError(t, nsthread.In(openNamespace(t, guest), func() (err error) {
		if socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol); err != nil {
			return err
		}
		// The test ends instead of waiting forever for a packet that does not come.
		return unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(testTimeout / time.Second)})
	}))
	t.Cleanup(func() { _ = unix.Close(socket) })
	return func() []byte {
		buffer := make([]byte, 1<<16)
		n, _, err := unix.Recvfrom(socket, buffer, 0)
		for err == unix.EINTR {
			n, _, err = unix.Recvfrom(socket, buffer, 0)
		}
		require.NoError(t, err)
		return buffer[:n]
	}
}

// packet is a TCP packet.
type packet struct {
	source   netip.AddrPort
	hopLimit byte
	syn      bool
	payload  []byte
}

// parsePacket returns the TCP packet in an Ethernet frame. It supports what occurs in the test: no IPv6 extension
// headers.
func parsePacket(frame []byte) (p packet, ok bool) {
	const ethernet = 14
	if len(frame) < ethernet+40 {
		return p, false
	}
	ip := frame[ethernet:]
	var tcp []byte
	var source netip.Addr
	switch {
	case ip[0]>>4 == 4 && ip[9] == unix.IPPROTO_TCP:
		p.hopLimit = ip[8]
		source = netip.AddrFrom4([4]byte(ip[12:16]))
		tcp = ip[int(ip[0]&0xf)*4:]
	case ip[0]>>4 == 6 && ip[6] == unix.IPPROTO_TCP:
		p.hopLimit = ip[7]
		source = netip.AddrFrom16([16]byte(ip[8:24]))
		tcp = ip[40:]
	default:
		return p, false
	}
	if len(tcp) < 20 {
		return p, false
	}
	p.source = netip.AddrPortFrom(source, uint16(tcp[0])<<8|uint16(tcp[1]))
	p.syn = tcp[13]&2 != 0
	p.payload = tcp[int(tcp[12]>>4)*4:]
	return p, true
}

// TestCloudInitReadsBothTrees runs cloud-init's own data sources in guests, Ec2 with a token and NoCloud, and compares
// what they found with testdata/guest. The argument number is the last part of the guest's address.
func TestCloudInitReadsBothTrees(t *testing.T) {
	testenv.Program(t, "cloud-init")
	s := newTestServer(t, Limits{})
	a := newTestNetwork(t, "a")
	require.NoError(t, s.Set(t.Context(), VPC{"vpc-a", a.name, true}))
	datadriven.RunTest(t, "testdata/guest", func(t *testing.T, d *datadriven.TestData) string {
		require.Equal(t, "read", d.Cmd)
		var number int
		d.ScanArgs(t, "number", &number)
		guest := a.addGuest(t, number)
		cmd := exec.CommandContext(t.Context(), testenv.Program(t, "nsenter"), "--net=/run/netns/"+guest, "/usr/bin/python3",
			"testdata/guest.py", t.TempDir(), "http://169.254.169.254")
		var log strings.Builder
		cmd.Stderr = &log
		out, err := cmd.Output()
		require.NoError(t, err, "%s%s", out, log.String())
		return string(out)
	})
}

func newTestServer(t *testing.T, limits Limits) *Server {
	t.Helper()
	return newServerWithLookup(t, limits, testTable(t))
}

func newServerWithLookup(t *testing.T, limits Limits, lookup func(cloud.VPCID, netip.Addr) (*Instance, bool)) *Server {
	t.Helper()
	s, err := New(Options{Lookup: lookup, TokenKey: make([]byte, minKey), Log: testLog(t), Limits: limits})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s
}
