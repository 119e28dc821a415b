package e2e

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/ipsec"
)

// encryption runs two guests on two hosts, and lets one host encrypt. Packets between the guests must be dropped, and
// the host must have the label of encryption. If the kernel has ESP, the guests must reach each other when all hosts
// encrypt. Otherwise no VM of the VPC may be placed on the host, and the error must name what the kernel lacks. Without
// encryption, the guests must reach each other again.
func (c *networkCloud) encryption() {
	t, ctx := c.t, c.context(5*time.Minute)
	v, err := c.networks.CreateVpc(ctx, &networkv1.CreateVpcRequest{Name: "secret", CidrBlock: "10.6.0.0/16", Mtu: 1300})
	require.NoError(t, err)
	_, err = c.networks.CreateSubnet(
		ctx, &networkv1.CreateSubnetRequest{Name: "secret", VpcId: v.GetId(), CidrBlock: "10.6.1.0/24"},
	)
	require.NoError(t, err)
	f := c.boot("f", 0, &vmv1.NetworkSpec{NetworkId: v.GetId()})
	g := c.boot("g", 2, &vmv1.NetworkSpec{NetworkId: v.GetId()})
	ping := "ping -c 1 -W 2 -s 1272 " + g.nic.Address.Addr().String()
	defer func() {
		for _, m := range []*machine{f, g} {
			_, err := c.vms.DeleteVm(c.context(time.Minute), &vmv1.DeleteVmRequest{VmId: m.vm.GetId(), Force: true})
			require.NoError(t, err)
		}
	}()
	f.eventually("the guests reach each other", ping)

	c.setEncryption(2, true)
	f.run("! " + ping)
	f.run("! " + ping)
	require.NoError(t, lab.Until(ctx, "the host has the label of encryption", func(ctx context.Context) error {
		node, err := c.admin.AwaitNode(ctx, c.hosts[2].Name)
		if err == nil && node.GetLabels()["trivet/encrypt"] != "true" {
			return fmt.Errorf("labels: %v", node.GetLabels())
		}
		return err
	}))
	missing, err := ipsec.MissingFeatures(ctx)
	require.NoError(t, err)
	if len(missing) > 0 {
		c.requireRefused(ctx, v.GetId(), 2, "network.encrypt: "+missing[0])
	} else {
		c.setEncryption(0, true)
		c.setEncryption(1, true)
		f.eventually("the guests reach each other with encryption", ping)
		c.setEncryption(0, false)
		c.setEncryption(1, false)
	}
	c.setEncryption(2, false)
	f.eventually("the guests reach each other again", ping)
}

// requireRefused waits until no VM of a VPC can be placed on a host, for a reason that contains text.
func (c *networkCloud) requireRefused(ctx context.Context, vpc string, host int, text string) {
	c.t.Helper()
	name := c.hosts[host].Name
	require.NoError(c.t, lab.Until(ctx, "no VM of the VPC can be placed on the host", func(ctx context.Context) error {
		_, err := c.vms.CreateVm(ctx, &vmv1.CreateVmRequest{
			Name: "refused", Labels: map[string]string{"trivet/node-selector": "host=" + name},
			Spec: &vmv1.VmSpec{Network: []*vmv1.NetworkSpec{{Id: "nic0", NetworkId: vpc}}},
		})
		for _, d := range status.Convert(err).Details() {
			info, ok := d.(*errdetails.ErrorInfo)
			if ok && strings.Contains(info.GetMetadata()[name], text) {
				return nil
			}
		}
		return fmt.Errorf("CreateVm: %w", err)
	}))
}

// setEncryption starts an agent again with another value of network.encrypt.
func (c *networkCloud) setEncryption(host int, encrypt bool) {
	c.t.Helper()
	agent := c.hosts[host]
	require.NoError(c.t, c.dir.Stop(agent.Name, 12*time.Second))
	agent.Network["encrypt"] = encrypt
	require.NoError(c.t, agent.Start(""))
	require.NoError(c.t, agent.Healthy(c.context(time.Minute)))
}
