package netdev

import (
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// place is a port of a test: guest number n of a subnet, on a host.
type place struct {
	subnet, n, host int
}

// testVPC returns the states of a VPC for each of the hosts. Subnet s has the VNI vni+s and the prefixes 10.0.s.0/24
// and fd00:0:0:s::/64. Guest n of a subnet has the addresses that end in n.
func testVPC(l *lab, id string, vni uint32, places ...place) []cloud.HostVPC {
	var vpcs []cloud.HostVPC
	for host := range l.hosts {
		vpc := cloud.HostVPC{ID: cloud.VPCID(id), MTU: 1450, CIDR: netip.MustParsePrefix("10.0.0.0/16"), CIDR6: netip.MustParsePrefix("fd00::/48")}
		for s := 1; s <= 2; s++ {
			subnet := cloud.HostSubnet{
				ID: cloud.SubnetID(fmt.Sprint("subnet", s)), VNI: vni + uint32(s), CIDR: netip.MustParsePrefix(fmt.Sprintf("10.0.%d.0/24", s)),
				Gateway: netip.MustParseAddr(fmt.Sprintf("10.0.%d.1", s)), CIDR6: netip.MustParsePrefix(fmt.Sprintf("fd00:0:0:%d::/64", s)),
			}
			for _, p := range places {
				if p.subnet != s {
					continue
				}
				mac := cloud.MAC{2, 0, 0, 0, byte(s), byte(p.n)}
				ip, ip6 := guest(p.subnet, p.n)
				if p.host == host {
					subnet.Ports = append(subnet.Ports, cloud.HostPort{
						ID: portID(p.subnet, p.n), Device: fmt.Sprintf("port%d-%d", s, p.n), MAC: mac, IP: netip.MustParseAddr(ip),
						IP6: netip.MustParseAddr(ip6), Secured: true,
					})
				} else {
					subnet.Remotes = append(subnet.Remotes, cloud.RemotePort{
						MAC: mac, IP: netip.MustParseAddr(ip), IP6: netip.MustParseAddr(ip6), VTEP: l.hosts[p.host].vtep,
					})
				}
			}
			vpc.Subnets = append(vpc.Subnets, subnet)
		}
		vpcs = append(vpcs, vpc)
	}
	return vpcs
}

func guest(subnet, n int) (ip, ip6 string) {
	return fmt.Sprintf("10.0.%d.%d", subnet, n), fmt.Sprintf("fd00:0:0:%d::%x", subnet, n)
}

func portID(subnet, n int) cloud.PortID { return cloud.PortID(fmt.Sprintf("p%d-%d", subnet, n)) }

// requireReach requires that one guest reaches another over IPv4 and IPv6.
func requireReach(l *lab, vpc string, from, to place) {
	l.t.Helper()
	name := l.hosts[from.host].endpoint(cloud.VPCID(vpc), portID(from.subnet, from.n))
	ip, ip6 := guest(to.subnet, to.n)
	l.requirePing(name, ip)
	l.requirePing(name, ip6)
}

func TestReach(t *testing.T) {
	l := newLab(t, 3)
	places := []place{{1, 10, 0}, {1, 11, 0}, {1, 20, 1}, {2, 30, 0}, {2, 40, 1}, {2, 50, 2}}
	vpcs := testVPC(l, "a", 100, places...)
	underlay := l.sniff()
	for i, h := range l.hosts {
		h.apply(vpcs[i])
	}
	for _, from := range places {
		for _, to := range places {
			if from != to {
				requireReach(l, "a", from, to)
			}
		}
		e := l.hosts[from.host].endpoint("a", portID(from.subnet, from.n))
		l.requirePing(e, fmt.Sprintf("10.0.%d.1", from.subnet))
		l.requirePing(e, fmt.Sprintf("fd00:0:0:%d::1", from.subnet))
	}
	require.Positive(t, underlay.echoes.Load())
	require.Zero(t, underlay.resolutions.Load(), "ARP or neighbour discovery crossed the underlay")
	require.Zero(t, underlay.broadcasts.Load(), "broadcasts or multicasts crossed the underlay")
	requireNoThreads(t)
}

func TestMTU(t *testing.T) {
	l := newLab(t, 2)
	vpcs := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 20, 1}, place{2, 40, 1})
	for i, h := range l.hosts {
		h.apply(vpcs[i])
	}
	requireReach(l, "a", place{1, 10, 0}, place{1, 20, 1})
	from := l.hosts[0].endpoint("a", "p1-10")
	for _, to := range []string{"10.0.1.20", "10.0.2.40", "fd00:0:0:1::14", "fd00:0:0:2::28"} {
		addr := netip.MustParseAddr(to)
		require.NoError(t, l.ping(from, addr, 1400, 5*time.Second), to)
		require.NoError(t, l.ping(from, addr, 1450, 5*time.Second), to)
		require.ErrorIs(t, l.ping(from, addr, 1451, 5*time.Second), syscall.EMSGSIZE, to)
	}
	vpcs[0].MTU = 1451
	_, err := l.hosts[0].Prepare(t.Context(), vpcs[0])
	require.ErrorContains(t, err, "the VPC's MTU of 1451 needs an MTU of 1501 on the underlay of this host, which has 1500")
	vpcs[0].MTU = 1450
	for _, o := range []Options{{Device: "eth0", MTU: 1499}, {MTU: 1499}} {
		h := &labHost{lab: l, name: "h1"}
		o.VTEP = l.hosts[0].vtep
		h.open(o)
		_, err = h.Prepare(t.Context(), vpcs[0])
		require.ErrorContains(t, err, "which has 1499", "the MTU is that of the options, if it is the smaller one")
	}

	// The MTU of an existing VPC can be changed.
	for i, h := range l.hosts {
		vpcs[i].MTU = 1400
		h.apply(vpcs[i])
		require.Empty(t, h.apply(vpcs[i]))
	}
	require.Contains(t, l.ip(l.hosts[0].vpcName("a"), "link show port1-10"), "mtu 1400")
}
