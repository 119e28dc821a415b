package peering

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestRules compares rules, as input for nft, and routes with testdata/rules. Run it with -rewrite to accept changes.
// The lines of a VPC are:
//
//	vpc 10.1.0.0/16 fd00:1::/48
//	peering ab 10.2.0.0/16 fd00:2::/48, the second prefix is optional
//	subnet 100 10.1.1.0/24 fd00:1::/64, the second prefix is optional
//	port 10.1.1.10 fd00:1::a pair=10.1.1.50/32, of the last subnet
//	route 10.2.0.0/16 ab, of the last subnet; without a peering, to a blackhole
func TestRules(t *testing.T) {
	datadriven.RunTest(t, "testdata/rules", func(t *testing.T, d *datadriven.TestData) string {
		vpc := parseVPC(t, d.Input)
		text := table.Script(chains(vpc))
		for _, p := range vpc.Peerings {
			text = strings.ReplaceAll(text, p.ID.Device(), "peer-"+string(p.ID))
		}
		var b strings.Builder
		for line := range strings.Lines(text) {
			rule, _, _ := strings.Cut(strings.TrimSpace(line), " comment ")
			b.WriteString(strings.ReplaceAll(rule, table.String()+" ", "") + "\n")
		}
		for _, r := range slices.SortedFunc(maps.Keys(wantedRoutes(vpc)), func(a, b route) int {
			return strings.Compare(a.String(), b.String())
		}) {
			line := r.String()
			for _, p := range vpc.Peerings {
				line = strings.ReplaceAll(line, p.ID.Device(), "peer-"+string(p.ID))
			}
			fmt.Fprintln(&b, "ip route replace", line)
		}
		return b.String()
	})
}

func parseVPC(t *testing.T, input string) *cloud.HostVPC {
	vpc := &cloud.HostVPC{ID: "v"}
	for line := range strings.Lines(input) {
		words := strings.Fields(line)
		optional := func(n int) (p netip.Prefix) {
			if len(words) > n {
				p = parsePrefix(words[n])
			}
			return p
		}
		last := len(vpc.Subnets) - 1
		switch words[0] {
		case "vpc":
			vpc.CIDR, vpc.CIDR6 = parsePrefix(words[1]), optional(2)
		case "peering":
			vpc.Peerings = append(vpc.Peerings, cloud.HostPeering{
				ID: cloud.PeeringID(words[1]), Peer: "peer", CIDR: parsePrefix(words[2]), CIDR6: optional(3),
			})
		case "subnet":
			s := cloud.HostSubnet{CIDR: parsePrefix(words[2]), CIDR6: optional(3)}
			_, err := fmt.Sscan(words[1], &s.VNI)
			require.NoError(t, err)
			vpc.Subnets = append(vpc.Subnets, s)
		case "port":
			p := cloud.HostPort{IP: parseAddr(words[1])}
			for _, word := range words[2:] {
				if pair, ok := strings.CutPrefix(word, "pair="); ok {
					p.Pairs = append(p.Pairs, cloud.AddressPair{CIDR: parsePrefix(pair)})
				} else {
					p.IP6 = parseAddr(word)
				}
			}
			vpc.Subnets[last].Ports = append(vpc.Subnets[last].Ports, p)
		case "route":
			r := cloud.HostRoute{Destination: parsePrefix(words[1]), Target: cloud.RouteBlackhole}
			if len(words) > 2 {
				r.Target, r.Peering = cloud.RoutePeering, cloud.PeeringID(words[2])
			}
			vpc.Subnets[last].Routes = append(vpc.Subnets[last].Routes, r)
		default:
			t.Fatalf("unknown line %q", line)
		}
	}
	return vpc
}

// TestElements requires that a prefix within another is left out, in any order of the input, and that a set of many
// prefixes has all that are in no other.
func TestElements(t *testing.T) {
	list := []netip.Prefix{}
	for _, text := range []string{
		"10.0.1.0/24", "10.0.0.0/16", "10.0.255.255/32", "10.1.0.0/32", "10.1.0.1/32", "10.0.0.0/16", "9.0.0.0/8", "10.1.0.1/32",
	} {
		list = append(list, netip.MustParsePrefix(text))
	}
	for range len(list) {
		require.Equal(t, "{ 9.0.0.0/8, 10.0.0.0/16, 10.1.0.0, 10.1.0.1 }", elements(list))
		list = append(list[1:], list[0])
	}
}
