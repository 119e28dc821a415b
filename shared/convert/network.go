package convert

import (
	"fmt"
	"net/netip"
	"strconv"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// maxVNI is the highest VXLAN network identifier.
const maxVNI = 1<<24 - 1

// protocols are the names of protocols in rules. Other protocols are written as numbers.
var protocols = map[string]uint8{
	"icmp": cloud.ProtocolICMP, "tcp": cloud.ProtocolTCP, "udp": cloud.ProtocolUDP, "icmpv6": cloud.ProtocolICMPv6,
	"sctp": cloud.ProtocolSCTP,
}

// VPCFrom returns the VPC in a message of the control plane. It returns an InvalidArgument fault if a host cannot have a
// VPC with these values.
func VPCFrom(in *networkv1.Vpc) (v cloud.VPC, err error) {
	v = cloud.VPC{
		ID: cloud.VPCID(in.GetId()), Name: in.GetName(), Org: cloud.OrgID(in.GetOrgId()),
		Project:     cloud.ProjectID(in.GetProjectId()),
		Description: in.GetDescription(), MTU: uint16(in.GetMtu()), Default: in.GetIsDefault(),
		Status:       cloud.NetworkStatus(in.GetStatus()),
		StatusReason: in.GetStatusReason(), CreatedAt: in.GetCreatedAt(), UpdatedAt: in.GetUpdatedAt(),
	}
	if err := cloud.CheckUUID("id", in.GetId()); err != nil {
		return v, err
	}
	if in.GetMtu() != uint32(v.MTU) || v.MTU < 576 {
		return v, fault.Invalid("mtu", "must be 576 to 65535, got %d", in.GetMtu())
	}
	if v.CIDR, err = cloud.ParseCIDR("cidr_block", in.GetCidrBlock()); err != nil {
		return v, err
	}
	if err := cloud.CheckVPCPrefix("cidr_block", v.CIDR); err != nil {
		return v, err
	}
	if v.ServiceCIDR, err = optionalPrefix("service_cidr_block", in.GetServiceCidrBlock()); err != nil {
		return v, err
	}
	if v.ServiceCIDR.IsValid() {
		if err := cloud.CheckServicePrefix("service_cidr_block", v.CIDR, v.ServiceCIDR); err != nil {
			return v, err
		}
	}
	if v.CIDR6, err = optionalPrefix("ipv6_cidr_block", in.GetIpv6CidrBlock()); err != nil || !v.CIDR6.IsValid() {
		return v, err
	}
	return v, cloud.CheckVPCPrefix6("ipv6_cidr_block", v.CIDR6)
}

// SubnetFrom returns the subnet in a message of the control plane, with its VXLAN network identifier. It returns an
// InvalidArgument fault if a host cannot have a subnet with these values. It does not compare the prefixes with those of
// the VPC.
func SubnetFrom(in *networkv1.Subnet, vni uint32) (s cloud.Subnet, err error) {
	s = cloud.Subnet{
		ID: cloud.SubnetID(in.GetId()), Name: in.GetName(), VPC: cloud.VPCID(in.GetVpcId()),
		Org:     cloud.OrgID(in.GetOrgId()),
		Project: cloud.ProjectID(in.GetProjectId()), Description: in.GetDescription(), DHCP: in.GetDhcpEnabled(),
		VNI:    vni,
		Status: cloud.NetworkStatus(in.GetStatus()), StatusReason: in.GetStatusReason(), CreatedAt: in.GetCreatedAt(),
		UpdatedAt: in.GetUpdatedAt(),
	}
	if err := checkIDs("id", in.GetId(), "vpc_id", in.GetVpcId()); err != nil {
		return s, err
	}
	if vni == 0 || vni > maxVNI {
		return s, fault.Invalid("vni", "must be 1 to %d, got %d", maxVNI, vni)
	}
	if s.CIDR, err = cloud.ParseCIDR("cidr_block", in.GetCidrBlock()); err != nil {
		return s, err
	}
	if s.CIDR6, err = optionalPrefix("ipv6_cidr_block", in.GetIpv6CidrBlock()); err != nil {
		return s, err
	}
	if !s.CIDR.Addr().Is4() || s.CIDR6.IsValid() && (!s.CIDR6.Addr().Is6() || s.CIDR6.Bits() != 64) {
		return s, fault.Invalid("cidr_block", "must be an IPv4 prefix, and ipv6_cidr_block a /64, got %s and %s", s.CIDR, s.CIDR6)
	}
	if s.Gateway, err = cloud.ParseAddr("gateway_ip", in.GetGatewayIp()); err != nil {
		return s, err
	}
	if err := cloud.CheckGateway("gateway_ip", s.CIDR, s.Gateway); err != nil {
		return s, err
	}
	if n := len(in.GetDnsServers()); n > cloud.MaxDNSServers {
		return s, fault.Invalid("dns_servers", "must be at most %d, got %d", cloud.MaxDNSServers, n)
	}
	for _, text := range in.GetDnsServers() {
		a, err := cloud.ParseAddr("dns_servers", text)
		if err != nil {
			return s, err
		}
		s.DNS = append(s.DNS, a)
	}
	return s, nil
}

// PortFrom returns the port in a message of the control plane. It returns an InvalidArgument fault if a host cannot have
// a port with these values. It does not compare the addresses with the prefixes of the subnet.
func PortFrom(in *networkv1.Port) (p cloud.Port, err error) {
	p = cloud.Port{
		ID: cloud.PortID(in.GetId()), Name: in.GetName(), Org: cloud.OrgID(in.GetOrgId()),
		Project:     cloud.ProjectID(in.GetProjectId()),
		Description: in.GetDescription(), VPC: cloud.VPCID(in.GetVpcId()), Subnet: cloud.SubnetID(in.GetSubnetId()),
		Secured: in.GetPortSecurity(),
		Mbps:    in.GetBandwidthMbps(), Labels: in.GetLabels(),
		Device: cloud.PortDevice{Kind: cloud.PortDeviceKind(in.GetDeviceType()), ID: in.GetDeviceId()},
		Node:   cloud.NodeID(in.GetNodeId()), Status: cloud.NetworkStatus(in.GetStatus()),
		StatusReason: in.GetStatusReason(),
		CreatedAt:    in.GetCreatedAt(), UpdatedAt: in.GetUpdatedAt(),
	}
	if err := checkIDs("id", in.GetId(), "vpc_id", in.GetVpcId(), "subnet_id", in.GetSubnetId()); err != nil {
		return p, err
	}
	if p.MAC, err = cloud.ParseMAC("mac_address", in.GetMacAddress()); err != nil {
		return p, err
	}
	if p.IP, err = cloud.ParseAddr("ip_address", in.GetIpAddress()); err != nil {
		return p, err
	}
	if in.GetIpv6Address() != "" {
		if p.IP6, err = cloud.ParseAddr("ipv6_address", in.GetIpv6Address()); err != nil {
			return p, err
		}
	}
	if !p.IP.Is4() || p.IP6.IsValid() && !p.IP6.Is6() {
		return p, fault.Invalid("ip_address", "must be an IPv4 address, and ipv6_address an IPv6 address, got %s and %s", p.IP, p.IP6)
	}
	if n := len(in.GetSecurityGroups()); n > cloud.MaxSecurityGroups {
		return p, fault.Invalid("security_groups", "must be at most %d, got %d", cloud.MaxSecurityGroups, n)
	}
	for _, id := range in.GetSecurityGroups() {
		if err := cloud.CheckUUID("security_groups", id); err != nil {
			return p, err
		}
		p.Groups = append(p.Groups, cloud.SecurityGroupID(id))
	}
	p.Pairs, err = pairsFrom(in.GetAllowedAddressPairs())
	return p, err
}

func pairsFrom(in []*networkv1.AddressPair) (out []cloud.AddressPair, err error) {
	if len(in) > cloud.MaxAddressPairs {
		return nil, fault.Invalid("allowed_address_pairs", "must be at most %d, got %d", cloud.MaxAddressPairs, len(in))
	}
	for _, p := range in {
		var pair cloud.AddressPair
		if pair.CIDR, err = cloud.ParseCIDR("allowed_address_pairs.cidr", p.GetCidr()); err != nil {
			return nil, err
		}
		if p.GetMacAddress() != "" {
			if pair.MAC, err = cloud.ParseMAC("allowed_address_pairs.mac_address", p.GetMacAddress()); err != nil {
				return nil, err
			}
		}
		out = append(out, pair)
	}
	return out, nil
}

// SecurityGroupFrom returns the security group in a message of the control plane. It returns an InvalidArgument fault if
// a host cannot have a group with these rules.
func SecurityGroupFrom(in *networkv1.SecurityGroup) (cloud.SecurityGroup, error) {
	g := cloud.SecurityGroup{
		ID: cloud.SecurityGroupID(in.GetId()), Name: in.GetName(), Org: cloud.OrgID(in.GetOrgId()),
		Project:     cloud.ProjectID(in.GetProjectId()),
		Description: in.GetDescription(), Default: in.GetIsDefault(), CreatedAt: in.GetCreatedAt(),
		UpdatedAt: in.GetUpdatedAt(),
	}
	if err := cloud.CheckUUID("id", in.GetId()); err != nil {
		return g, err
	}
	if n := len(in.GetRules()); n > cloud.MaxRules {
		return g, fault.Invalid("rules", "must be at most %d, got %d", cloud.MaxRules, n)
	}
	for _, one := range in.GetRules() {
		r, err := ruleFrom(one)
		if err != nil {
			return g, fmt.Errorf("rule %s: %w", one.GetId(), err)
		}
		g.Rules = append(g.Rules, r)
	}
	return g, nil
}

// ruleFrom returns the rule in a message. Values that an enumeration does not have are refused, because a rule that is
// read wrongly could permit more than the tenant wants.
func ruleFrom(in *networkv1.SecurityGroupRule) (r cloud.Rule, err error) {
	r = cloud.Rule{ID: cloud.RuleID(in.GetId()), Group: cloud.SecurityGroupID(in.GetRemoteGroupId()), Description: in.GetDescription()}
	switch in.GetDirection() {
	case networkv1.Direction_DIRECTION_INGRESS:
		r.Direction = cloud.Ingress
	case networkv1.Direction_DIRECTION_EGRESS:
		r.Direction = cloud.Egress
	default:
		return r, fault.Invalid("rule.direction", "must be ingress or egress, got %d", in.GetDirection())
	}
	switch in.GetEthertype() {
	case networkv1.Ethertype_ETHERTYPE_UNSPECIFIED, networkv1.Ethertype_ETHERTYPE_IPV4:
	case networkv1.Ethertype_ETHERTYPE_IPV6:
		r.IPv6 = true
	default:
		return r, fault.Invalid("rule.ethertype", "must be IPV4 or IPV6, got %d", in.GetEthertype())
	}
	number, named := protocols[in.GetProtocol()]
	switch {
	case named:
		r.Protocol = number
	case in.GetProtocol() == "any":
		r.AnyProtocol = true
	default:
		n, err := strconv.ParseUint(in.GetProtocol(), 10, 8)
		if err != nil {
			return r, fault.Invalid("rule.protocol", "must be tcp, udp, icmp, icmpv6, sctp, any or a number of 0 to 255, got %q", in.GetProtocol())
		}
		r.Protocol = uint8(n)
	}
	if r.CIDR, err = optionalPrefix("rule.remote_cidr", in.GetRemoteCidr()); err != nil {
		return r, err
	}
	if in.GetPortMin() > 65535 || in.GetPortMax() > 65535 {
		return r, fault.Invalid("rule.port_max", "must be at most 65535")
	}
	r.Ports = cloud.PortRange{First: uint16(in.GetPortMin()), Last: uint16(in.GetPortMax())}
	if in.IcmpType != nil {
		if in.GetIcmpType() > 255 || in.GetIcmpCode() > 255 {
			return r, fault.Invalid("rule.icmp_type", "type and code must be at most 255")
		}
		r.ICMP = &cloud.ICMP{Type: uint8(in.GetIcmpType()), Code: uint8(in.GetIcmpCode()), AnyCode: in.IcmpCode == nil}
	} else if in.IcmpCode != nil {
		return r, fault.Invalid("rule.icmp_type", "is required with icmp_code")
	}
	return r, r.Check()
}

// RouteTableFrom returns the route table in a message of the control plane. It returns an InvalidArgument fault if a
// host cannot have a table with these routes. It does not compare the routes with the prefixes of the VPC.
func RouteTableFrom(in *networkv1.RouteTable) (cloud.RouteTable, error) {
	t := cloud.RouteTable{
		ID: cloud.RouteTableID(in.GetId()), Name: in.GetName(), Org: cloud.OrgID(in.GetOrgId()),
		Project:     cloud.ProjectID(in.GetProjectId()),
		Description: in.GetDescription(), VPC: cloud.VPCID(in.GetVpcId()), Status: cloud.NetworkStatus(in.GetStatus()),
		StatusReason: in.GetStatusReason(), CreatedAt: in.GetCreatedAt(), UpdatedAt: in.GetUpdatedAt(),
	}
	if err := checkIDs("id", in.GetId(), "vpc_id", in.GetVpcId()); err != nil {
		return t, err
	}
	for _, id := range in.GetSubnetIds() {
		if err := cloud.CheckUUID("subnet_ids", id); err != nil {
			return t, err
		}
		t.Subnets = append(t.Subnets, cloud.SubnetID(id))
	}
	if n := len(in.GetRoutes()); n > cloud.MaxRoutes {
		return t, fault.Invalid("routes", "must be at most %d, got %d", cloud.MaxRoutes, n)
	}
	for _, r := range in.GetRoutes() {
		destination, err := cloud.ParseCIDR("routes.destination", r.GetDestination())
		if err != nil {
			return t, err
		}
		target := enum[cloud.RouteTarget](r.GetTargetType())
		if target < cloud.RoutePort || target > cloud.RoutePeering || (target == cloud.RouteBlackhole) != (r.GetTargetId() == "") {
			return t, fault.Invalid("routes", "the route for %s has target type %d and target %q", destination, r.GetTargetType(), r.GetTargetId())
		}
		t.Routes = append(t.Routes, cloud.Route{Destination: destination, Target: target, ID: r.GetTargetId()})
	}
	return t, nil
}

// checkIDs returns an InvalidArgument fault unless all IDs are UUIDs. The arguments are names of fields, each with the
// field's value after it.
func checkIDs(fields ...string) error {
	for i := 0; i < len(fields); i += 2 {
		if err := cloud.CheckUUID(fields[i], fields[i+1]); err != nil {
			return err
		}
	}
	return nil
}

func optionalPrefix(field, text string) (netip.Prefix, error) {
	if text == "" {
		return netip.Prefix{}, nil
	}
	return cloud.ParseCIDR(field, text)
}
