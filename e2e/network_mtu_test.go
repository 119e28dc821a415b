package e2e

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// mtu runs two guests in a VPC with an MTU of 1300. The status of a guest's VM must count the bytes that the guest has
// received and sent. Then the MTU of a host's underlay becomes too small for the VPC. The agent must end. After its
// restart, no VM of the VPC may be placed on the host until the former MTU is set again.
func (c *networkCloud) mtu() {
	t, ctx := c.t, c.context(5*time.Minute)
	v, err := c.networks.CreateVpc(ctx, &networkv1.CreateVpcRequest{Name: "slim", CidrBlock: "10.5.0.0/16", Mtu: 1300})
	require.NoError(t, err)
	_, err = c.networks.CreateSubnet(
		ctx, &networkv1.CreateSubnetRequest{Name: "slim", VpcId: v.GetId(), CidrBlock: "10.5.1.0/24"},
	)
	require.NoError(t, err)
	f := c.boot("f", 0, &vmv1.NetworkSpec{NetworkId: v.GetId()})
	g := c.boot("g", 2, &vmv1.NetworkSpec{NetworkId: v.GetId()})
	defer func() {
		for _, m := range []*machine{f, g} {
			_, err := c.vms.DeleteVm(c.context(time.Minute), &vmv1.DeleteVmRequest{VmId: m.vm.GetId(), Force: true})
			require.NoError(t, err)
		}
	}()
	require.Equal(t, 1300, f.nic.MTU)
	f.run("ping -c 1 -W 5 -s 1272 " + g.nic.Address.Addr().String())
	require.Contains(t, f.run("ip link show eth0"), "mtu 1300")
	require.NoError(t, lab.Until(ctx, "the VM reports its traffic", func(ctx context.Context) error {
		vm, err := c.vms.GetVm(ctx, &vmv1.GetVmRequest{VmId: f.vm.GetId()})
		if u := vm.GetStatus().GetResourceUsage(); err == nil &&
			(u.GetNetworkRxBytes() < 1300 || u.GetNetworkTxBytes() < 1300) {
			return fmt.Errorf("received %d and sent %d bytes", u.GetNetworkRxBytes(), u.GetNetworkTxBytes())
		}
		return err
	}))

	c.setUnderlayMTU(2, 1320)
	require.NoError(t, lab.Until(c.context(time.Minute), "the MTU of the host's underlay is too small for the VPC", func(ctx context.Context) error {
		vm, err := c.vms.CreateVm(ctx, &vmv1.CreateVmRequest{
			Name: "refused", Labels: map[string]string{"trivet/node-selector": "host=" + c.hosts[2].Name},
			Spec: &vmv1.VmSpec{Network: []*vmv1.NetworkSpec{{Id: "nic0", NetworkId: v.GetId()}}},
		})
		if err == nil { // The host has not reported its MTU yet.
			_, err = c.vms.DeleteVm(ctx, &vmv1.DeleteVmRequest{VmId: vm.GetId(), Force: true})
			return errors.Join(errors.New("the VM was created"), err)
		}
		for _, d := range status.Convert(err).Details() {
			info, ok := d.(*errdetails.ErrorInfo)
			if ok && strings.Contains(info.GetMetadata()[c.hosts[2].Name], "an MTU of 1320, and the VPC needs 1350") {
				return nil
			}
		}
		return fmt.Errorf("CreateVm: %w", err)
	}))
	c.setUnderlayMTU(2, 1500)
	f.eventually("the guests reach each other", "ping -c 1 -W 5 -s 1272 "+g.nic.Address.Addr().String())
}

// setUnderlayMTU sets the MTU of a host's interface. The agent must notice it and end; setUnderlayMTU starts it again.
func (c *networkCloud) setUnderlayMTU(host, mtu int) {
	c.t.Helper()
	out, err := exec.Command(
		"ip", "-n", fmt.Sprintf("m%d", host+1), "link", "set", "eth0", "mtu", fmt.Sprint(mtu),
	).CombinedOutput()
	require.NoError(c.t, err, "%s", out)
	agent := c.hosts[host]
	ctx := c.context(time.Minute)
	require.NoError(c.t, lab.Until(ctx, "the agent has ended", func(context.Context) error {
		if c.dir.Running(agent.Name) != 0 {
			return errors.New("it runs")
		}
		return nil
	}))
	require.NoError(c.t, agent.Start(""))
	require.NoError(c.t, agent.Healthy(ctx))
}
