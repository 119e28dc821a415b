package edge

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"

	"github.com/trivet-cloud/trivet/nodeagent/balancer"
	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// patience limits how long tests wait for the kernel.
const patience = 20 * time.Second

// blocked is how long tests wait for packets that must not arrive.
const blocked = 700 * time.Millisecond

const (
	outside  = "198.51.100.1:7000" // a server of the internet
	internet = "internet"          // name of the external network
)

var parseAddr, parsePrefix = netip.MustParseAddr, netip.MustParsePrefix

// lab is a set of hosts, each a network namespace, that are connected to an external network with the prefix
// 203.0.113.0/24. The namespace "internet" is the network's gateway, 203.0.113.1, and has servers.
type lab struct {
	*nettest.Namespaces
	t     *testing.T
	hosts []*labHost
}

type labHost struct {
	lab      *lab
	name     string
	options  Options
	edge     *Edge
	devices  *netdev.Host
	firewall *firewall.Firewall
	vpcs     []*cloud.HostVPC
}

func newLab(t *testing.T, hosts int) *lab {
	t.Helper()
	l := &lab{t: t, Namespaces: nettest.NewNamespaces(t, "ed")}
	l.Add("x")
	l.IP("x", "link add ext type bridge")
	l.IP("x", "link set ext up")
	l.Add("internet")
	l.plug("internet", "eth0", "203.0.113.1/24")
	l.IP("internet", "address add 198.51.100.1/32 dev lo")
	l.IP("internet", "address add 198.51.100.2/32 dev lo")
	l.serve("internet", outside)
	l.serve("internet", "198.51.100.2:7000")
	for i := range hosts {
		h := &labHost{lab: l, name: fmt.Sprintf("h%d", i+1)}
		l.Add(h.name)
		l.plug(h.name, "eth1", "")
		prefix := l.Prefix + h.name + "-"
		var err error
		h.devices, err = netdev.New(netdev.Options{
			VTEP: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), Namespace: l.Path(h.name), Prefix: prefix,
		})
		require.NoError(t, err)
		t.Cleanup(h.devices.Close)
		h.firewall, err = firewall.New(firewall.Options{Trusted: []string{"vx*"}})
		require.NoError(t, err)
		h.options = Options{
			Prefix: prefix, Namespace: l.Path(h.name),
			External: map[string]External{internet: {
				Interface: "eth1", Address: parsePrefix(fmt.Sprintf("203.0.113.%d/24", i+2)), Gateway: parseAddr("203.0.113.1"),
			}},
		}
		h.restart()
		l.hosts = append(l.hosts, h)
	}
	return l
}

// restart replaces the Edge, as a restart of the agent does.
func (h *labHost) restart() {
	h.lab.t.Helper()
	e, err := New(h.options)
	require.NoError(h.lab.t, err)
	h.lab.t.Cleanup(e.Close)
	h.edge = e
}

// plug connects a namespace to the external network.
func (l *lab) plug(name, device, address string) {
	l.t.Helper()
	l.IP(name, "link add %s type veth peer name %s netns %sx", device, name, l.Prefix)
	// Without a link-local address, whose routes would appear at any time during the test.
	l.IP(name, "link set %s addrgenmode none", device)
	l.IP("x", "link set %s master ext up", name)
	if address != "" {
		l.IP(name, "address add %s dev %s", address, device)
	}
	l.IP(name, "link set %s up", device)
}

// nft runs nft(8) in a namespace of the lab and returns its output.
func (l *lab) nft(name, command string) string {
	l.t.Helper()
	return l.Run("ip", "netns", "exec", l.Prefix+name, "nft", command)
}

// requirePing requires that an address answers an ICMP echo request.
func (l *lab) requirePing(from, to string) {
	l.t.Helper()
	var conn net.PacketConn
	require.NoError(l.t, l.In(from, func() (err error) {
		conn, err = net.ListenPacket("ip4:icmp", "0.0.0.0")
		return err
	}))
	defer conn.Close()
	echo := &icmp.Echo{ID: os.Getpid() & 0xffff, Seq: 1, Data: []byte("data")}
	message := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: echo}
	packet, err := message.Marshal(nil)
	require.NoError(l.t, err)
	require.NoError(l.t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = conn.WriteTo(packet, &net.IPAddr{IP: net.ParseIP(to)})
	require.NoError(l.t, err)
	for buffer := make([]byte, 1500); ; {
		n, source, err := conn.ReadFrom(buffer)
		require.NoError(l.t, err, "%s does not answer %s", to, from)
		answer, err := icmp.ParseMessage(1, buffer[:n])
		require.NoError(l.t, err)
		if answer.Type == ipv4.ICMPTypeEchoReply && source.String() == to {
			return
		}
	}
}

// addVPC adds a VPC with the prefix 10.0.0.0/16, and ports with the given last bytes of their addresses in 10.0.1.0/24.
// The group "open" permits everything, and "closed" only outgoing connections.
func (h *labHost) addVPC(id cloud.VPCID, ports ...byte) *cloud.HostVPC {
	h.lab.t.Helper()
	vpc := &cloud.HostVPC{
		ID: id, MTU: 1400, CIDR: parsePrefix("10.0.0.0/16"),
		Groups: []cloud.HostGroup{
			{ID: "closed", Rules: []cloud.Rule{{Direction: cloud.Egress, AnyProtocol: true}}},
			{ID: "open", Rules: []cloud.Rule{
				{Direction: cloud.Egress, AnyProtocol: true}, {Direction: cloud.Ingress, AnyProtocol: true},
			}},
		},
		Subnets: []cloud.HostSubnet{{
			ID: "subnet", VNI: uint32(len(h.vpcs) + 1), CIDR: parsePrefix("10.0.1.0/24"), Gateway: parseAddr("10.0.1.1"),
		}},
	}
	for _, n := range ports {
		vpc.Subnets[0].Ports = append(vpc.Subnets[0].Ports, cloud.HostPort{
			ID: cloud.PortID(fmt.Sprintf("p%d", n)), Device: fmt.Sprintf("port%d", n), MAC: cloud.MAC{2, 0, 0, 0, 0, n},
			IP: netip.AddrFrom4([4]byte{10, 0, 1, n}), Secured: true, Groups: []cloud.SecurityGroupID{"open"},
		})
	}
	h.vpcs = append(h.vpcs, vpc)
	h.applyVPC(vpc)
	for _, p := range vpc.Subnets[0].Ports {
		h.lab.serve(h.guest(vpc, p.ID), ":7000")
	}
	return vpc
}

// applyVPC makes the devices and rules of a VPC, and a namespace for each new port.
func (h *labHost) applyVPC(vpc *cloud.HostVPC) {
	t := h.lab.t
	t.Helper()
	prepared, err := h.devices.Prepare(t.Context(), *vpc)
	require.NoError(t, err)
	for _, id := range prepared.Missing {
		name := h.guest(vpc, id)
		h.lab.Add(name)
		require.NoError(t, h.devices.AttachVeth(t.Context(), *vpc, id,
			netdev.Endpoint{Namespace: h.lab.Path(name), Device: "eth0"}))
	}
	ns, err := netns.GetFromPath(h.devices.Path(vpc.ID))
	require.NoError(t, err)
	defer ns.Close()
	_, err = h.firewall.Set(t.Context(), ns, *vpc)
	require.NoError(t, err)
	_, err = balancer.Set(t.Context(), ns, vpc)
	require.NoError(t, err)
	_, err = h.devices.Activate(t.Context(), *vpc)
	require.NoError(t, err)
}

// guest returns the name of the namespace of a port.
func (h *labHost) guest(vpc *cloud.HostVPC, port cloud.PortID) string {
	return fmt.Sprintf("g-%s-%s-%s", h.name, vpc.ID, port)
}

// inside returns the name of a VPC's namespace in the lab.
func (h *labHost) inside(vpc *cloud.HostVPC) string {
	return strings.TrimPrefix(filepath.Base(h.devices.Path(vpc.ID)), h.lab.Prefix)
}

// edgeName returns the name of the edge namespace in the lab.
func (h *labHost) edgeName() string { return h.name + "-" + namespaceName }

func (h *labHost) state() State {
	var s State
	for _, v := range h.vpcs {
		s.VPCs = append(s.VPCs, h.stateOf(v))
	}
	return s
}

// stateOf returns the state of a VPC, as package vpc does.
func (h *labHost) stateOf(v *cloud.HostVPC) VPC {
	one := VPCOf(v, h.devices.Path(v.ID))
	for _, g := range v.Gateways {
		if g.Local() && !g.Default {
			here := Gateway{ID: g.ID, HostNAT: g.HostNAT, Transit: netdev.Transit(g.VNI)}
			if g.ServiceIP != "" {
				here.Mark = g.VNI
			}
			one.Gateways = append(one.Gateways, here)
		}
	}
	for _, s := range v.Subnets {
		routes := SubnetRoutes{VNI: s.VNI, Bridge: netdev.Bridge(s.VNI)}
		for _, r := range s.Routes {
			if r.Target == cloud.RouteNAT {
				routes.Routes = append(routes.Routes, Route{r.Destination, r.Gateway})
			}
		}
		if len(routes.Routes) > 0 {
			one.Subnets = append(one.Subnets, routes)
		}
	}
	return one
}

// apply connects the VPCs of the host as their states say.
func (h *labHost) apply() Result {
	h.lab.t.Helper()
	r, err := h.edge.Set(h.lab.t.Context(), h.state())
	require.NoError(h.lab.t, err)
	return r
}

// repair is like apply, but repeats Set, as the agent does: the devices of a deleted namespace exist for a short time
// after it.
func (h *labHost) repair() (changes []string) {
	h.lab.t.Helper()
	var err error
	require.Eventually(h.lab.t, func() bool {
		var r Result
		r, err = h.edge.Set(h.lab.t.Context(), h.state())
		changes = append(changes, r.Changes...)
		return err == nil
	}, 20*time.Second, 50*time.Millisecond, "%v", err)
	return changes
}

func floating(address, fixed string) cloud.HostFloating {
	return cloud.HostFloating{Address: parseAddr(address), External: internet, Fixed: parseAddr(fixed)}
}
