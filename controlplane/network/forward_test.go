package network

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
)

// TestEmptyListsAreForwarded empties the lists of resources on a member that forwards the updates to the leader.
// Without care for nil slices, the leader would leave the lists as they are, and report success.
func TestEmptyListsAreForwarded(t *testing.T) {
	w := newWorld(t)
	members := leadertest.NewMembers(2, leadertest.NewLeadership(1))
	New(Options{Store: w.store, Commands: members[1], Log: slog.New(slog.DiscardHandler)})
	follower := New(Options{Store: w.store, Commands: members[2], Log: slog.New(slog.DiscardHandler)})
	api, ctx := &server{s: follower}, w.as(acme, "")

	vpc, err := api.CreateVpc(ctx, &networkv1.CreateVpcRequest{CidrBlock: "10.0.0.0/16"})
	require.NoError(t, err)
	subnet, err := api.CreateSubnet(ctx, &networkv1.CreateSubnetRequest{
		VpcId: vpc.GetId(), CidrBlock: "10.0.1.0/24", DnsServers: []string{"192.0.2.53"},
	})
	require.NoError(t, err)
	port, err := api.CreatePort(ctx, &networkv1.CreatePortRequest{
		SubnetId: subnet.GetId(), AllowedAddressPairs: []*networkv1.AddressPair{{Cidr: "10.9.0.0/16"}},
	})
	require.NoError(t, err)
	require.Len(t, port.GetSecurityGroups(), 1)
	table, err := api.CreateRouteTable(ctx, &networkv1.CreateRouteTableRequest{
		VpcId: vpc.GetId(), SubnetIds: []string{subnet.GetId()},
		Routes: []*networkv1.Route{{Destination: "192.168.0.0/24", TargetType: networkv1.RouteTarget_ROUTE_TARGET_BLACKHOLE}},
	})
	require.NoError(t, err)
	external, err := api.CreateExternalNetwork(w.asAdmin(""), &networkv1.CreateExternalNetworkRequest{
		Name: "internet", CidrBlock: "203.0.113.0/24",
		Pools: []*networkv1.AddressRange{{First: "203.0.113.10", Last: "203.0.113.12"}},
	})
	require.NoError(t, err)

	subnet, err = api.UpdateSubnet(ctx, &networkv1.UpdateSubnetRequest{Id: subnet.GetId(), DnsServers: &networkv1.DnsServers{}})
	require.NoError(t, err)
	require.Empty(t, subnet.GetDnsServers())
	port, err = api.UpdatePort(ctx, &networkv1.UpdatePortRequest{
		Id: port.GetId(), SecurityGroups: &networkv1.GroupIds{}, AllowedAddressPairs: &networkv1.AddressPairs{},
	})
	require.NoError(t, err)
	require.Empty(t, port.GetSecurityGroups())
	require.Empty(t, port.GetAllowedAddressPairs())
	table, err = api.UpdateRouteTable(ctx, &networkv1.UpdateRouteTableRequest{
		Id: table.GetId(), Routes: &networkv1.Routes{}, SubnetIds: &networkv1.SubnetIds{},
	})
	require.NoError(t, err)
	require.Empty(t, table.GetRoutes())
	require.Empty(t, table.GetSubnetIds())
	_, err = api.UpdateExternalNetwork(w.asAdmin(""), &networkv1.UpdateExternalNetworkRequest{
		Name: external.GetName(), Pools: &networkv1.AddressRanges{},
	})
	require.ErrorContains(t, err, "pools: must be 1 to 16")

	// A nil list leaves the present one as it is.
	port, err = api.UpdatePort(ctx, &networkv1.UpdatePortRequest{
		Id:                  port.GetId(),
		AllowedAddressPairs: &networkv1.AddressPairs{Pairs: []*networkv1.AddressPair{{Cidr: "10.9.0.0/16"}}},
	})
	require.NoError(t, err)
	port, err = api.UpdatePort(ctx, &networkv1.UpdatePortRequest{Id: port.GetId(), Name: proto.String("renamed")})
	require.NoError(t, err)
	require.Len(t, port.GetAllowedAddressPairs(), 1)
}
