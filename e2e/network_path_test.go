package e2e

import (
	"fmt"
	"os/exec"
	"strconv"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// appliance checks a route table with a route to a port of d, a guest that forwards packets to another VPC. The packets
// and their replies pass through d, whose kernel counts them and decreases their TTL. If a packet is too big for the
// network behind d, its sender receives an ICMP error.
func (c *networkCloud) appliance(vpc, front string, a, b, d *machine) {
	t, ctx := c.t, c.context(2*time.Minute)
	behind, subnet := c.privateSubnet("behind", "192.168.50.0/24", "")
	// The address of a is in no group of the other VPC, so the rule permits all addresses.
	group := c.group("behind", ingress("icmp", 0))
	inner, target := c.plug(d, "behind", subnet), c.plug(b, "behind", subnet, group)
	outer := &nic{machine: d, port: &networkv1.Port{Id: d.port()}}
	a.run("! ping -c 1 -W 1 " + target.ip.String())

	for _, n := range []*nic{outer, inner} {
		n.update(&networkv1.UpdatePortRequest{PortSecurity: ptr(false)})
	}
	d.run("sysctl -w net.ipv4.ip_forward=1")
	there, err := c.networks.CreateRouteTable(ctx, &networkv1.CreateRouteTableRequest{
		Name: "there", VpcId: vpc, SubnetIds: []string{front}, Routes: []*networkv1.Route{
			{Destination: "192.168.50.0/24", TargetType: networkv1.RouteTarget_ROUTE_TARGET_PORT, TargetId: d.port()},
		},
	})
	require.NoError(t, err)
	_, err = c.networks.CreateRouteTable(ctx, &networkv1.CreateRouteTableRequest{
		Name: "back", VpcId: behind, SubnetIds: []string{subnet}, Routes: []*networkv1.Route{
			{Destination: "10.0.0.0/16", TargetType: networkv1.RouteTarget_ROUTE_TARGET_PORT, TargetId: inner.port.GetId()},
		},
	})
	require.NoError(t, err)
	// The target also has an interface in the VPC of a. This route prevents replies from leaving through it.
	target.run(fmt.Sprintf("ip route add 10.0.1.10/32 via 192.168.50.1 dev %s", target.device))

	a.eventually("the appliance forwards", "ping -c 1 -W 1 "+target.ip.String())
	before := d.forwarded()
	// The TTL of the reply begins with 64. Three routers decrease it by one each: the gateway of the target's subnet,
	// the appliance, and the gateway of the appliance's subnet.
	reply := fmt.Sprintf("reply from=%v bytes=100 ttl=61", target.ip)
	require.Equal(t, reply, a.run("/init dfping "+target.ip.String()+" 100"))
	require.Equal(t, before+2, d.forwarded(), "the request and the reply must have passed through the appliance")

	c.pathMTU(a, d, inner, target)

	_, err = c.networks.UpdateRouteTable(ctx, &networkv1.UpdateRouteTableRequest{
		Id: there.GetId(), Routes: &networkv1.Routes{},
	})
	require.NoError(t, err)
	a.eventually("the route is gone", "! ping -c 1 -W 1 "+target.ip.String())
	before = d.forwarded()
	a.run("! ping -c 2 -W 1 " + target.ip.String())
	require.Equal(t, before, d.forwarded(), "no packet may pass through the appliance without the route")
	d.run("sysctl -w net.ipv4.ip_forward=0")
	outer.update(&networkv1.UpdatePortRequest{PortSecurity: ptr(true)})
}

// forwarded returns how many IPv4 packets the guest has forwarded.
func (m *machine) forwarded() int {
	m.c.t.Helper()
	n, err := strconv.Atoi(m.run(`awk '/^Ip:/ && $2 + 0 {print $7}' /proc/net/snmp`))
	require.NoError(m.c.t, err)
	return n
}

// pathMTU sends packets that must not be fragmented from a to another host, and through the appliance d, behind which
// the MTU is 1300.
func (c *networkCloud) pathMTU(a, d *machine, inner, target *nic) {
	t := c.t
	for _, to := range []string{d.nic.Address.Addr().String(), target.ip.String(), "10.0.1.1"} {
		require.Contains(t, a.run("/init dfping "+to+" 1400"), "reply from="+to+" bytes=1400 ")
		require.Contains(t, a.run("/init dfping "+to+" 1422"), "reply from="+to+" bytes=1422 ")
		require.Equal(t, "too-big from=local mtu=1450", a.run("/init dfping "+to+" 1423"))
	}
	inner.run(fmt.Sprintf("ip link set %s mtu 1300", inner.device))
	reported := fmt.Sprintf("too-big from=%v mtu=1300", d.nic.Address.Addr())
	require.Equal(t, reported, a.run("/init dfping "+target.ip.String()+" 1273"))
	require.Contains(t, a.run("/init dfping "+target.ip.String()+" 1272"), "bytes=1272 ")
	// The virtual network card has the MTU of the VPC as its maximum.
	a.run("! ip link set eth0 mtu 1451")
}

// externalMTU lowers the MTU of the interface that connects b's host to the external network, and checks that b
// receives an ICMP error with this MTU for a larger packet.
func (c *networkCloud) externalMTU(b *machine) {
	t := c.t
	setMTU := func(mtu string) {
		out, err := exec.Command("ip", "-n", fmt.Sprintf("m%d", b.host+1), "link", "set", "eth1", "mtu", mtu).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	router := lab.ExternalRouter
	require.Contains(t, b.run("/init dfping "+router+" 1400"), "reply from="+router+" bytes=1400 ")
	require.Equal(t, "too-big from=local mtu=1450", b.run("/init dfping "+router+" 1423"))
	setMTU("1400")
	defer setMTU("1500")
	require.Regexp(t, `^too-big from=[0-9.]+ mtu=1400$`, b.run("/init dfping "+router+" 1373"))
	require.Contains(t, b.run("/init dfping "+router+" 1372"), "bytes=1372 ")
}
