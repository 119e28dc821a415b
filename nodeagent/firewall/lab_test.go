package firewall

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// patience limits how long tests wait for the kernel.
const patience = 30 * time.Second

var namespaces atomic.Int32

var parseAddr, parsePrefix = netip.MustParseAddr, netip.MustParsePrefix

// newNamespace makes a network namespace and removes it at the end of the test.
func newNamespace(t *testing.T, label string) netns.NsHandle {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test makes network namespaces and needs root")
	}
	name := fmt.Sprintf("fwtest-%d-%d-%s", os.Getpid(), namespaces.Add(1), label)
	require.NoError(t, exec.Command("ip", "netns", "add", name).Run())
	t.Cleanup(func() { require.NoError(t, exec.Command("ip", "netns", "delete", name).Run()) })
	ns, err := netns.GetFromName(name)
	require.NoError(t, err)
	t.Cleanup(func() { ns.Close() })
	sysctlIn(t, ns, "net/ipv6/conf/all/accept_dad", "0")
	sysctlIn(t, ns, "net/ipv6/conf/default/accept_dad", "0")
	return ns
}

func sysctlIn(t *testing.T, ns netns.NsHandle, name, value string) {
	t.Helper()
	require.NoError(t, nsthread.In(ns, func() error { return os.WriteFile("/proc/sys/"+name, []byte(value), 0) }))
}

// runIn runs a program in a namespace and returns its output.
func runIn(t *testing.T, ns netns.NsHandle, input string, command ...string) string {
	t.Helper()
	var out string
	require.NoError(t, nsthread.In(ns, func() (err error) {
		out, err = run(t.Context(), input, command[0], command[1:]...)
		return err
	}))
	return out
}

// lab is a VPC with two subnets on one host. Each subnet has a bridge with the gateway's addresses.
type lab struct {
	ns       netns.NsHandle
	handle   *netlink.Handle
	firewall *Firewall
	vpc      cloud.HostVPC
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{ns: newNamespace(t, "vpc")}
	var err error
	l.handle, err = netlink.NewHandleAt(l.ns)
	require.NoError(t, err)
	t.Cleanup(l.handle.Close)
	l.restart(t)
	sysctlIn(t, l.ns, "net/ipv4/ip_forward", "1")
	sysctlIn(t, l.ns, "net/ipv6/conf/all/forwarding", "1")
	l.vpc = cloud.HostVPC{ID: "vpc", MTU: 1500, CIDR: parsePrefix("10.0.0.0/16"), CIDR6: parsePrefix("fd00::/56")}
	for i := range 2 {
		subnet := cloud.HostSubnet{
			ID:      cloud.SubnetID(fmt.Sprintf("subnet-%d", i)),
			CIDR:    parsePrefix(fmt.Sprintf("10.0.%d.0/24", i)),
			Gateway: parseAddr(fmt.Sprintf("10.0.%d.1", i)),
			CIDR6:   parsePrefix(fmt.Sprintf("fd00:0:0:%d::/64", i)),
		}
		l.vpc.Subnets = append(l.vpc.Subnets, subnet)
		mac := cloud.GatewayMAC
		l.addBridge(t, bridgeName(i), mac, netip.PrefixFrom(subnet.Gateway, 24), netip.PrefixFrom(subnet.Gateway6(), 64))
	}
	return l
}

// testOptions are the options of the tests. The denied IPv4 prefix contains the prefix of the lab's VPC.
var testOptions = Options{
	Trusted: []string{"vx*"},
	Denied:  []netip.Prefix{parsePrefix("10.0.0.0/8"), parsePrefix("2001:db8:1::/48")},
}

func bridgeName(subnet int) string { return fmt.Sprintf("br%d", subnet) }

// restart replaces the Firewall, as a restart of the agent does.
func (l *lab) restart(t *testing.T) {
	t.Helper()
	var err error
	l.firewall, err = New(testOptions)
	require.NoError(t, err)
}

func (l *lab) addBridge(t *testing.T, name string, mac cloud.MAC, addresses ...netip.Prefix) {
	t.Helper()
	snooping := false
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name, HardwareAddr: mac[:]}, MulticastSnooping: &snooping}
	require.NoError(t, l.handle.LinkAdd(bridge))
	for _, a := range addresses {
		require.NoError(t, l.handle.AddrAdd(bridge, address(a)))
	}
	require.NoError(t, l.handle.LinkSetUp(bridge))
}

// address returns an address without duplicate address detection, so that it can be used at once.
func address(p netip.Prefix) *netlink.Addr {
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	return a
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// endpoint is a guest: a namespace with one interface, whose other end is a bridge port of the VPC.
type endpoint struct {
	ns     netns.NsHandle
	subnet int
	port   cloud.HostPort
}

// add makes an endpoint with port security in a subnet of the lab. Its number determines its addresses. Its kernel
// sends nothing by itself until configure is called.
func (l *lab) add(t *testing.T, subnet, number int, groups ...cloud.SecurityGroupID) *endpoint {
	t.Helper()
	s := &l.vpc.Subnets[subnet]
	ip := s.CIDR.Addr().As4()
	ip[3] = byte(number)
	ip6 := s.CIDR6.Addr().As16()
	ip6[15] = byte(number)
	e := &endpoint{subnet: subnet, port: cloud.HostPort{
		ID: cloud.PortID(fmt.Sprintf("port-%d-%d", subnet, number)), Device: fmt.Sprintf("p%d-%d", subnet, number),
		MAC: cloud.MAC{2, 0, 0, 0, byte(subnet), byte(number)}, IP: netip.AddrFrom4(ip), IP6: netip.AddrFrom16(ip6),
		Secured: true, Groups: groups,
	}}
	e.ns = newNamespace(t, e.port.Device)
	sysctlIn(t, e.ns, "net/ipv6/conf/default/disable_ipv6", "1")
	l.attach(t, e.ns, e.port.Device, e.port.MAC, bridgeName(subnet))
	s.Ports = append(s.Ports, e.port)
	return e
}

// attach connects a namespace to a bridge by a veth pair, whose end in the namespace is named eth0.
func (l *lab) attach(t *testing.T, ns netns.NsHandle, device string, mac cloud.MAC, bridge string) {
	t.Helper()
	master, err := l.handle.LinkByName(bridge)
	require.NoError(t, err)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: device, MasterIndex: master.Attrs().Index, MTU: 1500},
		PeerName: "eth0", PeerHardwareAddr: mac[:], PeerNamespace: netlink.NsFd(int(ns)), PeerMTU: 1500}
	require.NoError(t, l.handle.LinkAdd(veth))
	// The bridge end sends nothing by itself.
	sysctlIn(t, l.ns, "net/ipv6/conf/"+device+"/disable_ipv6", "1")
	require.NoError(t, l.handle.LinkSetUp(veth))
	// Without a static entry the bridge would flood frames to all ports until the guest has sent one.
	require.NoError(t, l.handle.NeighSet(&netlink.Neigh{LinkIndex: veth.Attrs().Index, Family: unix.AF_BRIDGE,
		State: netlink.NUD_NOARP, Flags: netlink.NTF_MASTER, HardwareAddr: mac[:]}))
	inside, err := netlink.NewHandleAt(ns)
	require.NoError(t, err)
	defer inside.Close()
	eth0, err := inside.LinkByName("eth0")
	require.NoError(t, err)
	require.NoError(t, inside.LinkSetARPOff(eth0))
	require.NoError(t, inside.LinkSetUp(eth0))
}

// configure gives the endpoint its addresses and default routes, so that its kernel can send.
func (e *endpoint) configure(t *testing.T, l *lab) {
	t.Helper()
	sysctlIn(t, e.ns, "net/ipv6/conf/eth0/disable_ipv6", "0")
	inside, err := netlink.NewHandleAt(e.ns)
	require.NoError(t, err)
	defer inside.Close()
	eth0, err := inside.LinkByName("eth0")
	require.NoError(t, err)
	lo, err := inside.LinkByName("lo")
	require.NoError(t, err)
	require.NoError(t, inside.LinkSetUp(lo))
	require.NoError(t, inside.LinkSetARPOn(eth0))
	for _, p := range []netip.Prefix{netip.PrefixFrom(e.port.IP, 24), netip.PrefixFrom(e.port.IP6, 64)} {
		require.NoError(t, inside.AddrAdd(eth0, address(p)))
	}
	subnet := &l.vpc.Subnets[e.subnet]
	for _, gateway := range []netip.Addr{subnet.Gateway, subnet.Gateway6()} {
		require.NoError(t, inside.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: gateway.AsSlice()}))
	}
}

// change modifies the wanted state of an endpoint's port.
func (l *lab) change(e *endpoint, f func(*cloud.HostPort)) {
	ports := l.vpc.Subnets[e.subnet].Ports
	for i := range ports {
		if ports[i].ID == e.port.ID {
			f(&ports[i])
			e.port = ports[i]
		}
	}
}

// group sets the rules of a group.
func (l *lab) group(id cloud.SecurityGroupID, rules ...cloud.Rule) {
	for i := range l.vpc.Groups {
		if l.vpc.Groups[i].ID == id {
			l.vpc.Groups[i].Rules = rules
			return
		}
	}
	l.vpc.Groups = append(l.vpc.Groups, cloud.HostGroup{ID: id, Rules: rules})
}

// members sets the addresses of a group.
func (l *lab) members(id cloud.SecurityGroupID, addresses ...netip.Addr) {
	for i := range l.vpc.Members {
		if l.vpc.Members[i].ID == id {
			l.vpc.Members[i].Addresses = addresses
			return
		}
	}
	l.vpc.Members = append(l.vpc.Members, cloud.GroupMembers{ID: id, Addresses: addresses})
}

// set applies the wanted state.
func (l *lab) set(t *testing.T) Result {
	t.Helper()
	r, err := l.firewall.Set(t.Context(), l.ns, l.vpc)
	require.NoError(t, err)
	return r
}

func (l *lab) drops(t *testing.T) Drops { t.Helper(); return l.counters(t).Drops }

func (l *lab) counters(t *testing.T) Counters {
	t.Helper()
	c, err := l.firewall.Counters(t.Context(), l.ns)
	require.NoError(t, err)
	return c
}

// dump returns the package's state in the kernel, without counters.
func (l *lab) dump(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, command := range []string{
		"nft list table bridge trivet", "iptables-nft-save -t filter", "ip6tables-nft-save -t filter", "ipset save",
	} {
		lines := strings.Split(runIn(t, l.ns, "", strings.Fields(command)...), "\n")
		if strings.Contains(command, "tables-nft-save") {
			// The order of chains is not defined. The order of the rules in a chain is.
			slices.SortStableFunc(lines, func(a, b string) int { return cmp.Compare(chainOf(a), chainOf(b)) })
		} else {
			// The order of a set's elements is not defined.
			for i := range lines {
				elements := strings.Split(strings.Trim(lines[i], "\t ,"), ", ")
				slices.Sort(elements)
				lines[i] = strings.Join(elements, ", ")
			}
			slices.Sort(lines)
		}
		for _, line := range lines {
			line, _, _ = strings.Cut(line, " [") // counters of chains
			line, _, _ = strings.Cut(line, " hashsize ")
			if !strings.HasPrefix(line, "#") && !strings.Contains(line, "packets") {
				b.WriteString(line + "\n")
			}
		}
	}
	for _, s := range sysctls(l.vpc.LooseTCP) {
		b.WriteString(s.name + " = " + runIn(t, l.ns, "", "cat", "/proc/sys/"+s.name))
	}
	return b.String()
}

// chainOf returns the first two words of a line of iptables-save.
func chainOf(line string) string {
	fields := strings.Fields(line)
	return strings.Join(fields[:min(2, len(fields))], " ")
}

// allowAll returns rules that permit everything in the given directions.
func allowAll(directions ...cloud.Direction) []cloud.Rule {
	var rules []cloud.Rule
	for _, d := range directions {
		rules = append(rules,
			cloud.Rule{Direction: d, AnyProtocol: true}, cloud.Rule{Direction: d, AnyProtocol: true, IPv6: true})
	}
	return rules
}
