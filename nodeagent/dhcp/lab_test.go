package dhcp

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/insomniacslk/dhcp/dhcpv6/nclient6"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// The tests in kernel_test.go use network namespaces of the real kernel: one for a VPC with bridges, and one for each
// guest, joined by veth pairs.

var discardLog = slog.New(slog.DiscardHandler)

const (
	patience = 20 * time.Second // limit of every wait
	poll     = 20 * time.Millisecond
)

// newNamespace makes a network namespace that is removed with the test, and returns its name and a handle.
func newNamespace(t *testing.T, suffix string) (string, *netlink.Handle) {
	require.Zero(t, os.Getuid(), "this test makes network namespaces: run it as root")
	name := fmt.Sprintf("dhcptest-%d-%s", os.Getpid(), suffix)
	require.NoError(t, exec.Command("ip", "netns", "add", name).Run())
	t.Cleanup(func() { require.NoError(t, netns.DeleteNamed(name)) })
	ns, err := netns.GetFromName(name)
	require.NoError(t, err)
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	t.Cleanup(h.Close)
	return name, h
}

// setSysctl writes a file below /proc/sys/net of a namespace.
func setSysctl(t *testing.T, namespace, path, value string) {
	require.NoError(t, nsthread.InNamed(namespace, func() error {
		return os.WriteFile(filepath.Join("/proc/sys/net", path), []byte(value), 0)
	}))
}

func readSysctl(t *testing.T, namespace, path string) string {
	var value []byte
	require.NoError(t, nsthread.InNamed(namespace, func() (err error) {
		value, err = os.ReadFile(filepath.Join("/proc/sys/net", path))
		return err
	}))
	return strings.TrimSpace(string(value))
}

func addAddress(t *testing.T, h *netlink.Handle, link netlink.Link, prefix string) {
	a, err := netlink.ParseAddr(prefix)
	require.NoError(t, err)
	a.Flags |= unix.IFA_F_NODAD
	require.NoError(t, h.AddrAdd(link, a))
}

// vpc is the namespace of a VPC.
type vpc struct {
	name string
	h    *netlink.Handle
}

func newVPC(t *testing.T) *vpc {
	v := &vpc{}
	v.name, v.h = newNamespace(t, "vpc")
	setSysctl(t, v.name, "ipv4/ip_forward", "1")
	setSysctl(t, v.name, "ipv6/conf/all/forwarding", "1")
	return v
}

// addBridge adds the bridge of a subnet, with the addresses of the gateway.
func (v *vpc) addBridge(t *testing.T, device string, s Subnet) {
	require.NoError(t, v.h.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: device, HardwareAddr: cloud.GatewayMAC[:], MTU: int(s.MTU)}}))
	bridge, err := v.h.LinkByName(device)
	require.NoError(t, err)
	setSysctl(t, v.name, "ipv6/conf/"+device+"/accept_dad", "0")
	addAddress(t, v.h, bridge, netip.PrefixFrom(s.Gateway, s.CIDR.Bits()).String())
	addAddress(t, v.h, bridge, netip.PrefixFrom(s.Gateway6(), 64).String())
	require.NoError(t, v.h.LinkSetUp(bridge))
}

// run executes a program in the namespace and returns its output.
func (v *vpc) run(t *testing.T, name string, args ...string) string {
	var out []byte
	require.NoError(t, nsthread.InNamed(v.name, func() (err error) {
		out, err = exec.Command(name, args...).CombinedOutput()
		return err
	}))
	return string(out)
}

// guest is a namespace with one network interface, eth0.
type guest struct {
	name string
	h    *netlink.Handle
	eth0 netlink.Link
}

// addGuest connects a guest to a bridge. Its interface is up and has only a link-local address.
func (v *vpc) addGuest(t *testing.T, bridge, suffix string, mac cloud.MAC) *guest {
	g := &guest{}
	g.name, g.h = newNamespace(t, suffix)
	ns, err := netns.GetFromName(g.name)
	require.NoError(t, err)
	defer ns.Close()
	require.NoError(t, v.h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: suffix}, PeerName: "eth0",
		PeerNamespace: netlink.NsFd(ns), PeerHardwareAddr: mac[:]}))
	port, err := v.h.LinkByName(suffix)
	require.NoError(t, err)
	master, err := v.h.LinkByName(bridge)
	require.NoError(t, err)
	require.NoError(t, v.h.LinkSetMaster(port, master))
	require.NoError(t, v.h.LinkSetUp(port))
	setSysctl(t, g.name, "ipv6/conf/eth0/accept_dad", "0")
	g.eth0, err = g.h.LinkByName("eth0")
	require.NoError(t, err)
	require.NoError(t, g.h.LinkSetUp(g.eth0))
	return g
}

// addresses returns the addresses of eth0 with global scope.
func (g *guest) addresses(t *testing.T) []string {
	all, err := g.h.AddrList(g.eth0, netlink.FAMILY_ALL)
	require.NoError(t, err)
	var found []string
	for _, a := range all {
		if a.Scope == unix.RT_SCOPE_UNIVERSE {
			found = append(found, a.IPNet.String())
		}
	}
	return found
}

// ping sends an echo request from the guest.
func (g *guest) ping(t *testing.T, to string) {
	require.NoError(t, nsthread.InNamed(g.name, func() error {
		out, err := exec.Command("busybox", "ping", "-c", "1", "-W", "5", to).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ping: %s: %w", out, err)
		}
		return nil
	}))
}

// serveSubnet starts a responder that ends with the test.
func serveSubnet(t *testing.T, namespace, device string, s Subnet) *Responder {
	r := New(namespace, device, discardLog)
	t.Cleanup(r.Close)
	require.NoError(t, r.Set(s))
	return r
}

// client4 returns a client of another implementation in the guest.
func client4(t *testing.T, g *guest) *nclient4.Client {
	return patientClient4(t, g, 5)
}

// patientClient4 returns a DHCPv4 client that sends each message up to a number of times, once per second.
func patientClient4(t *testing.T, g *guest, tries int) *nclient4.Client {
	var c *nclient4.Client
	require.NoError(t, nsthread.InNamed(g.name, func() (err error) {
		c, err = nclient4.New("eth0", nclient4.WithTimeout(time.Second), nclient4.WithRetry(tries))
		return err
	}))
	t.Cleanup(func() { c.Close() })
	return c
}

// client6 waits until the guest has a link-local address and returns a DHCPv6 client.
func client6(t *testing.T, g *guest) *nclient6.Client {
	var c *nclient6.Client
	require.Eventually(t, func() bool {
		return nsthread.InNamed(g.name, func() (err error) {
			c, err = nclient6.New("eth0", nclient6.WithTimeout(time.Second), nclient6.WithRetry(5))
			return err
		}) == nil
	}, patience, poll)
	t.Cleanup(func() { c.Close() })
	return c
}
