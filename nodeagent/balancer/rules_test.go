package balancer

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestRules compares the rules of services, as input for nft, with testdata/rules. Run it with -rewrite to accept
// changes. A line of the input is the address of a service IP with its ports as port:target/protocol, and its backends
// as address*weight, with a ! if they are unhealthy. A floating IP has its VNI as address/VNI, with a ! if another host
// has it.
func TestRules(t *testing.T) {
	datadriven.RunTest(t, "testdata/rules", func(t *testing.T, d *datadriven.TestData) string {
		if d.Cmd == "bridge" {
			return bridgeTable.Script(bridgeChains(parseVPC(t, "")))
		}
		return table.Script(chains(parseVPC(t, d.Input)))
	})
}

// parseVPC returns a VPC with the subnets 10.0.1.0/24 and 10.0.2.0/24 and the services of the lines.
func parseVPC(t *testing.T, lines string) *cloud.HostVPC {
	vpc := &cloud.HostVPC{ID: "v", CIDR: netip.MustParsePrefix("10.0.0.0/16")}
	for n := 1; n <= 2; n++ {
		vpc.Subnets = append(vpc.Subnets, cloud.HostSubnet{
			VNI: uint32(100 + n), CIDR: netip.MustParsePrefix(fmt.Sprintf("10.0.%d.0/24", n)),
			Gateway: netip.MustParseAddr(fmt.Sprintf("10.0.%d.1", n)),
			Ports:   []cloud.HostPort{{Device: fmt.Sprintf("tap%d", n), Hairpin: true}, {Device: fmt.Sprintf("tap%d0", n)}},
		})
	}
	for line := range strings.Lines(lines) {
		words := strings.Fields(line)
		s := cloud.HostService{Address: netip.MustParseAddr(words[0]), Affinity: cloud.AffinityNone}
		for _, word := range words[1:] {
			key, value, _ := strings.Cut(word, "=")
			for one := range strings.SplitSeq(value, ",") {
				switch key {
				case "ports":
					s.Ports = append(s.Ports, parseServicePort(t, one))
				case "backends":
					s.Backends = append(s.Backends, parseBackend(one))
				case "floating":
					parseFloating(t, vpc, &s, one)
				case "affinity":
					s.Affinity = cloud.AffinityClientIP
				}
			}
		}
		vpc.Services = append(vpc.Services, s)
	}
	return vpc
}

// parseFloating adds the floating IP of a service IP to the VPC.
func parseFloating(t *testing.T, vpc *cloud.HostVPC, s *cloud.HostService, text string) {
	text, elsewhere := strings.CutSuffix(text, "!")
	address, vni, _ := strings.Cut(text, "/")
	s.ID, s.Floating = cloud.ServiceIPID(s.Address.String()), netip.MustParseAddr(address)
	g := cloud.HostGateway{ServiceIP: s.ID, HostNAT: cloud.HostNAT{External: "internet", Address: s.Floating}}
	_, err := fmt.Sscan(vni, &g.VNI)
	require.NoError(t, err)
	if elsewhere {
		g.VTEP = netip.MustParseAddr("192.0.2.9")
	}
	vpc.Gateways = append(vpc.Gateways, g)
}

func parseServicePort(t *testing.T, text string) cloud.ServicePort {
	numbers, protocol, _ := strings.Cut(text, "/")
	p := cloud.ServicePort{Protocol: cloud.ProtocolTCP}
	if protocol == "udp" {
		p.Protocol = cloud.ProtocolUDP
	}
	_, err := fmt.Sscan(strings.Replace(numbers, ":", " ", 1), &p.Port)
	require.NoError(t, err)
	p.Target = p.Port
	if _, target, ok := strings.Cut(numbers, ":"); ok {
		_, err = fmt.Sscan(target, &p.Target)
		require.NoError(t, err)
	}
	return p
}

func parseBackend(text string) cloud.HostBackend {
	text, unhealthy := strings.CutSuffix(text, "!")
	address, weight, _ := strings.Cut(text, "*")
	b := cloud.HostBackend{Address: netip.MustParseAddr(address), Weight: 1, Healthy: !unhealthy}
	fmt.Sscan(weight, &b.Weight)
	return b
}

// TestSlots requires that slots are distributed by weight, and that the failure of a backend changes only its own
// slots.
func TestSlots(t *testing.T) {
	s := parseVPC(t, "10.0.1.50 ports=80/tcp affinity=client_ip backends=10.0.1.11,10.0.1.12*2,10.0.1.13*5").Services[0]
	slots := uint32(maxSlots)
	ownersOf := func(unhealthy netip.Addr) []string {
		var usable []*cloud.HostBackend
		for i := range s.Backends {
			if s.Backends[i].Address != unhealthy {
				usable = append(usable, &s.Backends[i])
			}
		}
		owners := make([]string, slots)
		for element := range strings.SplitSeq(strings.Trim(slotMap(usable, slots), "{ }"), ", ") {
			numbers, address, _ := strings.Cut(element, " : ")
			first, last, isRange := strings.Cut(numbers, "-")
			var from, to int
			fmt.Sscan(first, &from)
			if to = from; isRange {
				fmt.Sscan(last, &to)
			}
			for i := from; i <= to; i++ {
				owners[i] = address
			}
		}
		return owners
	}
	all, without := ownersOf(netip.Addr{}), ownersOf(s.Backends[1].Address)
	count := map[string]int{}
	for i, owner := range all {
		count[owner]++
		if owner != "10.0.1.12" {
			require.Equal(t, owner, without[i], "slot %d changed its healthy backend", i)
		} else {
			require.NotEqual(t, owner, without[i])
		}
	}
	for address, weight := range map[string]int{"10.0.1.11": 1, "10.0.1.12": 2, "10.0.1.13": 5} {
		require.InDelta(t, int(slots)*weight/8, count[address], float64(slots)/20, "slots of %s", address)
	}
	require.Equal(t, []uint32{64, 64, 128, 4096}, []uint32{slotsFor(1), slotsFor(4), slotsFor(5), slotsFor(250)})
}
