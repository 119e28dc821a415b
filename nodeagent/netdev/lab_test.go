package netdev

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// lab is a set of hosts, each a network namespace, that a bridge joins to an underlay. All its namespaces are named
// with the prefix and removed at the end of the test.
type lab struct {
	t      *testing.T
	prefix string
	hosts  []*labHost
}

type labHost struct {
	*Host
	lab  *lab
	name string // of the namespace
	vtep netip.Addr
}

var labs atomic.Int32

// removeLeft removes the namespaces of labs whose test process was killed. The name of a namespace contains the PID of
// its test process.
func removeLeft() error {
	name := regexp.MustCompile(`^nd(\d+)-\d+-`)
	all, err := os.ReadDir(namespaceDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, one := range all {
		match := name.FindStringSubmatch(one.Name())
		if match == nil {
			continue
		}
		if pid, bad := strconv.Atoi(match[1]); bad != nil || !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			continue
		}
		if failed := netns.DeleteNamed(one.Name()); failed != nil {
			if _, gone := os.Stat(filepath.Join(namespaceDir, one.Name())); !errors.Is(gone, fs.ErrNotExist) { // another run may have removed it
				err = errors.Join(err, failed)
			}
		}
	}
	return err
}

// removeLeftOnce calls removeLeft for the first lab of the process.
var removeLeftOnce = sync.OnceValue(removeLeft)

// TestRemoveLeft checks that only namespaces of labs whose process has ended are removed.
func TestRemoveLeft(t *testing.T) {
	ended := exec.Command("true")
	require.NoError(t, ended.Run())
	left := fmt.Sprintf("nd%d-1-u", ended.Process.Pid)
	kept := []string{fmt.Sprintf("nd%d-1000000-u", os.Getpid()), fmt.Sprintf("other-nd%d-1-u", ended.Process.Pid)}
	for _, name := range append(kept, left) {
		run(t, "ip", "netns", "add", name)
		t.Cleanup(func() { _ = netns.DeleteNamed(name) })
	}
	require.NoError(t, removeLeft())
	require.NoFileExists(t, filepath.Join(namespaceDir, left))
	for _, name := range kept {
		require.FileExists(t, filepath.Join(namespaceDir, name))
	}
}

// newLab makes hosts with the VTEPs 192.0.2.1, 192.0.2.2, … and an underlay MTU of 1500 bytes.
func newLab(t *testing.T, hosts int) *lab {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test makes network namespaces and needs root")
	}
	require.NoError(t, removeLeftOnce())
	l := &lab{t: t, prefix: fmt.Sprintf("nd%d-%d-", os.Getpid(), labs.Add(1))}
	t.Cleanup(l.remove)
	l.addNamespace("u")
	l.ip("u", "link add underlay type bridge")
	l.ip("u", "link set underlay up")
	for i := range hosts {
		name := fmt.Sprintf("h%d", i+1)
		l.addNamespace(name)
		l.ip(name, "link add eth0 type veth peer name %s netns %su", name, l.prefix)
		l.ip("u", "link set %s master underlay up", name)
		vtep := netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
		l.ip(name, "address add %s/24 dev eth0", vtep)
		l.ip(name, "address add fd99::%d/64 dev eth0 nodad", i+1)
		l.ip(name, "link set eth0 up")
		host := &labHost{lab: l, name: name, vtep: vtep}
		host.open(Options{VTEP: vtep, Device: "eth0"})
		l.hosts = append(l.hosts, host)
	}
	return l
}

// open opens the Host, with the host's namespace and a prefix of its own.
func (h *labHost) open(o Options) {
	o.Namespace = h.lab.path(h.name)
	o.Prefix = h.lab.prefix + h.name + "-"
	host, err := New(o)
	require.NoError(h.lab.t, err)
	h.lab.t.Cleanup(host.Close)
	h.Host = host
}

func (l *lab) path(name string) string { return filepath.Join(namespaceDir, l.prefix+name) }

func (l *lab) addNamespace(name string) {
	l.t.Helper()
	run(l.t, "ip", "netns", "add", l.prefix+name)
	l.ip(name, "link set lo up")
}

// remove deletes all namespaces of the lab, also those that its hosts made.
func (l *lab) remove() {
	paths, _ := filepath.Glob(filepath.Join(namespaceDir, l.prefix+"*"))
	for _, path := range paths {
		if err := netns.DeleteNamed(filepath.Base(path)); err != nil {
			l.t.Errorf("remove %s: %v", path, err)
		}
	}
}

// ip runs ip(8) in a namespace of the lab and returns its output.
func (l *lab) ip(name, format string, args ...any) string {
	l.t.Helper()
	command := append([]string{"-n", l.prefix + name}, strings.Fields(fmt.Sprintf(format, args...))...)
	return run(l.t, "ip", command...)
}

// bridge runs bridge(8) in a namespace of the lab and returns its output.
func (l *lab) bridge(name, format string, args ...any) string {
	l.t.Helper()
	command := append([]string{"-n", l.prefix + name}, strings.Fields(fmt.Sprintf(format, args...))...)
	return run(l.t, "bridge", command...)
}

// tc runs tc(8) in a namespace of the lab and returns its output.
func (l *lab) tc(name, format string, args ...any) string {
	l.t.Helper()
	command := append([]string{"-n", l.prefix + name}, strings.Fields(fmt.Sprintf(format, args...))...)
	return run(l.t, "tc", command...)
}

// run runs a command, which must exit with code 0, and returns its standard output. The standard error is left out:
// ip(8) can warn that a network namespace was deleted while it listed devices, which is not part of the configuration.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	require.NoError(t, err, "%s %s: %s%s", name, strings.Join(args, " "), &stdout, &stderr)
	return stdout.String()
}

// in calls f in a namespace of the lab, on a thread that ends with the call.
func (l *lab) in(name string, f func() error) error {
	return nsthread.InNamed(l.prefix+name, f)
}

// apply prepares a VPC on the host, attaches a new namespace for each port without a device, and activates the ports.
// It returns the changes of both calls.
func (h *labHost) apply(vpc cloud.HostVPC) []Change {
	t := h.lab.t
	t.Helper()
	prepared, err := h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	for _, id := range prepared.Missing {
		h.attach(vpc, id)
	}
	activated, err := h.Activate(t.Context(), vpc)
	require.NoError(t, err)
	require.Empty(t, activated.Missing)
	return append(prepared.Changes, activated.Changes...)
}

// attach makes the namespace of a port, or uses the one it has, and attaches it.
func (h *labHost) attach(vpc cloud.HostVPC, id cloud.PortID) {
	h.lab.t.Helper()
	name := h.endpoint(vpc.ID, id)
	if _, err := os.Stat(h.lab.path(name)); err != nil {
		h.lab.addNamespace(name)
	}
	require.NoError(h.lab.t, h.AttachVeth(h.lab.t.Context(), vpc, id, Endpoint{Namespace: h.lab.path(name), Device: "eth0"}))
}

// endpoint returns the name of a port's namespace in the lab.
func (h *labHost) endpoint(vpc cloud.VPCID, port cloud.PortID) string {
	return fmt.Sprintf("e-%s-%s-%s", h.name, vpc, port)
}

// vpcName returns the name of the VPC's namespace in the lab.
func (h *labHost) vpcName(id cloud.VPCID) string { return h.Host.Namespace(id)[len(h.lab.prefix):] }

// ping sends one echo request with size bytes of IP packet from a namespace of the lab, without permitting fragments,
// and returns an error if the answer does not arrive in the given time.
func (l *lab) ping(from string, to netip.Addr, size int, wait time.Duration) error {
	network, listen, request, reply, protocol, header := "ip4:icmp", "0.0.0.0", icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply), 1, 20
	if to.Is6() {
		network, listen, request, reply, protocol, header = "ip6:ipv6-icmp", "::", ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply, 58, 40
	}
	var conn net.PacketConn
	err := l.in(from, func() (err error) {
		if conn, err = net.ListenPacket(network, listen); err == nil {
			err = forbidFragments(conn.(*net.IPConn), to.Is6())
		}
		return err
	})
	if conn != nil {
		defer conn.Close()
	}
	if err != nil {
		return err
	}
	id := int(echoID.Add(1)) & 0xffff
	message := icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Seq: 1, Data: make([]byte, size-header-8)}}
	packet, err := message.Marshal(nil)
	if err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	if _, err := conn.WriteTo(packet, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return err
	}
	for buffer := make([]byte, 65536); ; {
		n, _, err := conn.ReadFrom(buffer)
		if err != nil {
			return err
		}
		answer, err := icmp.ParseMessage(protocol, buffer[:n])
		if err != nil {
			return err
		}
		if echo, ok := answer.Body.(*icmp.Echo); ok && answer.Type == reply && echo.ID == id {
			return nil
		}
	}
}

var echoID atomic.Int32

func forbidFragments(conn *net.IPConn, v6 bool) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	level, option, value := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO
	if v6 {
		level, option, value = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO
	}
	var failed error
	return errors.Join(raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), level, option, value) }), failed)
}

// requirePing requires that the address answers within 10 seconds.
func (l *lab) requirePing(from, to string) {
	l.t.Helper()
	var last error
	require.Eventually(l.t, func() bool {
		last = l.ping(from, netip.MustParseAddr(to), 100, time.Second)
		return last == nil
	}, 10*time.Second, 10*time.Millisecond, "ping from %s to %s", from, to)
	require.NoError(l.t, last)
}

// allProtocols is ETH_P_ALL in network byte order, as packet(7) expects it.
const allProtocols = unix.ETH_P_ALL << 8

// sniff counts the frames that cross the underlay until the test ends.
func (l *lab) sniff() *sniffer {
	l.t.Helper()
	fd := -1
	require.NoError(l.t, l.in("u", func() error {
		s, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, allProtocols)
		if err != nil {
			return err
		}
		fd = s
		device, err := net.InterfaceByName("h1")
		if err != nil {
			return err
		}
		return unix.Bind(s, &unix.SockaddrLinklayer{Protocol: allProtocols, Ifindex: device.Index})
	}))
	file := os.NewFile(uintptr(fd), "sniffer")
	s := &sniffer{done: make(chan struct{})}
	go s.read(file)
	l.t.Cleanup(func() {
		file.Close()
		<-s.done
	})
	return s
}

// sniffer counts the frames within VXLAN packets on host 1's link to the underlay.
type sniffer struct {
	done           chan struct{}
	echoes         atomic.Int32 // ICMP and ICMPv6 echo requests and replies
	resolutions    atomic.Int32 // ARP, and neighbour and router discovery of IPv6
	broadcasts     atomic.Int32 // all frames to a broadcast or multicast address
	unencapsulated atomic.Int32 // frames that are not VXLAN
}

func (s *sniffer) read(file *os.File) {
	defer close(s.done)
	for frame := make([]byte, 65536); ; {
		n, err := file.Read(frame)
		if err != nil {
			return
		}
		s.count(frame[:n])
	}
}

func (s *sniffer) count(frame []byte) {
	const outer = 14 + 20 + 8 + 8 // Ethernet, IPv4, UDP, VXLAN
	if len(frame) < outer+14 || frame[12] != 0x08 || frame[13] != 0 || frame[23] != 17 || frame[36] != 0x12 || frame[37] != 0xb5 {
		s.unencapsulated.Add(1)
		return
	}
	inner := frame[outer:]
	if inner[0]&1 != 0 {
		s.broadcasts.Add(1)
	}
	switch kind := uint16(inner[12])<<8 | uint16(inner[13]); {
	case kind == unix.ETH_P_ARP:
		s.resolutions.Add(1)
	case kind == unix.ETH_P_IP && inner[14+9] == 1:
		s.echoes.Add(1)
	case kind == unix.ETH_P_IPV6 && inner[14+6] == 58 && inner[14+40] >= 133:
		s.resolutions.Add(1)
	case kind == unix.ETH_P_IPV6 && inner[14+6] == 58 && inner[14+40] >= 128:
		s.echoes.Add(1)
	}
}

// requireNoThreads requires that soon no thread of the process is in another network namespace than the process.
func requireNoThreads(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return foreignThreads(t) == 0 }, 10*time.Second, 10*time.Millisecond)
}

func foreignThreads(t *testing.T) (foreign int) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own, err := os.Readlink("/proc/thread-self/ns/net")
	require.NoError(t, err)
	paths, err := filepath.Glob("/proc/self/task/*/ns/net")
	require.NoError(t, err)
	for _, path := range paths {
		if target, err := os.Readlink(path); err == nil && target != own {
			foreign++
		}
	}
	return foreign
}
