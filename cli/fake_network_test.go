package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// fakeNetwork serves network.v1 from data in memory. It adds the requests to the cloud's list of calls. It checks only
// what the scripts need: that objects exist, and that names are unique.
type fakeNetwork struct {
	networkv1.UnimplementedNetworkServiceServer
	cloud *fakeCloud

	mu        sync.Mutex
	vpcs      []*networkv1.Vpc
	subnets   []*networkv1.Subnet
	ports     []*networkv1.Port
	groups    []*networkv1.SecurityGroup
	tables    []*networkv1.RouteTable
	gateways  []*networkv1.NatGateway
	floating  []*networkv1.FloatingIp
	services  []*networkv1.ServiceIp
	peerings  []*networkv1.Peering
	externals []*networkv1.ExternalNetwork
}

// lock locks the fake and notes a request.
func (f *fakeNetwork) lock(in proto.Message) func() {
	f.mu.Lock()
	if text := oneLine(in); text != "" {
		f.cloud.mu.Lock()
		f.cloud.calls = append(f.cloud.calls, "  "+text)
		f.cloud.mu.Unlock()
	}
	return f.mu.Unlock
}

// oneLine returns a message as text. It makes the white space regular, which prototext inserts at random.
func oneLine(m proto.Message) string {
	text, _ := prototext.MarshalOptions{}.Marshal(m)
	return strings.Join(strings.Fields(string(text)), " ")
}

func (f *fakeNetwork) newID() string {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	return f.cloud.nextID()
}

// resource is a resource of the network service other than an external network.
type resource interface {
	proto.Message
	GetId() string
	GetName() string
}

// add gives an object an ID, its tenant and a status, and adds it to all. It returns AlreadyExists if the name is
// taken.
func add[T resource](f *fakeNetwork, all *[]T, kind string, o T) (T, error) {
	for _, other := range *all {
		if o.GetName() != "" && other.GetName() == o.GetName() {
			return o, failed(codes.AlreadyExists, "", "the project has a %s with the name %s", kind, o.GetName())
		}
	}
	m := o.ProtoReflect()
	set := func(field protoreflect.Name, v any) {
		if d := m.Descriptor().Fields().ByName(field); d != nil && !m.Has(d) {
			m.Set(d, protoreflect.ValueOf(v))
		}
	}
	set("id", f.newID())
	set("org_id", "default")
	set("project_id", "default")
	set("status", protoreflect.EnumNumber(networkv1.Status_STATUS_PENDING))
	set("created_at", now.UnixMilli())
	set("updated_at", now.UnixMilli())
	*all = append(*all, o)
	return o, nil
}

// named returns the objects with a name, or all if the name is empty, that keep accepts.
func named[T interface{ GetName() string }](all []T, name string, keep func(T) bool) (found []T) {
	for _, o := range all {
		if (name == "" || o.GetName() == name) && (keep == nil || keep(o)) {
			found = append(found, o)
		}
	}
	return found
}

// describe changes name and description as an update does.
func describe(name, description *string, toName, toDescription *string) {
	if toName != nil {
		*name = *toName
	}
	if toDescription != nil {
		*description = *toDescription
	}
}

func (f *fakeNetwork) CreateVpc(_ context.Context, in *networkv1.CreateVpcRequest) (*networkv1.Vpc, error) {
	defer f.lock(in)()
	if in.GetCidrBlock() == "8.0.0.0/8" {
		return nil, failed(codes.InvalidArgument, "cidr_block", "cidr_block: must be within 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16, got 8.0.0.0/8")
	}
	v, err := add(f, &f.vpcs, "VPC", &networkv1.Vpc{
		Name: in.GetName(), CidrBlock: in.GetCidrBlock(), Ipv6CidrBlock: in.GetIpv6CidrBlock(), Description: in.GetDescription(), Mtu: cmp.Or(in.GetMtu(), 1450),
		IsDefault: in.GetName() == "default",
	})
	if err == nil && len(f.groups) == 0 {
		_, err = add(f, &f.groups, "security group", &networkv1.SecurityGroup{Name: "default", IsDefault: true})
	}
	return v, err
}

func (f *fakeNetwork) GetVpc(_ context.Context, in *networkv1.GetVpcRequest) (*networkv1.Vpc, error) {
	defer f.lock(in)()
	return find(f.vpcs, "VPC", in.GetId())
}

func (f *fakeNetwork) ListVpcs(_ context.Context, in *networkv1.ListVpcsRequest) (*networkv1.ListVpcsResponse, error) {
	defer f.lock(&networkv1.ListVpcsRequest{ProjectId: in.GetProjectId(), Name: in.GetName()})()
	if in.GetProjectId() == "secret" {
		return nil, refused("NO_ROLE", "demo has no role in project secret")
	}
	return &networkv1.ListVpcsResponse{Vpcs: named(f.vpcs, in.GetName(), nil)}, nil
}

func (f *fakeNetwork) ListAllVpcs(_ context.Context, in *networkv1.ListAllVpcsRequest) (*networkv1.ListAllVpcsResponse, error) {
	defer f.lock(&networkv1.ListAllVpcsRequest{OrgId: in.GetOrgId()})()
	return &networkv1.ListAllVpcsResponse{Vpcs: f.vpcs}, nil
}

func (f *fakeNetwork) ListAllSecurityGroups(_ context.Context, in *networkv1.ListAllSecurityGroupsRequest) (*networkv1.ListAllSecurityGroupsResponse, error) {
	defer f.lock(&networkv1.ListAllSecurityGroupsRequest{OrgId: in.GetOrgId(), ProjectId: in.GetProjectId()})()
	return &networkv1.ListAllSecurityGroupsResponse{SecurityGroups: f.groups}, nil
}

func (f *fakeNetwork) UpdateVpc(_ context.Context, in *networkv1.UpdateVpcRequest) (*networkv1.Vpc, error) {
	defer f.lock(in)()
	v, err := find(f.vpcs, "VPC", in.GetId())
	if err == nil {
		describe(&v.Name, &v.Description, in.Name, in.Description)
	}
	return v, err
}

func (f *fakeNetwork) DeleteVpc(_ context.Context, in *networkv1.DeleteVpcRequest) (*networkv1.DeleteVpcResponse, error) {
	defer f.lock(in)()
	for _, n := range f.subnets {
		if n.GetVpcId() == in.GetId() {
			v, err := find(f.vpcs, "VPC", in.GetId())
			if err != nil {
				return nil, err
			}
			return nil, withReason(codes.FailedPrecondition, "IN_USE", "VPC %s (%s) is used by subnet %s (%s)", v.GetName(), v.GetId(), n.GetName(), n.GetId())
		}
	}
	_, err := remove(&f.vpcs, "VPC", in.GetId())
	return &networkv1.DeleteVpcResponse{}, err
}

func (f *fakeNetwork) CreateSubnet(_ context.Context, in *networkv1.CreateSubnetRequest) (*networkv1.Subnet, error) {
	defer f.lock(in)()
	if _, err := find(f.vpcs, "VPC", in.GetVpcId()); err != nil {
		return nil, err
	}
	gateway := strings.TrimSuffix(in.GetCidrBlock()[:strings.IndexByte(in.GetCidrBlock(), '/')], "0") + "1"
	return add(f, &f.subnets, "subnet", &networkv1.Subnet{
		Name: in.GetName(), VpcId: in.GetVpcId(), CidrBlock: in.GetCidrBlock(), Ipv6CidrBlock: in.GetIpv6CidrBlock(), Description: in.GetDescription(),
		GatewayIp: cmp.Or(in.GetGatewayIp(), gateway), DhcpEnabled: in.DhcpEnabled == nil || in.GetDhcpEnabled(), DnsServers: in.GetDnsServers(),
		AvailableIpCount: 253,
	})
}

func (f *fakeNetwork) GetSubnet(_ context.Context, in *networkv1.GetSubnetRequest) (*networkv1.Subnet, error) {
	defer f.lock(in)()
	return find(f.subnets, "subnet", in.GetId())
}

func (f *fakeNetwork) ListSubnets(_ context.Context, in *networkv1.ListSubnetsRequest) (*networkv1.ListSubnetsResponse, error) {
	defer f.lock(&networkv1.ListSubnetsRequest{Name: in.GetName(), VpcId: in.GetVpcId()})()
	return &networkv1.ListSubnetsResponse{Subnets: named(f.subnets, in.GetName(), func(n *networkv1.Subnet) bool {
		return in.GetVpcId() == "" || n.GetVpcId() == in.GetVpcId()
	})}, nil
}

func (f *fakeNetwork) UpdateSubnet(_ context.Context, in *networkv1.UpdateSubnetRequest) (*networkv1.Subnet, error) {
	defer f.lock(in)()
	n, err := find(f.subnets, "subnet", in.GetId())
	if err != nil {
		return nil, err
	}
	describe(&n.Name, &n.Description, in.Name, in.Description)
	if in.DhcpEnabled != nil {
		n.DhcpEnabled = in.GetDhcpEnabled()
	}
	if in.DnsServers != nil {
		n.DnsServers = in.GetDnsServers().GetAddresses()
	}
	return n, nil
}

func (f *fakeNetwork) DeleteSubnet(_ context.Context, in *networkv1.DeleteSubnetRequest) (*networkv1.DeleteSubnetResponse, error) {
	defer f.lock(in)()
	_, err := remove(&f.subnets, "subnet", in.GetId())
	return &networkv1.DeleteSubnetResponse{}, err
}

func (f *fakeNetwork) CreatePort(_ context.Context, in *networkv1.CreatePortRequest) (*networkv1.Port, error) {
	defer f.lock(in)()
	n, err := find(f.subnets, "subnet", in.GetSubnetId())
	if err != nil {
		return nil, err
	}
	p := &networkv1.Port{
		Name: in.GetName(), VpcId: n.GetVpcId(), SubnetId: n.GetId(), MacAddress: cmp.Or(in.GetMacAddress(), fmt.Sprintf("02:00:00:00:00:%02x", len(f.ports)+1)),
		IpAddress:   cmp.Or(in.GetIpAddress(), strings.TrimSuffix(n.GetGatewayIp(), "1")+fmt.Sprint(len(f.ports)+2)),
		Ipv6Address: in.GetIpv6Address(), AllowedAddressPairs: in.GetAllowedAddressPairs(), PortSecurity: in.PortSecurity == nil || in.GetPortSecurity(),
		BandwidthMbps: in.GetBandwidthMbps(), Description: in.GetDescription(), SecurityGroups: in.GetSecurityGroups().GetIds(), Status: networkv1.Status_STATUS_DOWN,
		Labels: in.GetLabels(),
	}
	if in.GetSecurityGroups() == nil {
		p.SecurityGroups = []string{f.groups[0].GetId()}
	}
	return add(f, &f.ports, "port", p)
}

func (f *fakeNetwork) GetPort(_ context.Context, in *networkv1.GetPortRequest) (*networkv1.Port, error) {
	defer f.lock(in)()
	return find(f.ports, "port", in.GetId())
}

func (f *fakeNetwork) ListPorts(_ context.Context, in *networkv1.ListPortsRequest) (*networkv1.ListPortsResponse, error) {
	noted := proto.CloneOf(in)
	noted.OrgId, noted.ProjectId, noted.PageSize = "", "", 0
	defer f.lock(noted)()
	return &networkv1.ListPortsResponse{Ports: named(f.ports, in.GetName(), func(p *networkv1.Port) bool {
		return (in.GetSubnetId() == "" || p.GetSubnetId() == in.GetSubnetId()) && (in.GetVpcId() == "" || p.GetVpcId() == in.GetVpcId()) &&
			(in.GetDeviceId() == "" || p.GetDeviceId() == in.GetDeviceId()) &&
			(in.GetSecurityGroupId() == "" || slices.Contains(p.GetSecurityGroups(), in.GetSecurityGroupId()))
	})}, nil
}

func (f *fakeNetwork) UpdatePort(_ context.Context, in *networkv1.UpdatePortRequest) (*networkv1.Port, error) {
	defer f.lock(in)()
	p, err := find(f.ports, "port", in.GetId())
	if err != nil {
		return nil, err
	}
	describe(&p.Name, &p.Description, in.Name, in.Description)
	if in.SecurityGroups != nil {
		p.SecurityGroups = in.GetSecurityGroups().GetIds()
	}
	if in.AllowedAddressPairs != nil {
		p.AllowedAddressPairs = in.GetAllowedAddressPairs().GetPairs()
	}
	if in.PortSecurity != nil {
		p.PortSecurity = in.GetPortSecurity()
	}
	if in.BandwidthMbps != nil {
		p.BandwidthMbps = in.GetBandwidthMbps()
	}
	if in.Labels != nil {
		p.Labels = in.GetLabels().GetLabels()
	}
	return p, nil
}

func (f *fakeNetwork) DeletePort(_ context.Context, in *networkv1.DeletePortRequest) (*networkv1.DeletePortResponse, error) {
	defer f.lock(in)()
	_, err := remove(&f.ports, "port", in.GetId())
	return &networkv1.DeletePortResponse{}, err
}

func (f *fakeNetwork) CreateSecurityGroup(_ context.Context, in *networkv1.CreateSecurityGroupRequest) (*networkv1.SecurityGroup, error) {
	defer f.lock(in)()
	g := &networkv1.SecurityGroup{Name: in.GetName(), Description: in.GetDescription(), IsDefault: in.GetName() == "default"}
	rules := in.GetRules()
	if len(rules) == 0 {
		rules = []*networkv1.SecurityGroupRule{{Direction: networkv1.Direction_DIRECTION_EGRESS, Protocol: "any"}}
	}
	for _, r := range rules {
		r = proto.CloneOf(r)
		r.Id = f.newID()
		g.Rules = append(g.Rules, r)
	}
	return add(f, &f.groups, "security group", g)
}

func (f *fakeNetwork) GetSecurityGroup(_ context.Context, in *networkv1.GetSecurityGroupRequest) (*networkv1.SecurityGroup, error) {
	defer f.lock(in)()
	return find(f.groups, "security group", in.GetId())
}

func (f *fakeNetwork) ListSecurityGroups(_ context.Context, in *networkv1.ListSecurityGroupsRequest) (*networkv1.ListSecurityGroupsResponse, error) {
	defer f.lock(&networkv1.ListSecurityGroupsRequest{Name: in.GetName()})()
	return &networkv1.ListSecurityGroupsResponse{SecurityGroups: named(f.groups, in.GetName(), nil)}, nil
}

func (f *fakeNetwork) UpdateSecurityGroup(_ context.Context, in *networkv1.UpdateSecurityGroupRequest) (*networkv1.SecurityGroup, error) {
	defer f.lock(in)()
	g, err := find(f.groups, "security group", in.GetId())
	if err == nil {
		describe(&g.Name, &g.Description, in.Name, in.Description)
	}
	return g, err
}

func (f *fakeNetwork) DeleteSecurityGroup(_ context.Context, in *networkv1.DeleteSecurityGroupRequest) (*networkv1.DeleteSecurityGroupResponse, error) {
	defer f.lock(in)()
	_, err := remove(&f.groups, "security group", in.GetId())
	return &networkv1.DeleteSecurityGroupResponse{}, err
}

func (f *fakeNetwork) AddSecurityGroupRule(_ context.Context, in *networkv1.AddSecurityGroupRuleRequest) (*networkv1.SecurityGroup, error) {
	defer f.lock(in)()
	g, err := find(f.groups, "security group", in.GetSecurityGroupId())
	if err != nil {
		return nil, err
	}
	for _, r := range g.GetRules() {
		same := proto.CloneOf(r)
		same.Id = ""
		if proto.Equal(same, in.GetRule()) {
			return nil, failed(codes.AlreadyExists, "", "security group %s has this rule already: %s", g.GetId(), r.GetId())
		}
	}
	r := proto.CloneOf(in.GetRule())
	r.Id = f.newID()
	g.Rules = append(g.Rules, r)
	return g, nil
}

func (f *fakeNetwork) RemoveSecurityGroupRule(_ context.Context, in *networkv1.RemoveSecurityGroupRuleRequest) (*networkv1.SecurityGroup, error) {
	defer f.lock(in)()
	g, err := find(f.groups, "security group", in.GetSecurityGroupId())
	if err != nil {
		return nil, err
	}
	_, err = remove(&g.Rules, "rule", in.GetRuleId())
	return g, err
}
