package network

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

// TestAgentsReadWhatTheAPISends converts records to messages of the API, sends them over the wire, and converts them
// back as an agent does. No field may be lost.
func TestAgentsReadWhatTheAPISends(t *testing.T) {
	const id, other = "0190a6b2-0000-7000-8000-000000000001", "0190a6b2-0000-7000-8000-000000000002"
	prefix := netip.MustParsePrefix
	vpc := cloud.VPC{
		ID: id, Name: "shop", Org: "o", Project: "p", Description: "d", CIDR: prefix("10.0.0.0/16"),
		CIDR6: prefix("fd00:1::/48"), MTU: 1450,
		ServiceCIDR: prefix("10.0.255.0/24"), Default: true, Status: cloud.NetworkActive, StatusReason: "r",
		CreatedAt: 1, UpdatedAt: 2,
	}
	gotVPC, err := convert.VPCFrom(transmit(t, vpcToProto(&vpc)))
	require.NoError(t, err)
	require.Equal(t, vpc, gotVPC)

	subnet := SubnetInfo{Subnet: cloud.Subnet{
		ID: id, Name: "web", VPC: other, Org: "o", Project: "p", Description: "d", CIDR: prefix("10.0.1.0/24"),
		CIDR6:   prefix("fd00:1::/64"),
		Gateway: netip.MustParseAddr("10.0.1.1"), DHCP: true,
		DNS: []netip.Addr{netip.MustParseAddr("10.0.1.2"), netip.MustParseAddr("fd00::2")},
		VNI: 77, Status: cloud.NetworkPending, StatusReason: "r", CreatedAt: 1, UpdatedAt: 2,
	}}
	gotSubnet, err := convert.SubnetFrom(transmit(t, subnetToProto(&subnet)), 77)
	require.NoError(t, err)
	require.Equal(t, subnet.Subnet, gotSubnet)

	port := cloud.Port{
		ID: id, Name: "n", Org: "o", Project: "p", Description: "d", VPC: other, Subnet: id,
		MAC: cloud.MAC{2, 0, 0, 0, 0, 9},
		IP:  netip.MustParseAddr("10.0.1.9"), IP6: netip.MustParseAddr("fd00:1::9"),
		Groups:  []cloud.SecurityGroupID{id, other},
		Pairs:   []cloud.AddressPair{{CIDR: prefix("10.0.1.50/32")}, {CIDR: prefix("fd00:9::/64"), MAC: cloud.MAC{2, 0, 0, 0, 0, 8}}},
		Secured: true, Mbps: 100, Device: cloud.PortDevice{Kind: cloud.DeviceVM, ID: other}, Node: "n1",
		Status:       cloud.NetworkDown,
		StatusReason: "r", CreatedAt: 1, UpdatedAt: 2, Labels: map[string]string{"app": "web"},
	}
	gotPort, err := convert.PortFrom(transmit(t, portToProto(&port)))
	require.NoError(t, err)
	require.Equal(t, port, gotPort)

	group := cloud.SecurityGroup{ID: id, Name: "g", Org: "o", Project: "p", Description: "d", Default: true, CreatedAt: 1, UpdatedAt: 2, Rules: []cloud.Rule{
		{ID: "1", Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP, Ports: cloud.PortRange{First: 80, Last: 90}, CIDR: prefix("10.0.0.0/8"), Description: "d"},
		{ID: "2", Direction: cloud.Egress, IPv6: true, AnyProtocol: true, Group: other},
		{ID: "3", Direction: cloud.Ingress, Protocol: cloud.ProtocolICMP, ICMP: &cloud.ICMP{Type: 8, AnyCode: true}},
		{ID: "4", Direction: cloud.Ingress, IPv6: true, Protocol: cloud.ProtocolICMPv6, ICMP: &cloud.ICMP{Type: 1, Code: 3}},
		{ID: "5", Direction: cloud.Ingress, Protocol: 0},
		{ID: "6", Direction: cloud.Ingress, Protocol: 47},
	}}
	gotGroup, err := convert.SecurityGroupFrom(transmit(t, groupToProto(&group)))
	require.NoError(t, err)
	require.Equal(t, group, gotGroup)

	table := cloud.RouteTable{
		ID: id, Name: "t", Org: "o", Project: "p", Description: "d", VPC: other, Subnets: []cloud.SubnetID{id, other},
		Status:       cloud.NetworkActive,
		StatusReason: "r", CreatedAt: 1, UpdatedAt: 2, Routes: []cloud.Route{
			{Destination: prefix("0.0.0.0/0"), Target: cloud.RoutePort, ID: other},
			{Destination: prefix("192.0.2.0/24"), Target: cloud.RouteBlackhole},
		},
	}
	gotTable, err := convert.RouteTableFrom(transmit(t, tableToProto(&table)))
	require.NoError(t, err)
	require.Equal(t, table, gotTable)

	peering := cloud.Peering{
		ID: id, Name: "n", Org: "o", Project: "p", Description: "d", VPC: id, PeerOrg: "oo", PeerProject: "pp",
		PeerVPC: other,
		Status:  cloud.NetworkActive, StatusReason: "r", CreatedAt: 1, UpdatedAt: 2,
	}
	gotPeering, err := convert.PeeringFrom(transmit(t, peeringToProto(&peering)))
	require.NoError(t, err)
	require.Equal(t, peering, gotPeering)
	peering.PeerVPC = peering.VPC
	_, err = convert.PeeringFrom(peeringToProto(&peering))
	require.ErrorContains(t, err, "must be another VPC")
}

// TestAgentsReadSelectors sends a service IP with a selector over the wire as hosts get it. The agent gets the selector
// and the reports about the health of ports.
func TestAgentsReadSelectors(t *testing.T) {
	const id, other = "0190a6b2-0000-7000-8000-000000000001", "0190a6b2-0000-7000-8000-000000000002"
	s := cloud.ServiceIP{
		ID: id, VPC: other, Subnet: other, Address: netip.MustParseAddr("10.0.1.9"), Affinity: cloud.AffinityNone,
		Ports:    []cloud.ServicePort{{Protocol: cloud.ProtocolTCP, Port: 80, Target: 8080}},
		Selector: map[string]string{"app": "web"},
		Reports:  []cloud.Backend{{Port: other, Weight: 1, Healthy: true, Checked: true}},
	}
	got, err := convert.ServiceIPFrom(hostService(&s).(*networkv1.ServiceIp))
	require.NoError(t, err)
	require.Equal(t, s, got)
}

// transmit encodes and decodes a message, all of whose fields must be set.
func transmit[M proto.Message](t *testing.T, m M) M {
	t.Helper()
	data, err := proto.Marshal(m)
	require.NoError(t, err)
	out := m.ProtoReflect().New().Interface()
	require.NoError(t, proto.Unmarshal(data, out))
	fields := out.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if _, isSubnet := any(m).(*networkv1.Subnet); isSubnet && f.Name() == "available_ip_count" {
			continue // computed when a subnet is read
		}
		require.True(t, out.ProtoReflect().Has(f), "the test has no value for %s", f.FullName())
	}
	return out.(M)
}
