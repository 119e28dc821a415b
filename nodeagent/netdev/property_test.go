package netdev

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestSequences applies random states one after the other, and requires that the namespace is then as if only the last
// one had been applied, after each of them. Devices are left over, missing, or reused by other ports between the steps.
func TestSequences(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, 2)
			random := rand.New(rand.NewPCG(seed, 0))
			long, direct := l.hosts[0], l.hosts[1]
			direct.open(Options{VTEP: long.vtep, Device: "eth0"}) // the dump contains the VTEP
			for range 8 {
				vpc := randomVPC(random)
				long.apply(vpc)
				require.Empty(t, long.apply(vpc))
				direct.apply(vpc)
				l.requireSame(
					func() string { return l.dump(direct.vpcName("a")) },
					func() string { return l.dump(long.vpcName("a")) },
				)
				require.NoError(t, direct.Remove(t.Context(), "a"))
				if random.IntN(3) == 0 {
					l.ip(long.vpcName("a"), "link delete br%d", 101+random.IntN(3))
				}
			}
		})
	}
}

// randomVPC returns a VPC with the bridges br101 to br103, or more, and some of six guests in each subnet.
func randomVPC(random *rand.Rand) cloud.HostVPC {
	vpc := cloud.HostVPC{ID: "a", MTU: uint16(1400 + 25*random.IntN(3)), CIDR: netip.MustParsePrefix("10.0.0.0/16")}
	device := 0
	for s := 1; s <= 3+random.IntN(2); s++ {
		subnet := cloud.HostSubnet{
			ID: cloud.SubnetID(fmt.Sprint("subnet", s)), VNI: 100 + uint32(s), CIDR: netip.MustParsePrefix(fmt.Sprintf("10.0.%d.0/24", s)),
			Gateway: netip.MustParseAddr(fmt.Sprintf("10.0.%d.%d", s, 1+random.IntN(2))),
		}
		if random.IntN(2) == 0 {
			subnet.CIDR6 = netip.MustParsePrefix(fmt.Sprintf("fd00:0:0:%d::/64", s))
		}
		for n := 10; n < 16; n++ {
			mac := cloud.MAC{2, 0, 0, 0, byte(s), byte(n + random.IntN(2)*100)}
			ip, ip6 := guest(s, n)
			addr, addr6 := netip.MustParseAddr(ip), netip.MustParseAddr(ip6)
			if !subnet.CIDR6.IsValid() {
				addr6 = netip.Addr{}
			}
			switch random.IntN(4) {
			case 0:
				device++ // so other ports have the same device later
				p := cloud.HostPort{
					ID: portID(s, n), Device: fmt.Sprint("port", device), MAC: mac, IP: addr, IP6: addr6, Secured: random.IntN(4) > 0,
				}
				if random.IntN(3) == 0 {
					p.Mbps = 100 * uint32(1+random.IntN(2))
				}
				if random.IntN(4) == 0 {
					p.Pairs = []cloud.AddressPair{{CIDR: netip.MustParsePrefix("10.0.1.99/32"), MAC: cloud.MAC{2, 0, 0, 0, 9, 9}}}
				}
				subnet.Ports = append(subnet.Ports, p)
			case 1:
				vtep := netip.AddrFrom4([4]byte{192, 0, 2, byte(7 + random.IntN(2))})
				remote := cloud.RemotePort{MAC: mac, IP: addr, IP6: addr6, VTEP: vtep}
				if random.IntN(3) == 0 {
					pair := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(s), byte(100 + random.IntN(3))}), 32)
					remote.Pairs = []cloud.AddressPair{{CIDR: pair, MAC: cloud.MAC{2, 0, 0, 0, 8, byte(random.IntN(3))}}}
				}
				subnet.Remotes = append(subnet.Remotes, remote)
			}
		}
		subnet.Routes = randomRoutes(random)
		vpc.Subnets = append(vpc.Subnets, subnet)
	}
	vpc.Gateways = randomGateways(random, vpc.Subnets)
	random.Shuffle(len(vpc.Subnets), func(i, j int) { vpc.Subnets[i], vpc.Subnets[j] = vpc.Subnets[j], vpc.Subnets[i] })
	return vpc
}

// randomRoutes returns routes to destinations outside of the VPC, via addresses of the subnets 1 to 3.
func randomRoutes(random *rand.Rand) (routes []cloud.HostRoute) {
	for _, destination := range []string{"0.0.0.0/0", "192.168.0.0/16", "192.168.1.0/24"} {
		switch random.IntN(4) {
		case 0:
			routes = append(routes, portRoute(destination, 1+random.IntN(3), 10))
		case 1:
			routes = append(routes, blackhole(destination))
		}
	}
	if random.IntN(2) == 0 {
		routes = append(routes, blackhole("2001:db8::/32"))
	}
	return routes
}

// randomGateways returns NAT gateways on this host or others, and adds routes to them.
func randomGateways(random *rand.Rand, subnets []cloud.HostSubnet) (gateways []cloud.HostGateway) {
	for i := range 2 {
		if random.IntN(2) == 0 {
			continue
		}
		g := cloud.HostGateway{ID: cloud.NATGatewayID(fmt.Sprint("gateway", i)), VNI: 200 + uint32(i), Default: i == random.IntN(2)}
		if random.IntN(2) == 0 {
			g.VTEP = netip.AddrFrom4([4]byte{192, 0, 2, byte(7 + random.IntN(2))})
		}
		if len(gateways) > 0 && gateways[0].Default {
			g.Default = false
		}
		gateways = append(gateways, g)
		s := &subnets[random.IntN(len(subnets))]
		s.Routes = append(s.Routes, gatewayRoute(fmt.Sprintf("198.51.100.%d/32", i), g.ID))
	}
	return gateways
}
