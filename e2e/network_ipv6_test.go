package e2e

import (
	"fmt"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	small "github.com/trivet-cloud/trivet/images/guest"
)

// The prefixes of the VPC with IPv6 and of its subnets.
const (
	prefix6  = "fd12:3456:789a::/48"
	gateway6 = "fd12:3456:789a:1::1" // of the first subnet
	router6  = "fe80::ff:ff:fe00:1"  // the link-local address of every gateway
)

// machine6 is a guest with an IPv6 address.
type machine6 struct {
	*machine
	nic6 small.NIC // as the guest printed it
}

func (m *machine6) address() string { return m.nic6.Address.Addr().String() }

// boot6 starts a guest and waits until it has an IPv4 and an IPv6 address.
func (c *networkCloud) boot6(name string, host int, subnet string) *machine6 {
	c.t.Helper()
	m := &machine6{machine: c.boot(name, host, &vmv1.NetworkSpec{SubnetId: subnet})}
	line, err := c.admin.Console(c.context(3*time.Minute), m.vm.GetId(), small.Prefix+"NIC6 name=eth0 mac", 1)
	require.NoError(c.t, err)
	m.nic6, err = small.ParseNIC6(line)
	require.NoError(c.t, err)
	return m
}

// ipv6 runs guests with IPv6 on three hosts: two in one subnet, and one in another subnet of the VPC.
func (c *networkCloud) ipv6() {
	t, ctx := c.t, c.context(10*time.Minute)
	vpc, err := c.networks.CreateVpc(ctx, &networkv1.CreateVpcRequest{
		Name: "six", CidrBlock: "10.6.0.0/16", Ipv6CidrBlock: prefix6,
	})
	require.NoError(t, err)
	var subnets []string
	for i := range 2 {
		s, err := c.networks.CreateSubnet(ctx, &networkv1.CreateSubnetRequest{
			Name: fmt.Sprintf("six-%d", i), VpcId: vpc.GetId(), CidrBlock: fmt.Sprintf("10.6.%d.0/24", i+1),
			Ipv6CidrBlock: fmt.Sprintf("fd12:3456:789a:%d::/64", i+1), DhcpEnabled: ptr(true),
		})
		require.NoError(t, err)
		subnets = append(subnets, s.GetId())
	}
	a, b, d := c.boot6("six-a", 0, subnets[0]), c.boot6("six-b", 1, subnets[0]), c.boot6("six-d", 2, subnets[1])
	all := []*machine6{a, b, d}

	for _, m := range all {
		port, err := c.networks.GetPort(ctx, &networkv1.GetPortRequest{Id: m.port()})
		require.NoError(t, err)
		require.Equal(t, port.GetIpv6Address()+"/128", m.nic6.Address.String(), "the address from DHCPv6 is that of the port")
		require.Equal(t, router6, m.nic6.Gateway.String(), "the router of the advertisements")
		require.Equal(t, 1450, m.nic6.MTU)
		addresses := m.run("ip -6 addr show dev eth0 scope global")
		require.NotContains(t, addresses, "dynamic", "the guest has no address of autonomous configuration")
		vm, err := c.vms.GetVm(ctx, &vmv1.GetVmRequest{VmId: m.vm.GetId()})
		require.NoError(t, err)
		require.Contains(t, vm.GetStatus().GetIpAddresses(), port.GetIpv6Address())
	}
	for _, from := range all {
		for _, to := range all {
			if from != to {
				from.run("ping6 -c 1 -W 5 -s 1402 " + to.address())
				from.run("ping6 -c 1 -W 5 " + to.vm.GetName() + ".default.internal")
			}
		}
	}
	a.run("ping6 -c 1 -W 5 " + gateway6)
	a.run("ping6 -c 1 -W 5 fd12:3456:789a:2::1")
	require.Contains(t, a.run("nslookup -type=aaaa six-d.default.internal "+gateway6), d.address())
	require.Contains(t, a.run("nslookup "+d.address()+" "+gateway6), "six-d.default.internal")

	for m, want := range map[*machine6]string{a: "six-a", d: "six-d"} {
		ask := `printf '%s HTTP/1.0\r\nHost: metadata\r\nX-aws-ec2-metadata-token%s\r\n\r\n' | timeout 5 nc -w 5 fd00:ec2::254 80 | tr -d '\r'`
		token := m.run(fmt.Sprintf(ask, "PUT /latest/api/token", "-ttl-seconds: 60") + " | tail -n 1")
		require.Contains(t, m.run(fmt.Sprintf(ask, "GET /latest/meta-data/ipv6", ": "+token)), m.address())
		require.Contains(t, m.run(fmt.Sprintf(ask, "GET /latest/meta-data/hostname", ": "+token)), want)
	}

	c.renameInDNS(a, d, gateway6)
	c.rules6(a, b)
	c.explain6(a, b)
	c.deleteAll(a.machine, b.machine, d.machine)
}

// renameInDNS renames the VM of d and checks that the guest of a finds it in DNS under the new name, and no longer under
// the old one.
func (c *networkCloud) renameInDNS(a, d *machine6, server string) {
	c.t.Helper()
	_, err := c.admin.Operator.RenameVm(c.context(time.Minute), &operatorv1.RenameVmRequest{
		OrgId: d.vm.GetOrgId(), ProjectId: d.vm.GetProjectId(), VmId: d.vm.GetId(), Name: "six-renamed",
	})
	require.NoError(c.t, err)
	a.eventually("the new name is in DNS", "nslookup -type=aaaa six-renamed.default.internal "+server+" | grep -q "+d.address())
	a.eventually("the old name is not in DNS", "! nslookup -type=aaaa six-d.default.internal "+server+" | grep -q "+d.address())
	require.Contains(c.t, a.run("nslookup "+d.address()+" "+server), "six-renamed.default.internal")
}

// rules6 checks that ingress and egress rules for IPv6 permit traffic, and that traffic stops when a rule is removed,
// also on an open connection.
func (c *networkCloud) rules6(a, b *machine6) {
	t, ctx := c.t, c.context(10*time.Minute)
	g, err := c.networks.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{Name: "six"})
	require.NoError(t, err)
	allow := func(protocol string, port uint32) string {
		g, err := c.networks.AddSecurityGroupRule(ctx, &networkv1.AddSecurityGroupRuleRequest{
			SecurityGroupId: g.GetId(), Rule: &networkv1.SecurityGroupRule{
				Direction: networkv1.Direction_DIRECTION_INGRESS, Ethertype: networkv1.Ethertype_ETHERTYPE_IPV6,
				Protocol: protocol, PortMin: port, PortMax: port, RemoteCidr: prefix6,
			},
		})
		require.NoError(t, err)
		return g.GetRules()[len(g.GetRules())-1].GetId()
	}
	setGroup := func(m *machine6, group string) {
		_, err := c.networks.UpdatePort(ctx, &networkv1.UpdatePortRequest{
			Id: m.port(), SecurityGroups: &networkv1.GroupIds{Ids: []string{group}},
		})
		require.NoError(t, err)
	}
	remove := func(group, rule string) {
		_, err := c.networks.RemoveSecurityGroupRule(ctx, &networkv1.RemoveSecurityGroupRuleRequest{
			SecurityGroupId: group, RuleId: rule,
		})
		require.NoError(t, err)
	}
	ping := "ping6 -c 1 -W 1 " + a.address()
	setGroup(a, g.GetId())
	b.eventually("ping6 is dropped by a group without rules", "! "+ping)
	allow("icmpv6", 0)
	b.eventually("ping6 passes", ping)
	b.run("! ping -c 1 -W 1 " + a.nic.Address.Addr().String()) // a rule for IPv6 permits no IPv4

	// b sends on one connection for up to 300 s. After the rule was removed, a receives no further data. The
	// standard input of both nc processes stays open, because nc ends when its peer has nothing to send.
	rule := allow("tcp", 7000)
	a.run("sleep 300 2>/dev/null </dev/null | timeout 300 nc -l -p 7000 >/tmp/received 2>/dev/null & sleep 1")
	b.run("(while echo x; do sleep 0.2; done) 2>/dev/null </dev/null | timeout 300 nc " + a.address() + " 7000 >/dev/null 2>&1 &")
	a.eventually("data arrives", "test $(wc -c </tmp/received) -gt 4")
	remove(g.GetId(), rule)
	a.eventually("no more data arrives", "n=$(wc -c </tmp/received); sleep 2; test $n = $(wc -c </tmp/received)")
	allow("tcp", 80)
	page := `printf 'GET / HTTP/1.0\r\n\r\n' | timeout 5 nc -w 2 ` + a.address() + ` 80`
	b.eventually("a new connection passes", page+" | grep -q six-a")

	// Without egress rules for IPv6, b sends only IPv4.
	mute, err := c.networks.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{Name: "mute"})
	require.NoError(t, err)
	for _, r := range mute.GetRules() {
		if r.GetEthertype() == networkv1.Ethertype_ETHERTYPE_IPV6 {
			remove(mute.GetId(), r.GetId())
		}
	}
	before, err := c.networks.GetPort(ctx, &networkv1.GetPortRequest{Id: b.port()})
	require.NoError(t, err)
	setGroup(b, mute.GetId())
	b.eventually("b sends no IPv6", "! "+ping)
	b.run("ping6 -c 1 -W 5 " + gateway6) // always permitted
	setGroup(b, before.GetSecurityGroups()[0])
	b.eventually("b sends IPv6 again", ping)
}

// explain6 compares the evaluation of the records with the rules that rules6 has left.
func (c *networkCloud) explain6(a, b *machine6) {
	for _, q := range []struct {
		request *networkv1.ExplainPathRequest
		passes  bool
	}{
		{&networkv1.ExplainPathRequest{ToVmId: a.vm.GetId(), Protocol: "icmpv6"}, true},
		{&networkv1.ExplainPathRequest{ToAddress: a.address(), Port: 80}, true},
		{&networkv1.ExplainPathRequest{ToAddress: a.address(), Port: 7000}, false},
		{&networkv1.ExplainPathRequest{ToAddress: a.nic.Address.Addr().String(), Protocol: "icmp"}, false},
	} {
		q.request.FromVmId = b.vm.GetId()
		path, err := c.networks.ExplainPath(c.context(time.Minute), q.request)
		require.NoError(c.t, err)
		require.Equal(c.t, q.passes, path.GetPasses(), "%s: %s", q.request, path)
	}
}
