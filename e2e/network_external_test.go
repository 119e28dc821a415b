package e2e

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// outside checks NAT from two hosts, and a floating IP of b.
func (c *networkCloud) outside(vpc string, b, d *machine) {
	t, ctx := c.t, c.context(2*time.Minute)
	c.ensureInternet()
	defer c.serveAddresses(80)()
	ask := `printf 'GET / HTTP/1.0\r\n\r\n' | timeout 3 nc ` + lab.ExternalRouter + ` 80 2>/dev/null | tail -n 1`
	require.Empty(t, b.run(ask), "without a NAT gateway, the internet must not be reachable")

	_, err := c.networks.CreateNatGateway(ctx, &networkv1.CreateNatGatewayRequest{VpcId: vpc, ExternalNetwork: "internet", IsDefault: true})
	require.NoError(t, err)
	for m, want := range map[*machine]string{b: "203.0.113.12", d: "203.0.113.13"} {
		m.eventually("NAT works", `test "$(`+ask+`)" = `+want)
	}

	f, err := c.networks.CreateFloatingIp(ctx, &networkv1.CreateFloatingIpRequest{ExternalNetwork: "internet", PortId: b.port()})
	require.NoError(t, err)
	b.eventually("the guest uses its floating IP", `test "$(`+ask+`)" = `+f.GetAddress())
	fetch := func(ctx context.Context) (string, error) { return c.fetchOutside(ctx, f.GetAddress()+":80") }
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	_, err = fetch(short)
	cancel()
	require.Error(t, err, "the default group must keep the internet out")
	g, err := c.networks.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{Name: "http"})
	require.NoError(t, err)
	_, err = c.networks.AddSecurityGroupRule(ctx, &networkv1.AddSecurityGroupRuleRequest{SecurityGroupId: g.GetId(), Rule: &networkv1.SecurityGroupRule{
		Direction: networkv1.Direction_DIRECTION_INGRESS, Ethertype: networkv1.Ethertype_ETHERTYPE_IPV4, Protocol: "tcp", PortMin: 80, PortMax: 80,
		RemoteCidr: "0.0.0.0/0",
	}})
	require.NoError(t, err)
	port, err := c.networks.GetPort(ctx, &networkv1.GetPortRequest{Id: b.port()})
	require.NoError(t, err)
	_, err = c.networks.UpdatePort(ctx, &networkv1.UpdatePortRequest{
		Id: b.port(), SecurityGroups: &networkv1.GroupIds{Ids: append(port.GetSecurityGroups(), g.GetId())},
	})
	require.NoError(t, err)
	require.NoError(t, lab.Until(ctx, "the floating IP serves the guest's page", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		text, err := fetch(ctx)
		if err == nil && !strings.HasSuffix(strings.TrimSpace(text), "\nb") {
			err = fmt.Errorf("got %q", text)
		}
		return err
	}))
	_, err = c.networks.DeleteFloatingIp(ctx, &networkv1.DeleteFloatingIpRequest{Id: f.GetId()})
	require.NoError(t, err)
	b.eventually("NAT works again", `test "$(`+ask+`)" = 203.0.113.12`)
}
