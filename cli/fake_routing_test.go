package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func (f *fakeNetwork) CreateRouteTable(
	_ context.Context, in *networkv1.CreateRouteTableRequest,
) (*networkv1.RouteTable, error) {
	defer f.lock(in)()
	return add(f, &f.tables, "route table", &networkv1.RouteTable{
		Name: in.GetName(), VpcId: in.GetVpcId(), Description: in.GetDescription(), SubnetIds: in.GetSubnetIds(),
		Routes: in.GetRoutes(),
	})
}

func (f *fakeNetwork) GetRouteTable(
	_ context.Context, in *networkv1.GetRouteTableRequest,
) (*networkv1.RouteTable, error) {
	defer f.lock(in)()
	return find(f.tables, "route table", in.GetId())
}

func (f *fakeNetwork) ListRouteTables(
	_ context.Context, in *networkv1.ListRouteTablesRequest,
) (*networkv1.ListRouteTablesResponse, error) {
	defer f.lock(&networkv1.ListRouteTablesRequest{Name: in.GetName(), VpcId: in.GetVpcId()})()
	return &networkv1.ListRouteTablesResponse{RouteTables: named(f.tables, in.GetName(), func(r *networkv1.RouteTable) bool {
		return in.GetVpcId() == "" || r.GetVpcId() == in.GetVpcId()
	})}, nil
}

func (f *fakeNetwork) UpdateRouteTable(
	_ context.Context, in *networkv1.UpdateRouteTableRequest,
) (*networkv1.RouteTable, error) {
	defer f.lock(in)()
	r, err := find(f.tables, "route table", in.GetId())
	if err != nil {
		return nil, err
	}
	describe(&r.Name, &r.Description, in.Name, in.Description)
	if in.Routes != nil {
		r.Routes = in.GetRoutes().GetRoutes()
	}
	if in.SubnetIds != nil {
		r.SubnetIds = in.GetSubnetIds().GetIds()
	}
	return r, nil
}

func (f *fakeNetwork) DeleteRouteTable(
	_ context.Context, in *networkv1.DeleteRouteTableRequest,
) (*networkv1.DeleteRouteTableResponse, error) {
	defer f.lock(in)()
	_, err := remove(&f.tables, "route table", in.GetId())
	return &networkv1.DeleteRouteTableResponse{}, err
}

func (f *fakeNetwork) CreateNatGateway(
	_ context.Context, in *networkv1.CreateNatGatewayRequest,
) (*networkv1.NatGateway, error) {
	defer f.lock(in)()
	g := &networkv1.NatGateway{
		Name: in.GetName(), VpcId: in.GetVpcId(), ExternalNetwork: cmp.Or(in.GetExternalNetwork(), "internet"),
		IsDefault: in.GetIsDefault(), Description: in.GetDescription(),
	}
	if in.GetOwnAddress() {
		g.Address = "203.0.113.99"
	}
	return add(f, &f.gateways, "NAT gateway", g)
}

func (f *fakeNetwork) GetNatGateway(
	_ context.Context, in *networkv1.GetNatGatewayRequest,
) (*networkv1.NatGateway, error) {
	defer f.lock(in)()
	return find(f.gateways, "NAT gateway", in.GetId())
}

func (f *fakeNetwork) ListNatGateways(
	_ context.Context, in *networkv1.ListNatGatewaysRequest,
) (*networkv1.ListNatGatewaysResponse, error) {
	defer f.lock(&networkv1.ListNatGatewaysRequest{Name: in.GetName(), VpcId: in.GetVpcId()})()
	return &networkv1.ListNatGatewaysResponse{NatGateways: named(f.gateways, in.GetName(), nil)}, nil
}

func (f *fakeNetwork) UpdateNatGateway(
	_ context.Context, in *networkv1.UpdateNatGatewayRequest,
) (*networkv1.NatGateway, error) {
	defer f.lock(in)()
	g, err := find(f.gateways, "NAT gateway", in.GetId())
	if err != nil {
		return nil, err
	}
	describe(&g.Name, &g.Description, in.Name, in.Description)
	if in.IsDefault != nil {
		g.IsDefault = in.GetIsDefault()
	}
	return g, nil
}

func (f *fakeNetwork) DeleteNatGateway(
	_ context.Context, in *networkv1.DeleteNatGatewayRequest,
) (*networkv1.DeleteNatGatewayResponse, error) {
	defer f.lock(in)()
	_, err := remove(&f.gateways, "NAT gateway", in.GetId())
	return &networkv1.DeleteNatGatewayResponse{}, err
}

func (f *fakeNetwork) CreateFloatingIp(
	_ context.Context, in *networkv1.CreateFloatingIpRequest,
) (*networkv1.FloatingIp, error) {
	defer f.lock(in)()
	return add(f, &f.floating, "floating IP", &networkv1.FloatingIp{
		Name: in.GetName(), ExternalNetwork: cmp.Or(in.GetExternalNetwork(), "internet"),
		Description: in.GetDescription(),
		Address:     cmp.Or(in.GetAddress(), fmt.Sprintf("203.0.113.%d", len(f.floating)+10)), PortId: in.GetPortId(),
		ServiceIpId: in.GetServiceIpId(),
	})
}

func (f *fakeNetwork) GetFloatingIp(
	_ context.Context, in *networkv1.GetFloatingIpRequest,
) (*networkv1.FloatingIp, error) {
	defer f.lock(in)()
	return find(f.floating, "floating IP", in.GetId())
}

func (f *fakeNetwork) ListFloatingIps(
	_ context.Context, in *networkv1.ListFloatingIpsRequest,
) (*networkv1.ListFloatingIpsResponse, error) {
	defer f.lock(&networkv1.ListFloatingIpsRequest{Name: in.GetName(), PortId: in.GetPortId()})()
	return &networkv1.ListFloatingIpsResponse{FloatingIps: named(f.floating, in.GetName(), func(x *networkv1.FloatingIp) bool {
		return in.GetPortId() == "" || x.GetPortId() == in.GetPortId()
	})}, nil
}

func (f *fakeNetwork) UpdateFloatingIp(
	_ context.Context, in *networkv1.UpdateFloatingIpRequest,
) (*networkv1.FloatingIp, error) {
	defer f.lock(in)()
	x, err := find(f.floating, "floating IP", in.GetId())
	if err != nil {
		return nil, err
	}
	describe(&x.Name, &x.Description, in.Name, in.Description)
	if in.PortId != nil || in.ServiceIpId != nil {
		x.PortId, x.ServiceIpId = in.GetPortId(), in.GetServiceIpId()
	}
	return x, nil
}

func (f *fakeNetwork) DeleteFloatingIp(
	_ context.Context, in *networkv1.DeleteFloatingIpRequest,
) (*networkv1.DeleteFloatingIpResponse, error) {
	defer f.lock(in)()
	_, err := remove(&f.floating, "floating IP", in.GetId())
	return &networkv1.DeleteFloatingIpResponse{}, err
}

func (f *fakeNetwork) CreateServiceIp(
	_ context.Context, in *networkv1.CreateServiceIpRequest,
) (*networkv1.ServiceIp, error) {
	defer f.lock(in)()
	n := &networkv1.Subnet{VpcId: in.GetVpcId()}
	if in.GetSubnetId() != "" {
		var err error
		if n, err = find(f.subnets, "subnet", in.GetSubnetId()); err != nil {
			return nil, err
		}
	}
	x := &networkv1.ServiceIp{
		Name: in.GetName(), VpcId: n.GetVpcId(), SubnetId: n.GetId(), Address: cmp.Or(in.GetAddress(), "10.0.1.200"),
		Ports: in.GetPorts(), Backends: in.GetBackends(),
		HealthCheck: in.GetHealthCheck(), Affinity: in.GetAffinity(), Description: in.GetDescription(),
		Selector: in.GetSelector(),
	}
	for i, b := range x.GetBackends() {
		b.Healthy = i == 0
	}
	return add(f, &f.services, "service IP", x)
}

func (f *fakeNetwork) GetServiceIp(_ context.Context, in *networkv1.GetServiceIpRequest) (*networkv1.ServiceIp, error) {
	defer f.lock(in)()
	return find(f.services, "service IP", in.GetId())
}

func (f *fakeNetwork) ListServiceIps(
	_ context.Context, in *networkv1.ListServiceIpsRequest,
) (*networkv1.ListServiceIpsResponse, error) {
	defer f.lock(&networkv1.ListServiceIpsRequest{Name: in.GetName(), VpcId: in.GetVpcId()})()
	return &networkv1.ListServiceIpsResponse{ServiceIps: named(f.services, in.GetName(), nil)}, nil
}

func (f *fakeNetwork) UpdateServiceIp(
	_ context.Context, in *networkv1.UpdateServiceIpRequest,
) (*networkv1.ServiceIp, error) {
	defer f.lock(in)()
	x, err := find(f.services, "service IP", in.GetId())
	if err != nil {
		return nil, err
	}
	describe(&x.Name, &x.Description, in.Name, in.Description)
	x.Ports, x.Backends, x.HealthCheck, x.Affinity = in.GetPorts(), in.GetBackends(), in.GetHealthCheck(), in.GetAffinity()
	x.Selector = in.GetSelector()
	return x, nil
}

func (f *fakeNetwork) DeleteServiceIp(
	_ context.Context, in *networkv1.DeleteServiceIpRequest,
) (*networkv1.DeleteServiceIpResponse, error) {
	defer f.lock(in)()
	_, err := remove(&f.services, "service IP", in.GetId())
	return &networkv1.DeleteServiceIpResponse{}, err
}

// CreatePeering does not check whether the peering's name is taken, so that scripts can make two with one name, as two
// projects can.
func (f *fakeNetwork) CreatePeering(_ context.Context, in *networkv1.CreatePeeringRequest) (*networkv1.Peering, error) {
	defer f.lock(in)()
	p := &networkv1.Peering{
		Name: in.GetName(), VpcId: in.GetVpcId(), PeerOrgId: cmp.Or(in.GetPeerOrgId(), "default"),
		PeerProjectId: cmp.Or(in.GetPeerProjectId(), "default"),
		PeerVpcId:     in.GetPeerVpcId(), Description: in.GetDescription(), Status: networkv1.Status_STATUS_ACTIVE,
	}
	if p.GetPeerProjectId() != "default" {
		p.Status = networkv1.Status_STATUS_PENDING
	}
	var one []*networkv1.Peering
	p, err := add(f, &one, "peering", p)
	f.peerings = append(f.peerings, p)
	return p, err
}

func (f *fakeNetwork) AcceptPeering(_ context.Context, in *networkv1.AcceptPeeringRequest) (*networkv1.Peering, error) {
	defer f.lock(in)()
	p, err := find(f.peerings, "peering", in.GetId())
	if err == nil {
		p.Status = networkv1.Status_STATUS_ACTIVE
	}
	return p, err
}

func (f *fakeNetwork) GetPeering(_ context.Context, in *networkv1.GetPeeringRequest) (*networkv1.Peering, error) {
	defer f.lock(in)()
	return find(f.peerings, "peering", in.GetId())
}

func (f *fakeNetwork) ListPeerings(
	_ context.Context, in *networkv1.ListPeeringsRequest,
) (*networkv1.ListPeeringsResponse, error) {
	defer f.lock(&networkv1.ListPeeringsRequest{Name: in.GetName(), VpcId: in.GetVpcId()})()
	return &networkv1.ListPeeringsResponse{Peerings: named(f.peerings, in.GetName(), nil)}, nil
}

func (f *fakeNetwork) UpdatePeering(_ context.Context, in *networkv1.UpdatePeeringRequest) (*networkv1.Peering, error) {
	defer f.lock(in)()
	p, err := find(f.peerings, "peering", in.GetId())
	if err == nil {
		describe(&p.Name, &p.Description, in.Name, in.Description)
	}
	return p, err
}

func (f *fakeNetwork) DeletePeering(
	_ context.Context, in *networkv1.DeletePeeringRequest,
) (*networkv1.DeletePeeringResponse, error) {
	defer f.lock(in)()
	_, err := remove(&f.peerings, "peering", in.GetId())
	return &networkv1.DeletePeeringResponse{}, err
}

func (f *fakeNetwork) CreateExternalNetwork(
	_ context.Context, in *networkv1.CreateExternalNetworkRequest,
) (*networkv1.ExternalNetwork, error) {
	defer f.lock(in)()
	n := &networkv1.ExternalNetwork{
		Name: in.GetName(), CidrBlock: in.GetCidrBlock(), Pools: in.GetPools(), GatewayIp: in.GetGatewayIp(),
		Vlan: in.GetVlan(), Description: in.GetDescription(),
		AvailableIpCount: 90, CreatedAt: now.UnixMilli(), UpdatedAt: now.UnixMilli(),
	}
	f.externals = append(f.externals, n)
	return n, nil
}

func (f *fakeNetwork) external(name string) (*networkv1.ExternalNetwork, error) {
	for _, n := range f.externals {
		if n.GetName() == name {
			return n, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no external network %s", name)
}

func (f *fakeNetwork) GetExternalNetwork(
	_ context.Context, in *networkv1.GetExternalNetworkRequest,
) (*networkv1.ExternalNetwork, error) {
	defer f.lock(in)()
	return f.external(in.GetName())
}

func (f *fakeNetwork) ListExternalNetworks(
	_ context.Context, in *networkv1.ListExternalNetworksRequest,
) (*networkv1.ListExternalNetworksResponse, error) {
	defer f.lock(&networkv1.ListExternalNetworksRequest{Name: in.GetName()})()
	return &networkv1.ListExternalNetworksResponse{ExternalNetworks: f.externals}, nil
}

func (f *fakeNetwork) UpdateExternalNetwork(
	_ context.Context, in *networkv1.UpdateExternalNetworkRequest,
) (*networkv1.ExternalNetwork, error) {
	defer f.lock(in)()
	n, err := f.external(in.GetName())
	if err != nil {
		return nil, err
	}
	describe(&n.GatewayIp, &n.Description, in.GatewayIp, in.Description)
	if in.Pools != nil {
		n.Pools = in.GetPools().GetRanges()
	}
	return n, nil
}

func (f *fakeNetwork) DeleteExternalNetwork(
	_ context.Context, in *networkv1.DeleteExternalNetworkRequest,
) (*networkv1.DeleteExternalNetworkResponse, error) {
	defer f.lock(in)()
	n, err := f.external(in.GetName())
	f.externals = slices.DeleteFunc(f.externals, func(o *networkv1.ExternalNetwork) bool { return o == n })
	return &networkv1.DeleteExternalNetworkResponse{}, err
}

// ExplainPath lets packets for port 443 pass, and drops others at the destination's security groups.
func (f *fakeNetwork) ExplainPath(
	_ context.Context, in *networkv1.ExplainPathRequest,
) (*networkv1.ExplainPathResponse, error) {
	defer f.lock(in)()
	out := &networkv1.ExplainPathResponse{Passes: in.GetPort() == 443, Steps: []*networkv1.PathStep{
		{Stage: "source", Explanation: "Port " + in.GetFromPortId() + " sends from its own address 10.0.1.2.", Passes: true},
	}}
	last := &networkv1.PathStep{Stage: "ingress", Explanation: "Security group web permits ingress.", Passes: true}
	if !out.GetPasses() {
		last = &networkv1.PathStep{Stage: "ingress", Explanation: "No rule of the port's 1 security groups permits ingress with 10.0.1.2."}
	}
	out.Steps = append(out.Steps, last)
	return out, nil
}
