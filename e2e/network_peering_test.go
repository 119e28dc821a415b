package e2e

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// peering connects the VPC of the guests a and b with a new VPC, whose guest is on a third host. It checks that traffic
// passes only while both VPCs have routes to the peering, and stops when the peering is deleted.
func (c *networkCloud) peering(t *testing.T, vpc string, subnets []string, a, b *machine) {
	ctx := c.context(4 * time.Minute)
	partner, partnerSubnets := c.vpc("partner", "10.7.0.0/16", "10.7.1.0/24")
	p := c.boot("p", 2, &vmv1.NetworkSpec{SubnetId: partnerSubnets[0], IpAddress: "10.7.1.10"})
	ping := func(to *machine) string { return "ping -c 1 -W 1 " + to.nic.Address.Addr().String() }
	blocked := func(why string) {
		t.Helper()
		for _, from := range []*machine{a, b} {
			_, err := from.try(c.context(time.Minute), ping(p))
			require.Error(t, err, why)
			_, err = p.try(c.context(time.Minute), ping(from))
			require.Error(t, err, why)
		}
	}
	blocked("without a peering")

	peering, err := c.networks.CreatePeering(ctx, &networkv1.CreatePeeringRequest{
		Name: "partner", VpcId: vpc, PeerVpcId: partner,
	})
	require.NoError(t, err)
	require.Equal(t, networkv1.Status_STATUS_ACTIVE, peering.GetStatus(), "both VPCs are of one project")
	var tables []string
	table := func(vpc, cidr string, subnets []string) {
		table, err := c.networks.CreateRouteTable(ctx, &networkv1.CreateRouteTableRequest{
			VpcId: vpc, SubnetIds: subnets, Routes: []*networkv1.Route{
				{Destination: cidr, TargetType: networkv1.RouteTarget_ROUTE_TARGET_PEERING, TargetId: peering.GetId()},
			},
		})
		require.NoError(t, err)
		tables = append(tables, table.GetId())
	}
	passes := func() bool {
		out, err := c.networks.ExplainPath(ctx, &networkv1.ExplainPathRequest{
			FromPortId: a.port(), ToPortId: p.port(), Protocol: "icmp",
		})
		require.NoError(t, err)
		return out.GetPasses()
	}
	table(vpc, "10.7.0.0/16", subnets)
	require.False(t, passes())
	blocked("with a route on one side")
	table(partner, "10.0.0.0/16", partnerSubnets)
	require.True(t, passes())

	// The group default permits traffic between its ports, and the ports of all three guests are in this group.
	for _, from := range []*machine{a, b} {
		from.eventually("a ping to the peer passes", ping(p))
		p.eventually("a ping from the peer passes", ping(from))
		page := fmt.Sprintf(`printf 'GET / HTTP/1.0\r\n\r\n' | timeout 5 nc %s 80 | tail -n 1`, p.nic.Address.Addr())
		require.Equal(t, "p", from.run(page))
	}
	a.run("ping -c 1 -W 5 -s 1372 10.7.1.10")
	_, err = a.try(c.context(time.Minute), "ping -c 1 -W 1 10.7.1.1")
	require.Error(t, err, "the gateway of the peer answers")

	a.run("(ping 10.7.1.10 >/tmp/peer 2>&1 </dev/null & echo $! >/tmp/peer.pid)")
	a.eventually("a guest pings the peer all the time", "grep -q seq=2 /tmp/peer")
	_, err = c.networks.DeletePeering(ctx, &networkv1.DeletePeeringRequest{Id: peering.GetId()})
	require.NoError(t, err)
	a.eventually("the answers stop", "n=$(wc -l </tmp/peer); sleep 3; test $n = $(wc -l </tmp/peer)")
	a.run("kill $(cat /tmp/peer.pid)")
	blocked("after the end of the peering")
	for _, id := range tables {
		_, err := c.networks.DeleteRouteTable(ctx, &networkv1.DeleteRouteTableRequest{Id: id})
		require.NoError(t, err)
	}

	_, err = c.vms.DeleteVm(ctx, &vmv1.DeleteVmRequest{VmId: p.vm.GetId(), Force: true})
	require.NoError(t, err)
	require.NoError(t, lab.Until(ctx, "no host has the partner's VPC", func(context.Context) error {
		for i := range c.hosts {
			if path := fmt.Sprintf("/run/netns/host%d-%s", i+1, partner); exists(path) {
				return fmt.Errorf("%s exists", path)
			}
		}
		return nil
	}))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
