package convert

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	testID  = "0190a6b2-0000-7000-8000-000000000001"
	otherID = "0190a6b2-0000-7000-8000-000000000002"
)

// validUpdate returns a message with one valid record of each kind that agents read.
func validUpdate() *agentv1.SyncNetworksResponse {
	return &agentv1.SyncNetworksResponse{
		Vpcs: []*agentv1.HostVpc{{Domain: "web.internal", Vpc: &networkv1.Vpc{Id: testID, CidrBlock: "10.0.0.0/16", Mtu: 1450}}},
		Subnets: []*agentv1.HostSubnet{{Vni: 5, Subnet: &networkv1.Subnet{
			Id: testID, VpcId: testID, CidrBlock: "10.0.1.0/24", GatewayIp: "10.0.1.1", DhcpEnabled: true, DnsServers: []string{"10.0.1.2"},
		}}},
		Ports: []*agentv1.HostPort{{Vtep: "192.0.2.1", HostName: "a", BindingGeneration: 1, Port: &networkv1.Port{
			Id: testID, VpcId: testID, SubnetId: testID, MacAddress: "02:00:00:00:00:05", IpAddress: "10.0.1.5", SecurityGroups: []string{otherID},
			AllowedAddressPairs: []*networkv1.AddressPair{{Cidr: "10.0.1.50/32", MacAddress: "02:00:00:00:00:06"}}, PortSecurity: true,
		}}},
		SecurityGroups: []*networkv1.SecurityGroup{{Id: otherID, Rules: []*networkv1.SecurityGroupRule{{
			Direction: networkv1.Direction_DIRECTION_INGRESS, Protocol: "tcp", PortMin: 80, PortMax: 90, RemoteGroupId: otherID,
		}}}},
		RouteTables: []*networkv1.RouteTable{{Id: testID, VpcId: testID, SubnetIds: []string{testID}, Routes: []*networkv1.Route{{
			Destination: "192.0.2.0/24", TargetType: networkv1.RouteTarget_ROUTE_TARGET_PORT, TargetId: testID,
		}}}},
		ServiceIps: []*networkv1.ServiceIp{{
			Id: testID, Name: "API", VpcId: testID, SubnetId: testID, Address: "10.0.1.9", Affinity: networkv1.Affinity_AFFINITY_NONE,
			Ports:       []*networkv1.ServicePort{{Protocol: "tcp", Port: 80, TargetPort: 8080}},
			Backends:    []*networkv1.Backend{{PortId: testID, Weight: 2, Healthy: true, Checked: true}, {Address: "10.0.1.7"}},
			HealthCheck: &networkv1.HealthCheck{Protocol: "tcp", IntervalSeconds: 1, UnhealthyThreshold: 1, HealthyThreshold: 1},
		}},
		Deleted: []string{otherID},
	}
}

// TestWrongRecords changes one value of a valid message at a time. The record with the wrong value must be reported,
// and all other records must be converted.
func TestWrongRecords(t *testing.T) {
	vpc := func(m *agentv1.SyncNetworksResponse) *networkv1.Vpc { return m.Vpcs[0].Vpc }
	subnet := func(m *agentv1.SyncNetworksResponse) *networkv1.Subnet { return m.Subnets[0].Subnet }
	port := func(m *agentv1.SyncNetworksResponse) *networkv1.Port { return m.Ports[0].Port }
	rule := func(m *agentv1.SyncNetworksResponse) *networkv1.SecurityGroupRule {
		return m.SecurityGroups[0].Rules[0]
	}
	service := func(m *agentv1.SyncNetworksResponse) *networkv1.ServiceIp { return m.ServiceIps[0] }
	for name, change := range map[string]func(m *agentv1.SyncNetworksResponse){
		"IPv6 service IP":     func(m *agentv1.SyncNetworksResponse) { service(m).Address = "fd00::9" },
		"affinity":            func(m *agentv1.SyncNetworksResponse) { service(m).Affinity = 258 },
		"service port":        func(m *agentv1.SyncNetworksResponse) { service(m).Ports[0].Port = 65536 + 80 },
		"service protocol":    func(m *agentv1.SyncNetworksResponse) { service(m).Ports[0].Protocol = "icmp" },
		"weight":              func(m *agentv1.SyncNetworksResponse) { service(m).Backends[0].Weight = 101 },
		"backend address":     func(m *agentv1.SyncNetworksResponse) { service(m).Backends[1].Address = "10.0.1.0/24" },
		"check without pause": func(m *agentv1.SyncNetworksResponse) { service(m).HealthCheck.IntervalSeconds = 0 },
		"port of the check":   func(m *agentv1.SyncNetworksResponse) { service(m).HealthCheck.Port = 65536 },
		"public prefix":       func(m *agentv1.SyncNetworksResponse) { vpc(m).CidrBlock = "192.0.2.0/24" },
		"no prefix":           func(m *agentv1.SyncNetworksResponse) { vpc(m).CidrBlock = "" },
		"public IPv6 prefix":  func(m *agentv1.SyncNetworksResponse) { vpc(m).Ipv6CidrBlock = "2001:db8::/48" },
		"MTU 0":               func(m *agentv1.SyncNetworksResponse) { vpc(m).Mtu = 0 },
		"MTU above 16 bits":   func(m *agentv1.SyncNetworksResponse) { vpc(m).Mtu = 65536 + 1450 },
		"VNI 0":               func(m *agentv1.SyncNetworksResponse) { m.Subnets[0].Vni = 0 },
		"VNI above 24 bits":   func(m *agentv1.SyncNetworksResponse) { m.Subnets[0].Vni = 1 << 24 },
		"foreign gateway":     func(m *agentv1.SyncNetworksResponse) { subnet(m).GatewayIp = "10.0.2.1" },
		"resolver is a name":  func(m *agentv1.SyncNetworksResponse) { subnet(m).DnsServers[0] = "dns" },
		"subnet without VPC":  func(m *agentv1.SyncNetworksResponse) { subnet(m).VpcId = "" },
		"IPv6 in IPv4 field":  func(m *agentv1.SyncNetworksResponse) { subnet(m).CidrBlock = "fd00::/64" },
		"VTEP with zone":      func(m *agentv1.SyncNetworksResponse) { m.Ports[0].Vtep = "fe80::1%eth0" },
		"VTEP is multicast":   func(m *agentv1.SyncNetworksResponse) { m.Ports[0].Vtep = "239.0.0.1" },
		"multicast MAC":       func(m *agentv1.SyncNetworksResponse) { port(m).MacAddress = "03:00:00:00:00:05" },
		"MAC of the gateway":  func(m *agentv1.SyncNetworksResponse) { port(m).MacAddress = cloud.GatewayMAC.String() },
		"no address":          func(m *agentv1.SyncNetworksResponse) { port(m).IpAddress = "" },
		"mapped address":      func(m *agentv1.SyncNetworksResponse) { port(m).IpAddress = "::ffff:10.0.1.5" },
		"port ID in a path":   func(m *agentv1.SyncNetworksResponse) { port(m).SubnetId = "../../etc" },
		"17 groups":           func(m *agentv1.SyncNetworksResponse) { port(m).SecurityGroups = make([]string, 17) },
		"host bits in pair":   func(m *agentv1.SyncNetworksResponse) { port(m).AllowedAddressPairs[0].Cidr = "10.0.1.50/24" },
		"direction":           func(m *agentv1.SyncNetworksResponse) { rule(m).Direction = 257 },
		"ethertype":           func(m *agentv1.SyncNetworksResponse) { rule(m).Ethertype = 9 },
		"protocol":            func(m *agentv1.SyncNetworksResponse) { rule(m).Protocol = "" },
		"port above 16 bits":  func(m *agentv1.SyncNetworksResponse) { rule(m).PortMax = 65536 + 80 },
		"ports reversed":      func(m *agentv1.SyncNetworksResponse) { rule(m).PortMax = 79 },
		"group and prefix":    func(m *agentv1.SyncNetworksResponse) { rule(m).RemoteCidr = "10.0.0.0/8" },
		"ICMP type above 255": func(m *agentv1.SyncNetworksResponse) { rule(m).IcmpType = proto.Uint32(264) },
		"201 rules": func(m *agentv1.SyncNetworksResponse) {
			m.SecurityGroups[0].Rules = make([]*networkv1.SecurityGroupRule, 201)
		},
		"route target":         func(m *agentv1.SyncNetworksResponse) { m.RouteTables[0].Routes[0].TargetType = 300 },
		"route without target": func(m *agentv1.SyncNetworksResponse) { m.RouteTables[0].Routes[0].TargetId = "" },
	} {
		m := validUpdate()
		change(m)
		var u cloud.NetworkUpdate
		require.NoError(t, AddNetworkUpdate(&u, m), name)
		require.Len(t, u.Invalid, 1, name)
		require.Equal(t, 5, len(u.VPCs)+len(u.Subnets)+len(u.Ports)+len(u.Groups)+len(u.RouteTables)+len(u.ServiceIPs), name)
	}
	var u cloud.NetworkUpdate
	require.NoError(t, AddNetworkUpdate(&u, validUpdate()))
	require.Empty(t, u.Invalid)
	require.Equal(t, "web.internal", u.VPCs[0].Domain)
	require.Equal(t, "a", u.Ports[0].HostName)
	require.Equal(t, []string{otherID}, u.Deleted)
	require.Equal(t, "api", u.ServiceIPs[0].Name)
	require.Equal(t, []cloud.Backend{
		{Port: testID, Weight: 2, Healthy: true, Checked: true}, {Address: netip.MustParseAddr("10.0.1.7"), Weight: 1},
	}, u.ServiceIPs[0].Backends)
}

// TestRecordsWithoutID requires that a record without an ID is refused, also if the message has only nil records.
func TestRecordsWithoutID(t *testing.T) {
	for _, m := range []*agentv1.SyncNetworksResponse{
		{Vpcs: []*agentv1.HostVpc{{}}}, {Vpcs: []*agentv1.HostVpc{nil}}, {Subnets: []*agentv1.HostSubnet{{}}}, {Ports: []*agentv1.HostPort{nil}},
		{SecurityGroups: []*networkv1.SecurityGroup{nil}}, {RouteTables: []*networkv1.RouteTable{nil}},
		{ServiceIps: []*networkv1.ServiceIp{nil}},
	} {
		require.Error(t, AddNetworkUpdate(&cloud.NetworkUpdate{}, m), "%v", m)
	}
}

// TestRandomMessages requires that no message makes the conversion panic.
func TestRandomMessages(t *testing.T) {
	for oneof := range 3 {
		m := filled(&agentv1.SyncNetworksResponse{}, oneof)
		_ = AddNetworkUpdate(&cloud.NetworkUpdate{}, m)
		m.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
			without := proto.Clone(m)
			without.ProtoReflect().Clear(f)
			_ = AddNetworkUpdate(&cloud.NetworkUpdate{}, without.(*agentv1.SyncNetworksResponse))
			return true
		})
	}
}

// TestDNSNames requires that names that are not DNS names are dropped, because a host name must not keep a port away.
func TestDNSNames(t *testing.T) {
	for in, want := range map[string]string{
		"web": "web", "Web.Internal.": "web.internal", "": "", "a..b": "", "-a": "", "a_b": "", "a b": "", "x\n": "",
	} {
		require.Equal(t, want, dnsName(in), in)
	}
}
