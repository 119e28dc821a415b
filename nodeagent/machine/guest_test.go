package machine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/dhcp"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// bridged is a network with a bridge that has the address 10.7.0.1 and answers DHCP. Every tap is attached to it.
type bridged struct {
	*testTaps
	t      *testing.T
	name   string // of the namespace
	links  *netlink.Handle
	bridge netlink.Link
}

func newBridged(t *testing.T) *bridged {
	t.Helper()
	b := &bridged{t: t, name: fmt.Sprintf("trivet-test-machine-%d", os.Getpid()), testTaps: &testTaps{open: map[cloud.PortID]string{}}}
	require.NoError(t, onThread(func() (err error) {
		b.space, err = netns.NewNamed(b.name)
		return err
	}))
	t.Cleanup(func() { require.NoError(t, netns.DeleteNamed(b.name)); _ = b.space.Close() })
	var err error
	b.links, err = netlink.NewHandleAt(b.space, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	t.Cleanup(b.links.Close)
	require.NoError(t, b.links.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", HardwareAddr: cloud.GatewayMAC[:], MTU: 1450}}))
	b.bridge, err = b.links.LinkByName("br0")
	require.NoError(t, err)
	address, err := netlink.ParseAddr("10.7.0.1/24")
	require.NoError(t, err)
	require.NoError(t, b.links.AddrAdd(b.bridge, address))
	require.NoError(t, b.links.LinkSetUp(b.bridge))
	return b
}

// answerDHCP gives each NIC the address 10.7.0.(10+n), in their order.
func (b *bridged) answerDHCP(nics ...*agentv1.AssignedNic) {
	b.t.Helper()
	s := dhcp.Subnet{MTU: 1450, Domain: "test.internal", HostSubnet: cloud.HostSubnet{ID: "s", VNI: 1, CIDR: netip.MustParsePrefix("10.7.0.0/24"),
		Gateway: netip.MustParseAddr("10.7.0.1"), DHCP: true}}
	for i, n := range nics {
		var mac cloud.MAC
		_, err := fmt.Sscanf(n.MacAddress, "%x:%x:%x:%x:%x:%x", &mac[0], &mac[1], &mac[2], &mac[3], &mac[4], &mac[5])
		require.NoError(b.t, err)
		s.Ports = append(s.Ports, cloud.HostPort{ID: cloud.PortID(n.PortId), Device: n.PortId, HostName: "web", MAC: mac,
			IP: netip.AddrFrom4([4]byte{10, 7, 0, byte(10 + i)})})
	}
	r := dhcp.New(b.name, "br0", slog.New(slog.DiscardHandler))
	b.t.Cleanup(r.Close)
	require.NoError(b.t, r.Set(s))
}

func (b *bridged) OpenTap(ctx context.Context, port cloud.PortID) (*os.File, error) {
	file, err := b.testTaps.OpenTap(ctx, port)
	if err != nil {
		return nil, err
	}
	link, err := b.links.LinkByName(string(port))
	if err == nil {
		err = errors.Join(b.links.LinkSetMaster(link, b.bridge), b.links.LinkSetUp(link))
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// run executes a program in the network's namespace and returns its output.
func (b *bridged) run(args ...string) (string, error) {
	var out []byte
	err := onThread(func() (err error) {
		if err := netns.Set(b.space); err != nil {
			return err
		}
		out, err = exec.Command(args[0], args[1:]...).CombinedOutput()
		return err
	})
	return string(out), err
}

// get requests the page / of the HTTP server at an address from the network's namespace, and returns the whole reply.
// Busybox's wget is not used, because that of Debian's static build crashes.
func (b *bridged) get(address string) (string, error) {
	var conn net.Conn
	err := onThread(func() (err error) { // the connection keeps the namespace in which its socket was made
		if err := netns.Set(b.space); err != nil {
			return err
		}
		conn, err = net.DialTimeout("tcp", net.JoinHostPort(address, "80"), 5*time.Second)
		return err
	})
	if err != nil {
		return "", err
	}
	defer conn.Close()
	err = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if err == nil {
		_, err = io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n")
	}
	if err != nil {
		return "", err
	}
	page, err := io.ReadAll(conn)
	return string(page), err
}

// answers waits until the guest at the address answers a ping, and serves its host name over HTTP.
func (b *bridged) answers(address string) {
	b.t.Helper()
	require.Eventually(b.t, func() bool { _, err := b.run("busybox", "ping", "-c", "1", "-W", "2", address); return err == nil },
		within, 50*time.Millisecond, "%s answers a ping", address)
	require.Eventually(b.t, func() bool {
		page, err := b.get(address)
		return err == nil && strings.HasPrefix(page, "HTTP/1.1 200") && strings.HasSuffix(page, "\r\n\r\nweb\n")
	}, within, 50*time.Millisecond, "%s serves its host name", address)
}

// linux returns the assignment of a VM that boots the small guest of images/guest directly, and lets the lab provide its
// kernel and initrd.
func (l *lab) linux(n int) *agentv1.AssignedVm {
	l.Helper()
	dir, err := filepath.Abs("../../.build/guest")
	require.NoError(l, err)
	out, err := exec.CommandContext(l.Context(), "../../images/guest/build", dir).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 69 {
		testenv.Skip(l, string(out))
	}
	require.NoError(l, err, "%s", out)
	text, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	require.NoError(l, err)
	var manifest struct{ Cmdline string }
	require.NoError(l, json.Unmarshal(text, &manifest))
	provide := func(name string) *agentv1.AssignedImage {
		data, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(l, err)
		sum := sha256.Sum256(data)
		l.more[hex.EncodeToString(sum[:])] = data
		return &agentv1.AssignedImage{ImageId: name, Sha256: hex.EncodeToString(sum[:]), SizeBytes: uint64(len(data)),
			Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW}
	}
	want := l.blank(n)
	want.Kernel, want.Initrd, want.Cmdline, want.MemoryMib = provide("vmlinuz"), provide("initrd.lz4"), manifest.Cmdline, 192
	return want
}

// TestGuestOnNetwork boots Linux with a network interface. The guest gets its address by DHCP, answers pings and HTTP,
// also while no agent runs and under the next agent. Measure returns the bytes that the guest received and sent. An
// interface that is attached to the running guest gets an address too; the guest releases it when it is detached,
// without a reset.
func TestGuestOnNetwork(t *testing.T) {
	l, b := newLab(t), newBridged(t)
	l.stop()
	l.taps = b
	l.start()
	want := on(l.linux(1))
	want.Nics = []*agentv1.AssignedNic{nic("a", 1)}
	b.answerDHCP(nic("a", 1), nic("b", 2))
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	l.says(want.VmId, "NIC name=eth0 mac=02:00:5e:10:00:01 addr=10.7.0.10/24 gw=10.7.0.1 host=web mtu=1450", 1)
	b.answers("10.7.0.10")
	used := l.Measure(t.Context())[cloud.VMID(want.VmId)]
	require.Positive(t, used.NetworkReceivedBytes)
	require.Positive(t, used.NetworkTransmitBytes)

	l.stop()
	b.answers("10.7.0.10")
	l.start()
	l.assign(want)
	l.seesNICs(want, attached("a"))
	b.answers("10.7.0.10")
	require.Equal(t, 1, b.count(), "an adopted guest keeps its tap")
	later := l.Measure(t.Context())[cloud.VMID(want.VmId)]
	require.Greater(t, later.NetworkReceivedBytes, used.NetworkReceivedBytes, "counters are those since the guest started")

	want = with(want, func(w *agentv1.AssignedVm) { w.Nics = append(slices.Clone(w.Nics), nic("b", 2)) })
	l.assign(want)
	l.seesNICs(want, attached("a"), attached("b"))
	l.says(want.VmId, "NIC name=eth1 mac=02:00:5e:10:00:02 addr=10.7.0.11/24", 1)
	b.answers("10.7.0.11")

	want = with(want, func(w *agentv1.AssignedVm) { w.Nics = w.Nics[:1] })
	l.assign(want)
	o := l.seesNICs(want, attached("a"))
	require.Empty(t, o.LastError)
	l.says(want.VmId, "NIC name=eth1 removed", 1)
	require.Equal(t, []cloud.PortID{"tap-a"}, b.ports())
	_, err := b.links.LinkByName("tap-b")
	require.Error(t, err, "the tap of a detached interface disappears")
	b.answers("10.7.0.10")
}
