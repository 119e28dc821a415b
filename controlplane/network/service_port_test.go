package network

import (
	"testing"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// TestDeleteServiceIPWithFloatingPort attaches a floating IP to the port of a service IP. Without the refusal, the
// floating IP would lead to a port that does not exist.
func TestDeleteServiceIPWithFloatingPort(t *testing.T) {
	w := newWorld(t)
	api, ctx := &server{s: w.networks}, w.as(acme, "")
	_, err := api.CreateExternalNetwork(w.asAdmin(""), &networkv1.CreateExternalNetworkRequest{
		Name: "internet", CidrBlock: "203.0.113.0/24",
		Pools: []*networkv1.AddressRange{{First: "203.0.113.10", Last: "203.0.113.12"}},
	})
	require.NoError(t, err)
	vpc, err := api.CreateVpc(ctx, &networkv1.CreateVpcRequest{CidrBlock: "10.0.0.0/16"})
	require.NoError(t, err)
	subnet, err := api.CreateSubnet(ctx, &networkv1.CreateSubnetRequest{VpcId: vpc.GetId(), CidrBlock: "10.0.1.0/24"})
	require.NoError(t, err)
	service, err := api.CreateServiceIp(ctx, &networkv1.CreateServiceIpRequest{
		SubnetId: subnet.GetId(), Ports: []*networkv1.ServicePort{{Protocol: "tcp", Port: 80}},
	})
	require.NoError(t, err)
	all, err := api.ListPorts(ctx, &networkv1.ListPortsRequest{DeviceId: service.GetId()})
	require.NoError(t, err)
	require.Len(t, all.GetPorts(), 1)
	floating, err := api.CreateFloatingIp(
		ctx, &networkv1.CreateFloatingIpRequest{Name: "public", PortId: all.GetPorts()[0].GetId()},
	)
	require.NoError(t, err)

	_, err = api.DeleteServiceIp(ctx, &networkv1.DeleteServiceIpRequest{Id: service.GetId()})
	require.ErrorContains(t, err, "is used by floating IP public ("+floating.GetId()+")")
	_, err = api.DeleteFloatingIp(ctx, &networkv1.DeleteFloatingIpRequest{Id: floating.GetId()})
	require.NoError(t, err)
	_, err = api.DeleteServiceIp(ctx, &networkv1.DeleteServiceIpRequest{Id: service.GetId()})
	require.NoError(t, err)
	require.NotContains(t, w.records(), "floating-at")
}
