package network

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestExplainAgreesWithTheFilter calls ExplainPath for packets between ports with random groups. The packet filter of a
// host with all ports must pass a packet if ExplainPath says that it would pass, and drop it otherwise.
func TestExplainAgreesWithTheFilter(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 0))
	verdicts := map[bool]int{}
	for range 25 {
		w := newRandomProject(t, random)
		for range 60 {
			from, to := pick(random, w.ports...), pick(random, w.ports...)
			if from.ID == to.ID {
				continue
			}
			p := Packet{FromPort: from.ID, To: to.IP, Port: pick[uint16](random, 80, 85, 443)}
			p.Protocol = pick[uint8](random, cloud.ProtocolTCP, cloud.ProtocolUDP, cloud.ProtocolSCTP, cloud.ProtocolICMP, 47)
			first := firewall.FirstPacket{Source: from.IP, Destination: to.IP, ICMPType: 8, FromPort: from.Secured}
			if random.IntN(2) == 0 {
				p.To = to.IP6
				first.Source, first.Destination, first.ICMPType = from.IP6, to.IP6, 128
				if p.Protocol == cloud.ProtocolICMP {
					p.Protocol = cloud.ProtocolICMPv6
				}
			}
			first.Protocol = p.Protocol
			switch p.Protocol {
			case cloud.ProtocolTCP, cloud.ProtocolUDP, cloud.ProtocolSCTP:
				first.Port = p.Port
			}
			want, err := firewall.Permits(w.onHost(), first)
			require.NoError(t, err)
			steps, err := w.networks.ExplainPath(w.as(acme, ""), acme, p)
			require.NoError(t, err)
			permitted := true
			for _, s := range steps {
				permitted = permitted && (s.Passes || s.Stage == "destination")
			}
			require.Equal(t, want, permitted, "%+v\nexplained as %+v\nports %+v\ngroups %+v", first, steps, w.ports, w.groups)
			verdicts[want]++
		}
	}
	require.Greater(t, verdicts[true], 50)
	require.Greater(t, verdicts[false], 50)
}

// randomProject is a project with a VPC, whose ports have random security groups.
type randomProject struct {
	*world
	vpc     cloud.VPC
	subnets []cloud.Subnet
	ports   []cloud.Port
	groups  []cloud.SecurityGroup
}

func newRandomProject(t *testing.T, r *rand.Rand) *randomProject {
	t.Helper()
	w := &randomProject{world: newWorld(t)}
	ctx := w.as(acme, "")
	vpc, err := w.networks.CreateVPC(ctx, acme, VPCRequest{
		CIDR: netip.MustParsePrefix("10.0.0.0/16"), CIDR6: netip.MustParsePrefix("fd00:1:2::/48"),
	}, [32]byte{})
	require.NoError(t, err)
	w.vpc = vpc.Value
	for i := range 2 {
		s, err := w.networks.CreateSubnet(ctx, acme, SubnetRequest{
			VPC: w.vpc.ID, CIDR: netip.MustParsePrefix(fmt.Sprintf("10.0.%d.0/24", i)),
			CIDR6: netip.MustParsePrefix(fmt.Sprintf("fd00:1:2:%d::/64", i)),
		}, [32]byte{})
		require.NoError(t, err)
		w.subnets = append(w.subnets, s.Value.Subnet)
	}
	for range 6 {
		// CreateSecurityGroup adds rules to a group that is created without rules. So each group is created with one
		// rule, which matches no packet of the test.
		nothing := cloud.Rule{Direction: cloud.Ingress, Protocol: 254, CIDR: netip.MustParsePrefix("192.0.2.1/32")}
		g, err := w.networks.CreateSecurityGroup(ctx, acme, GroupRequest{Rules: []cloud.Rule{nothing}}, [32]byte{})
		require.NoError(t, err)
		w.groups = append(w.groups, g.Value)
	}
	for i := range w.groups {
		for range r.IntN(6) {
			if g, err := w.networks.AddSecurityGroupRule(ctx, acme, w.groups[i].ID, w.randomRule(r), [32]byte{}); err == nil {
				w.groups[i] = g.Value // an equal rule is refused
			}
		}
	}
	for range 6 {
		ids := []cloud.SecurityGroupID{}
		for _, g := range w.groups {
			if r.IntN(3) == 0 {
				ids = append(ids, g.ID)
			}
		}
		subnet := pick(r, w.subnets...)
		p, err := w.networks.CreatePort(ctx, acme, PortRequest{
			Subnet: subnet.ID, Groups: &ids, Secured: r.IntN(6) > 0,
		}, [32]byte{})
		require.NoError(t, err)
		require.True(t, p.Value.IP6.IsValid())
		w.ports = append(w.ports, p.Value)
	}
	return w
}

// randomRule returns a valid rule.
func (w *randomProject) randomRule(r *rand.Rand) cloud.Rule {
	rule := cloud.Rule{Direction: pick(r, cloud.Ingress, cloud.Egress, cloud.Egress), IPv6: r.IntN(2) == 0}
	switch r.IntN(4) {
	case 0:
		rule.AnyProtocol = true
	case 1:
		rule.Protocol = cloud.ProtocolICMP
		if rule.IPv6 {
			rule.Protocol = cloud.ProtocolICMPv6
		}
		if r.IntN(3) > 0 {
			rule.ICMP = &cloud.ICMP{Type: pick[uint8](r, 3, 8, 128), Code: pick[uint8](r, 0, 5), AnyCode: r.IntN(2) == 0}
		}
	default:
		rule.Protocol = pick[uint8](r, cloud.ProtocolTCP, cloud.ProtocolUDP, cloud.ProtocolSCTP)
		if r.IntN(2) == 0 {
			rule.Ports = cloud.PortRange{First: 80, Last: 90}
		}
	}
	switch r.IntN(4) {
	case 0:
		rule.Group = pick(r, w.groups...).ID
	case 1:
		rule.CIDR = netip.MustParsePrefix(pick(r, "10.0.0.0/24", "10.0.1.0/24", "0.0.0.0/0"))
		if rule.IPv6 {
			rule.CIDR = netip.MustParsePrefix(pick(r, "fd00:1:2::/64", "fd00:1:2:1::/64", "::/0"))
		}
	}
	return rule
}

// onHost returns the state of a host that has all ports.
func (w *randomProject) onHost() *cloud.HostVPC {
	out := &cloud.HostVPC{ID: w.vpc.ID, CIDR: w.vpc.CIDR, CIDR6: w.vpc.CIDR6}
	for i := range w.subnets {
		s := &w.subnets[i]
		on := cloud.HostSubnet{ID: s.ID, VNI: uint32(i + 1), CIDR: s.CIDR, Gateway: s.Gateway, CIDR6: s.CIDR6}
		for j := range w.ports {
			if p := &w.ports[j]; p.Subnet == s.ID {
				on.Ports = append(on.Ports, cloud.HostPort{
					ID: p.ID, Device: fmt.Sprint("port", j), MAC: p.MAC, IP: p.IP, IP6: p.IP6, Secured: p.Secured, Groups: p.Groups,
				})
			}
		}
		out.Subnets = append(out.Subnets, on)
	}
	for _, g := range w.groups {
		out.Groups = append(out.Groups, cloud.HostGroup{ID: g.ID, Rules: g.Rules})
		members := cloud.GroupMembers{ID: g.ID}
		for i := range w.ports {
			if hasGroup(&w.ports[i], g.ID) {
				members.Addresses = append(members.Addresses, w.ports[i].IP, w.ports[i].IP6)
			}
		}
		out.Members = append(out.Members, members)
	}
	return out
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }
