package peering

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// patience limits how long tests wait for the kernel.
	patience = 20 * time.Second
	// blocked is how long tests wait for packets that must not arrive.
	blocked = 700 * time.Millisecond
)

var parseAddr, parsePrefix = netip.MustParseAddr, netip.MustParsePrefix

// lab is a cloud of two hosts, each a network namespace, that a bridge joins to an underlay, and of VPCs that have the
// ports 10.n.1.10 on host 1 and 10.n.1.20 on host 2, n being the number of the VPC.
type lab struct {
	*nettest.Namespaces
	t     testing.TB
	hosts []*labHost
	vpcs  []*labVPC
}

type labHost struct {
	lab      *lab
	name     string
	vtep     netip.Addr
	devices  *netdev.Host
	firewall *firewall.Firewall
	links    *Links
}

// labVPC is a VPC with its desired state on each host.
type labVPC struct {
	id     cloud.VPCID
	number int
	on     []*cloud.HostVPC
}

func newLab(t testing.TB) *lab {
	t.Helper()
	l := &lab{t: t, Namespaces: nettest.NewNamespaces(t, "pe")}
	l.Add("u")
	l.IP("u", "link add underlay type bridge")
	l.IP("u", "link set underlay up")
	for i := range 2 {
		h := &labHost{lab: l, name: fmt.Sprintf("h%d", i+1), vtep: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})}
		l.Add(h.name)
		l.IP(h.name, "link add eth0 type veth peer name %s netns %su", h.name, l.Prefix)
		l.IP("u", "link set %s master underlay up", h.name)
		l.IP(h.name, "address add %s/24 dev eth0", h.vtep)
		l.IP(h.name, "link set eth0 up")
		var err error
		h.devices, err = netdev.New(netdev.Options{
			VTEP: h.vtep, Device: "eth0", Namespace: l.Path(h.name), Prefix: l.Prefix + h.name + "-",
		})
		require.NoError(t, err)
		t.Cleanup(h.devices.Close)
		// The prefixes of VPC 2 are also denied like those of an underlay. A peering must reach them nevertheless.
		denied := []netip.Prefix{parsePrefix("10.2.0.0/16")}
		h.firewall, err = firewall.New(firewall.Options{Trusted: []string{"vx*"}, Denied: denied})
		require.NoError(t, err)
		h.links, err = New(h.devices.Path)
		require.NoError(t, err)
		l.hosts = append(l.hosts, h)
	}
	return l
}

// addVPC adds a VPC to both hosts. Ports in the group "server" accept TCP and UDP at port 7000 and ping, and begin no
// connection. Ports in the group "client" only begin connections. The group "open" permits everything.
func (l *lab) addVPC(id cloud.VPCID, number int, group cloud.SecurityGroupID) *labVPC {
	v := &labVPC{id: id, number: number}
	v6 := parsePrefix(fmt.Sprintf("fd00:%d::/48", number))
	subnet := cloud.HostSubnet{
		ID: "subnet", VNI: uint32(100 * number), CIDR: parsePrefix(fmt.Sprintf("10.%d.1.0/24", number)),
		Gateway: parseAddr(fmt.Sprintf("10.%d.1.1", number)), CIDR6: netip.PrefixFrom(v6.Addr(), 64),
	}
	ports := []cloud.HostPort{labPort(&subnet, number, 10, group), labPort(&subnet, number, 20, group)}
	for i, h := range l.hosts {
		other := ports[1-i]
		vpc := &cloud.HostVPC{
			ID: id, MTU: 1400, CIDR: parsePrefix(fmt.Sprintf("10.%d.0.0/16", number)), CIDR6: v6, Groups: labGroups(),
			Subnets: []cloud.HostSubnet{subnet},
		}
		vpc.Subnets[0].Ports = []cloud.HostPort{ports[i]}
		vpc.Subnets[0].Remotes = []cloud.RemotePort{{
			MAC: other.MAC, IP: other.IP, IP6: other.IP6, VTEP: l.hosts[1-i].vtep,
		}}
		v.on = append(v.on, vpc)
		h.apply(vpc)
	}
	l.vpcs = append(l.vpcs, v)
	return v
}

func labPort(s *cloud.HostSubnet, number int, n byte, group cloud.SecurityGroupID) cloud.HostPort {
	six := s.CIDR6.Addr().As16()
	six[15] = n
	return cloud.HostPort{
		ID: cloud.PortID(fmt.Sprintf("p%d", n)), Device: fmt.Sprintf("port%d", n),
		MAC: cloud.MAC{2, 0, 0, 0, byte(number), n}, IP: netip.AddrFrom4([4]byte{10, byte(number), 1, n}), IP6: netip.AddrFrom16(six), Secured: true,
		Groups: []cloud.SecurityGroupID{group},
	}
}

func labGroups() []cloud.HostGroup {
	client := []cloud.Rule{
		{Direction: cloud.Egress, AnyProtocol: true}, {Direction: cloud.Egress, AnyProtocol: true, IPv6: true},
	}
	open := append([]cloud.Rule{
		{Direction: cloud.Ingress, AnyProtocol: true}, {Direction: cloud.Ingress, AnyProtocol: true, IPv6: true},
	}, client...)
	port := cloud.PortRange{First: 7000, Last: 7000}
	server := []cloud.Rule{
		{Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP, Ports: port, CIDR: parsePrefix("10.1.0.0/16")},
		{Direction: cloud.Ingress, Protocol: cloud.ProtocolUDP, Ports: port, CIDR: parsePrefix("10.1.0.0/16")},
		{Direction: cloud.Ingress, Protocol: cloud.ProtocolUDP, Ports: cloud.PortRange{First: 7001, Last: 7001}},
		{Direction: cloud.Ingress, Protocol: cloud.ProtocolICMP, ICMP: &cloud.ICMP{Type: 8, AnyCode: true}},
		{Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP, Ports: port, IPv6: true},
	}
	return []cloud.HostGroup{{ID: "client", Rules: client}, {ID: "open", Rules: open}, {ID: "server", Rules: server}}
}

// peer connects two VPCs, with routes on both sides.
func (l *lab) peer(id cloud.PeeringID, a, b *labVPC) {
	for _, side := range [][2]*labVPC{{a, b}, {b, a}} {
		for i, vpc := range side[0].on {
			peer := side[1].on[i]
			vpc.Peerings = append(vpc.Peerings, cloud.HostPeering{
				ID: id, Peer: peer.ID, CIDR: peer.CIDR, CIDR6: peer.CIDR6, MTU: peer.MTU,
			})
			vpc.Subnets[0].Routes = append(vpc.Subnets[0].Routes,
				cloud.HostRoute{Destination: peer.CIDR, Target: cloud.RoutePeering, Peering: id},
				cloud.HostRoute{Destination: peer.CIDR6, Target: cloud.RoutePeering, Peering: id})
		}
	}
}

// apply makes the devices and rules of a VPC in the order in which the agent does it, and a namespace for each new
// port. It returns the changes of package peering.
func (h *labHost) apply(vpc *cloud.HostVPC) Result {
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
	r, err := h.links.Set(t.Context(), vpc)
	require.NoError(t, err)
	_, err = h.devices.Activate(t.Context(), *vpc)
	require.NoError(t, err)
	return r
}

// applyAll applies all VPCs on both hosts. Like the agent, it applies a VPC again if the application of its peer made
// new devices for it. It returns the changes.
func (l *lab) applyAll() (changes []string) {
	l.t.Helper()
	for i, h := range l.hosts {
		again := map[cloud.VPCID]bool{}
		for _, v := range l.vpcs {
			r := h.apply(v.on[i])
			changes = append(changes, r.Changes...)
			for _, id := range r.Connected {
				again[id] = true
			}
		}
		for _, v := range l.vpcs {
			if again[v.id] {
				r := h.apply(v.on[i])
				changes = append(changes, r.Changes...)
				require.Empty(l.t, r.Connected)
			}
		}
	}
	return changes
}

// guest returns the name of the namespace of a port.
func (h *labHost) guest(vpc *cloud.HostVPC, port cloud.PortID) string {
	return fmt.Sprintf("g-%s-%s", vpc.ID, port)
}

// inside returns the name of a VPC's namespace on a host.
func (h *labHost) inside(id cloud.VPCID) string { return h.name + "-" + string(id) }

// guest returns the namespace of the VPC's port on host 1 or 2, and address the port's IPv4 address.
func (v *labVPC) guest(host int) string   { return fmt.Sprintf("g-%s-p%d0", v.id, host) }
func (v *labVPC) address(host int) string { return fmt.Sprintf("10.%d.1.%d0", v.number, host) }
