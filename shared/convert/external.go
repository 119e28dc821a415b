package convert

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// NATGatewayFrom returns the NAT gateway in a message of the control plane. It returns an InvalidArgument fault if a
// host cannot have it.
func NATGatewayFrom(in *networkv1.NatGateway) (n cloud.NATGateway, err error) {
	n = cloud.NATGateway{
		ID: cloud.NATGatewayID(in.GetId()), Name: in.GetName(), Org: cloud.OrgID(in.GetOrgId()), Project: cloud.ProjectID(in.GetProjectId()),
		Description: in.GetDescription(), VPC: cloud.VPCID(in.GetVpcId()), External: in.GetExternalNetwork(), Default: in.GetIsDefault(),
		Status: cloud.NetworkStatus(in.GetStatus()), StatusReason: in.GetStatusReason(), CreatedAt: in.GetCreatedAt(), UpdatedAt: in.GetUpdatedAt(),
		Placement: cloud.Placement{Node: cloud.NodeID(in.GetNodeId())},
	}
	if err := checkIDs("id", in.GetId(), "vpc_id", in.GetVpcId()); err != nil {
		return n, err
	}
	if in.GetAddress() != "" {
		n.Address, err = cloud.ParseAddr("address", in.GetAddress())
	}
	return n, err
}

// natGatewayOnHost returns the NAT gateway or the floating IP that a message of the control plane describes. It returns
// an InvalidArgument fault if a host cannot use it.
func natGatewayOnHost(in *agentv1.HostNatGateway) (out cloud.NATGatewayOnHost, err error) {
	if out.NATGateway, err = NATGatewayFrom(in.GetNatGateway()); err != nil {
		return out, err
	}
	out.VNI, out.BindingGeneration = in.GetVni(), in.GetBindingGeneration()
	out.ServiceIP = cloud.ServiceIPID(in.GetServiceIpId())
	if out.ServiceIP != "" && !out.Address.Is4() {
		return out, fault.Invalid("address", "a floating IP must be an IPv4 address, got %q", in.GetNatGateway().GetAddress())
	}
	if in.GetVtep() != "" {
		out.VTEP, err = VTEPFrom(in.GetVtep())
	}
	return out, err
}

// FloatingIPFrom returns the floating IP in a message of the control plane. It returns an InvalidArgument fault if a
// host cannot have it.
func FloatingIPFrom(in *networkv1.FloatingIp) (f cloud.FloatingIP, err error) {
	f = cloud.FloatingIP{
		ID: cloud.FloatingIPID(in.GetId()), Name: in.GetName(), Org: cloud.OrgID(in.GetOrgId()), Project: cloud.ProjectID(in.GetProjectId()),
		Description: in.GetDescription(), External: in.GetExternalNetwork(), Port: cloud.PortID(in.GetPortId()),
		ServiceIP: cloud.ServiceIPID(in.GetServiceIpId()), Status: cloud.NetworkStatus(in.GetStatus()), StatusReason: in.GetStatusReason(),
		CreatedAt: in.GetCreatedAt(), UpdatedAt: in.GetUpdatedAt(),
		Placement: cloud.Placement{Node: cloud.NodeID(in.GetNodeId())},
	}
	if err := checkIDs("id", in.GetId()); err != nil {
		return f, err
	}
	if f.Address, err = cloud.ParseAddr("address", in.GetAddress()); err != nil {
		return f, err
	}
	if in.GetFixedAddress() != "" {
		f.Fixed, err = cloud.ParseAddr("fixed_address", in.GetFixedAddress())
	}
	return f, err
}
