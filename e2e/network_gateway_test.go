package e2e

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// gateways replaces the default NAT gateway of a VPC with one that has an address of its own. It checks that a server
// in the external network sees connections of guests on all hosts from this address, also after the agent of the
// gateway's host was killed and the gateway has moved. subnet is the ID of d's subnet.
func (c *networkCloud) gateways(vpc, subnet string, b, d *machine) {
	t, ctx := c.t, c.context(4*time.Minute)
	defer c.serveAddresses(81)()
	seen := func(m *machine, address string) {
		t.Helper()
		m.eventually("the guest is seen as "+address,
			`test "$(printf 'GET / HTTP/1.0\r\n\r\n' | timeout 5 nc -w 3 `+lab.ExternalRouter+` 81 2>/dev/null | tail -n 1)" = `+address)
	}

	list, err := c.networks.ListNatGateways(ctx, &networkv1.ListNatGatewaysRequest{VpcId: vpc})
	require.NoError(t, err)
	require.Len(t, list.GetNatGateways(), 1)
	shared := list.GetNatGateways()[0]
	_, err = c.networks.UpdateNatGateway(ctx, &networkv1.UpdateNatGatewayRequest{Id: shared.GetId(), IsDefault: ptr(false)})
	require.NoError(t, err)
	own, err := c.networks.CreateNatGateway(ctx, &networkv1.CreateNatGatewayRequest{
		VpcId: vpc, ExternalNetwork: "internet", OwnAddress: true, IsDefault: true,
	})
	require.NoError(t, err)
	first := c.activeGateway(ctx, own.GetId(), "")
	for _, m := range []*machine{b, d} {
		seen(m, own.GetAddress())
	}

	t.Log("a route sends packets of d to the gateway that is no longer the default")
	at := c.activeGateway(ctx, shared.GetId(), "")
	routes, err := c.networks.CreateRouteTable(ctx, &networkv1.CreateRouteTableRequest{VpcId: vpc, SubnetIds: []string{subnet}, Routes: []*networkv1.Route{{
		Destination: lab.ExternalCIDR, TargetType: networkv1.RouteTarget_ROUTE_TARGET_NAT_GATEWAY, TargetId: shared.GetId(),
	}}})
	require.NoError(t, err)
	seen(d, fmt.Sprintf("203.0.113.%d", 11+at))
	seen(b, own.GetAddress())
	_, err = c.networks.DeleteRouteTable(ctx, &networkv1.DeleteRouteTableRequest{Id: routes.GetId()})
	require.NoError(t, err)
	_, err = c.networks.DeleteNatGateway(ctx, &networkv1.DeleteNatGatewayRequest{Id: shared.GetId()})
	require.NoError(t, err)
	seen(d, own.GetAddress())

	t.Log("the agent of the gateway's host is killed, and the gateway moves to another host")
	c.dir.Signal(c.hosts[first].Name, syscall.SIGKILL)
	second := c.activeGateway(ctx, own.GetId(), c.ids[first])
	others := slices.DeleteFunc([]*machine{b, d}, func(m *machine) bool { return m.host == first })
	for _, m := range others {
		seen(m, own.GetAddress())
	}
	require.NoError(t, c.hosts[first].Start(""))
	require.NoError(t, c.hosts[first].Healthy(ctx))
	require.NoError(t, lab.Until(ctx, "the former host has withdrawn the address", func(context.Context) error {
		if c.announces(t, first, own.GetAddress()) {
			return errors.New("it answers for the address")
		}
		return nil
	}))
	require.True(t, c.announces(t, second, own.GetAddress()))
	for _, m := range []*machine{b, d} {
		seen(m, own.GetAddress())
	}
	_, err = c.networks.DeleteNatGateway(ctx, &networkv1.DeleteNatGatewayRequest{Id: own.GetId()})
	require.NoError(t, err)
	_, err = c.networks.CreateNatGateway(ctx, &networkv1.CreateNatGatewayRequest{VpcId: vpc, ExternalNetwork: "internet", IsDefault: true})
	require.NoError(t, err)
	seen(b, fmt.Sprintf("203.0.113.%d", 11+b.host))
}

// activeGateway waits until a NAT gateway is ACTIVE on a host other than the one with the ID former, and returns the
// index of this host.
func (c *networkCloud) activeGateway(ctx context.Context, id, former string) (host int) {
	c.t.Helper()
	defer func(began time.Time) { c.t.Logf("gateway ACTIVE after %v", time.Since(began)) }(time.Now())
	require.NoError(c.t, lab.Until(ctx, "the NAT gateway is ACTIVE", func(ctx context.Context) error {
		g, err := c.networks.GetNatGateway(ctx, &networkv1.GetNatGatewayRequest{Id: id})
		if err != nil {
			return err
		}
		host = slices.Index(c.ids, g.GetNodeId())
		if g.GetStatus() != networkv1.Status_STATUS_ACTIVE || host < 0 || g.GetNodeId() == former {
			return fmt.Errorf("it is %s on host %q: %s", g.GetStatus(), g.GetNodeId(), g.GetStatusReason())
		}
		return nil
	}))
	return host
}

// announces reports whether a host answers ARP requests for an address of the external network.
func (c *networkCloud) announces(t *testing.T, host int, address string) bool {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ip", "-n", fmt.Sprintf("host%d-edge", host+1), "neighbour", "show", "proxy").Output()
	require.NoError(t, err)
	return slices.Contains(strings.Fields(string(out)), address)
}
