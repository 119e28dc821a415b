package edge

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// randomStage is a host with two external networks and the namespaces of three VPCs. Each VPC has one guest, with the
// addresses of fixedAddresses. The namespace "world" is the gateway of both networks and has a server of the internet.
type randomStage struct {
	*nettest.Namespaces
	t       *testing.T
	random  *rand.Rand
	options Options
	edge    *Edge
	failing string // while this file exists, nft fails
	old     map[string]*probe
}

// distant is the address of the server of the internet.
var distant = netip.MustParseAddrPort("198.51.100.1:7000")

var (
	stageVPCs      = []cloud.VPCID{"a", "b", "c"}
	fixedAddresses = []netip.Addr{
		netip.MustParseAddr("10.0.1.10"), netip.MustParseAddr("10.0.1.11"), netip.MustParseAddr("10.0.1.12"),
	}
)

func newRandomStage(t *testing.T, seed uint64) *randomStage {
	s := &randomStage{
		Namespaces: nettest.NewNamespaces(t, "er"), t: t, random: rand.New(rand.NewPCG(seed, 0)), old: map[string]*probe{},
	}
	s.failing = failOnRequest(t)
	s.Add("world")
	s.Add("host")
	s.IP("host", "link add eth3 type bridge")
	s.IP("host", "link set eth3 up")
	for device, network := range map[string]string{"eth1": "203.0.113.1/24", "eth2": "192.0.2.1/24"} {
		s.IP("world", "link add %s type veth peer name %[1]s netns %shost", device, s.Prefix)
		s.IP("world", "address add %s dev %s", network, device)
		s.IP("world", "link set %s up", device)
		s.IP("host", "link set %s up", device)
	}
	s.IP("world", "address add %s/32 dev lo", distant.Addr())
	s.answer("world", distant)
	for _, id := range stageVPCs {
		s.Add(string(id))
		s.Add("g" + string(id))
		s.IP(string(id), "link add br1 type veth peer name eth0 netns %sg%s", s.Prefix, id)
		s.IP(string(id), "address add 10.0.1.1/24 dev br1")
		s.IP(string(id), "link set br1 up")
		require.NoError(t, s.In(string(id), func() error {
			return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
		}))
		for _, a := range fixedAddresses {
			s.IP("g"+string(id), "address add %s/24 dev eth0", a)
		}
		s.IP("g"+string(id), "link set eth0 up")
		// Permanent entries, because the kernel limits the number of the others in all namespaces together.
		mac := s.macOf("g"+string(id), "eth0")
		for _, a := range fixedAddresses {
			s.IP(string(id), "neighbour replace %s lladdr %s dev br1", a, mac)
		}
		s.IP("g"+string(id), "neighbour replace 10.0.1.1 lladdr %s dev eth0", s.macOf(string(id), "br1"))
		s.IP("g"+string(id), "route add default via 10.0.1.1")
		for _, a := range fixedAddresses {
			s.answer("g"+string(id), netip.AddrPortFrom(a, distant.Port()))
		}
	}
	s.options = Options{Prefix: s.Prefix + "host-", Namespace: s.Path("host"), External: map[string]External{
		internet: {Interface: "eth1", Address: parsePrefix("203.0.113.2/24"), Gateway: parseAddr("203.0.113.1")},
		"office": {Interface: "eth2", Address: parsePrefix("192.0.2.2/24"), Gateway: parseAddr("192.0.2.1")},
	}}
	s.restart()
	return s
}

// macOf returns the MAC address of a device.
func (s *randomStage) macOf(name, device string) string {
	s.t.Helper()
	return regexp.MustCompile(`link/ether (\S+)`).FindStringSubmatch(s.IP(name, "link show %s", device))[1]
}

// failOnRequest makes the tested code run nft through a script that fails while a file exists. It returns the path of
// the file.
func failOnRequest(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	failing := filepath.Join(dir, "failing")
	nft, err := exec.LookPath("nft")
	require.NoError(t, err)
	script := fmt.Sprintf("#!/bin/sh\n[ -e %s ] && echo refused by the test >&2 && exit 1\nexec %s \"$@\"\n", failing, nft)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "nft"), []byte(script), 0o700))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return failing
}

// restart replaces the Edge, as a restart of the agent does.
func (s *randomStage) restart() {
	s.t.Helper()
	if s.edge != nil {
		s.edge.Close()
	}
	e, err := New(s.options)
	require.NoError(s.t, err)
	s.t.Cleanup(e.Close)
	s.edge = e
}

// answer runs a UDP server in a namespace until the test ends. The server answers each datagram with the datagram and
// the address that it came from.
func (s *randomStage) answer(name string, at netip.AddrPort) {
	s.t.Helper()
	var socket *net.UDPConn
	require.NoError(s.t, s.In(name, func() (err error) {
		socket, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		return err
	}))
	s.t.Cleanup(func() { socket.Close() })
	go func() {
		for buffer := make([]byte, 1500); ; {
			n, from, err := socket.ReadFromUDPAddrPort(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = socket.WriteToUDPAddrPort([]byte(fmt.Sprintf("%s %s %s", buffer[:n], from.Addr(), name)), from)
			}
		}
	}()
}

// probe is a UDP socket that sends to one server that answer has started.
type probe struct {
	conn net.Conn
	sent int
}

// probe makes a socket in a namespace. source is optional.
func (s *randomStage) probe(name string, source netip.Addr, to netip.AddrPort) *probe {
	s.t.Helper()
	p := &probe{}
	require.NoError(s.t, s.In(name, func() (err error) {
		d := net.Dialer{}
		if source.IsValid() {
			d.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
		}
		p.conn, err = d.DialContext(s.t.Context(), "udp4", to.String())
		return err
	}))
	s.t.Cleanup(func() { p.conn.Close() })
	return p
}

// ask returns the source address that the server sees, and the name of the server's namespace. It returns two empty
// strings if the server does not answer within the time.
func (p *probe) ask(within time.Duration) (source, server string) {
	p.sent++
	buffer := make([]byte, 1500)
	for until := time.Now().Add(within); time.Now().Before(until); {
		_, _ = fmt.Fprintf(p.conn, "%d", p.sent) // fails if the last datagram was refused
		_ = p.conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		n, err := p.conn.Read(buffer)
		if err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				time.Sleep(20 * time.Millisecond)
			}
			continue
		}
		fields := strings.Fields(string(buffer[:n]))
		if len(fields) == 3 && fields[0] == fmt.Sprint(p.sent) {
			return fields[1], fields[2]
		}
	}
	return "", ""
}

// dump returns the kernel's state in the namespaces of the VPCs and, unless Remove has deleted it, in the edge
// namespace. Values that change without a call, such as timers, are left out.
func (s *randomStage) dump() string {
	s.t.Helper()
	var b strings.Builder
	names := []string{"host-" + namespaceName}
	for _, id := range stageVPCs {
		names = append(names, string(id))
	}
	for _, name := range names {
		if _, err := os.Stat(s.Path(name)); err != nil {
			continue
		}
		for _, command := range []string{
			"-4 -o address", "-4 rule", "neighbour show proxy", "-4 route show table all", "-o link show up",
		} {
			lines := strings.Split(s.IP(name, "%s", command), "\n")
			for i, line := range lines {
				lines[i] = volatile.ReplaceAllString(line, "")
				if command == "-o link show up" {
					lines[i], _, _ = strings.Cut(lines[i], ":")
				}
			}
			slices.Sort(lines)
			fmt.Fprintf(&b, "%s: %s\n%s\n", name, command, strings.Join(lines, "\n"))
		}
		for _, chain := range strings.Split(s.Exec(name, "nft", "list", "ruleset"), "\n") {
			fmt.Fprintln(&b, chain)
		}
	}
	return b.String()
}
