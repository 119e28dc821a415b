package network

import (
	"context"
	"strconv"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func groupToProto(g *cloud.SecurityGroup) *networkv1.SecurityGroup {
	out := &networkv1.SecurityGroup{
		Id: string(g.ID), Name: g.Name, OrgId: string(g.Org), ProjectId: string(g.Project), Description: g.Description,
		IsDefault: g.Default, CreatedAt: int64(g.CreatedAt), UpdatedAt: int64(g.UpdatedAt),
	}
	for i := range g.Rules {
		out.Rules = append(out.Rules, ruleToProto(&g.Rules[i]))
	}
	return out
}

func ruleToProto(r *cloud.Rule) *networkv1.SecurityGroupRule {
	out := &networkv1.SecurityGroupRule{
		Id: string(r.ID), Direction: networkv1.Direction(r.Direction), Protocol: protocolText(r),
		PortMin: uint32(r.Ports.First),
		PortMax: uint32(r.Ports.Last), RemoteCidr: prefixText(r.CIDR), RemoteGroupId: string(r.Group),
		Ethertype: networkv1.Ethertype_ETHERTYPE_IPV4, Description: r.Description,
	}
	if r.IPv6 {
		out.Ethertype = networkv1.Ethertype_ETHERTYPE_IPV6
	}
	if r.ICMP != nil {
		kind := uint32(r.ICMP.Type)
		out.IcmpType = &kind
		if !r.ICMP.AnyCode {
			code := uint32(r.ICMP.Code)
			out.IcmpCode = &code
		}
	}
	return out
}

// protocols are the names of protocols in rules. Other protocols are written as numbers.
var protocols = map[string]uint8{
	"icmp": cloud.ProtocolICMP, "tcp": cloud.ProtocolTCP, "udp": cloud.ProtocolUDP, "icmpv6": cloud.ProtocolICMPv6,
	"sctp": cloud.ProtocolSCTP,
}

const anyProtocol = "any"

func protocolText(r *cloud.Rule) string {
	if r.AnyProtocol {
		return anyProtocol
	}
	for name, number := range protocols {
		if number == r.Protocol {
			return name
		}
	}
	return strconv.Itoa(int(r.Protocol))
}

// ruleFrom converts a rule of a request. It returns InvalidArgument for numbers that are out of range; Rule.Check finds
// contradictions.
func ruleFrom(in *networkv1.SecurityGroupRule) (r cloud.Rule, err error) {
	r = cloud.Rule{
		Direction: cloud.Direction(in.GetDirection()), Group: cloud.SecurityGroupID(in.GetRemoteGroupId()),
		Description: in.GetDescription(),
	}
	switch in.GetEthertype() {
	case networkv1.Ethertype_ETHERTYPE_UNSPECIFIED, networkv1.Ethertype_ETHERTYPE_IPV4:
	case networkv1.Ethertype_ETHERTYPE_IPV6:
		r.IPv6 = true
	default:
		return r, fault.Invalid("rule.ethertype", "must be IPV4 or IPV6").With("constraint", "enum")
	}
	if number, named := protocols[in.GetProtocol()]; named {
		r.Protocol = number
	} else if in.GetProtocol() == "" || in.GetProtocol() == anyProtocol {
		r.AnyProtocol = true
	} else {
		number, err := strconv.ParseUint(in.GetProtocol(), 10, 8)
		if err != nil {
			return r, fault.Invalid(
				"rule.protocol", "must be tcp, udp, icmp, icmpv6, sctp, any or a number of 0 to 255, got %q",
				in.GetProtocol(),
			).With("constraint", "enum")
		}
		r.Protocol = uint8(number)
	}
	if r.CIDR, err = prefixOf("rule.remote_cidr", in.GetRemoteCidr()); err != nil {
		return r, err
	}
	if in.GetPortMin() > 65535 || in.GetPortMax() > 65535 {
		return r, fault.Invalid("rule.port_max", "must be at most 65535").With("constraint", "range")
	}
	r.Ports = cloud.PortRange{First: uint16(in.GetPortMin()), Last: uint16(in.GetPortMax())}
	if r.Ports.Last == 0 {
		r.Ports.Last = r.Ports.First
	}
	r.ICMP, err = icmpFrom(in)
	return r, err
}

func icmpFrom(in *networkv1.SecurityGroupRule) (*cloud.ICMP, error) {
	switch {
	case in.IcmpType == nil && in.IcmpCode == nil:
		return nil, nil
	case in.IcmpType == nil:
		return nil, fault.Invalid("rule.icmp_type", "is required with icmp_code").With("constraint", "required")
	case in.GetIcmpType() > 255 || in.GetIcmpCode() > 255:
		return nil, fault.Invalid("rule.icmp_type", "type and code must be at most 255").With("constraint", "range")
	}
	return &cloud.ICMP{Type: uint8(in.GetIcmpType()), Code: uint8(in.GetIcmpCode()), AnyCode: in.IcmpCode == nil}, nil
}

func (r *server) CreateSecurityGroup(
	ctx context.Context, in *networkv1.CreateSecurityGroupRequest,
) (*networkv1.SecurityGroup, error) {
	t, err := admit(ctx, "CreateSecurityGroup", in)
	if err != nil {
		return nil, err
	}
	q := GroupRequest{Name: in.GetName(), Description: in.GetDescription()}
	for _, one := range in.GetRules() {
		rule, err := ruleFrom(one)
		if err != nil {
			return nil, err
		}
		q.Rules = append(q.Rules, rule)
	}
	out, err := r.s.CreateSecurityGroup(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, groupToProto)
}

func (r *server) GetSecurityGroup(
	ctx context.Context, in *networkv1.GetSecurityGroupRequest,
) (*networkv1.SecurityGroup, error) {
	return getOne(ctx, "GetSecurityGroup", in, r.s.GetSecurityGroup, groupToProto)
}

func (r *server) ListSecurityGroups(
	ctx context.Context, in *networkv1.ListSecurityGroupsRequest,
) (*networkv1.ListSecurityGroupsResponse, error) {
	t, err := admit(ctx, "ListSecurityGroups", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListSecurityGroups(ctx, t, pageOf(in))
	if err != nil {
		return nil, err
	}
	return &networkv1.ListSecurityGroupsResponse{SecurityGroups: convertAll(all, groupToProto), NextPageToken: next}, nil
}

func (r *server) UpdateSecurityGroup(
	ctx context.Context, in *networkv1.UpdateSecurityGroupRequest,
) (*networkv1.SecurityGroup, error) {
	t, err := admit(ctx, "UpdateSecurityGroup", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.UpdateSecurityGroup(
		ctx, t, GroupUpdate{ID: cloud.SecurityGroupID(in.GetId()), Name: in.Name, Description: in.Description},
		rpc.BodyHash(in),
	)
	return answer(ctx, out, err, groupToProto)
}

func (r *server) DeleteSecurityGroup(
	ctx context.Context, in *networkv1.DeleteSecurityGroupRequest,
) (*networkv1.DeleteSecurityGroupResponse, error) {
	return deleteOne(ctx, "DeleteSecurityGroup", in, r.s.DeleteSecurityGroup, &networkv1.DeleteSecurityGroupResponse{})
}

func (r *server) AddSecurityGroupRule(
	ctx context.Context, in *networkv1.AddSecurityGroupRuleRequest,
) (*networkv1.SecurityGroup, error) {
	t, err := admit(ctx, "AddSecurityGroupRule", in)
	if err != nil {
		return nil, err
	}
	rule, err := ruleFrom(in.GetRule())
	if err != nil {
		return nil, err
	}
	out, err := r.s.AddSecurityGroupRule(ctx, t, cloud.SecurityGroupID(in.GetSecurityGroupId()), rule, rpc.BodyHash(in))
	return answer(ctx, out, err, groupToProto)
}

func (r *server) RemoveSecurityGroupRule(
	ctx context.Context, in *networkv1.RemoveSecurityGroupRuleRequest,
) (*networkv1.SecurityGroup, error) {
	t, err := admit(ctx, "RemoveSecurityGroupRule", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.RemoveSecurityGroupRule(
		ctx, t, cloud.SecurityGroupID(in.GetSecurityGroupId()), cloud.RuleID(in.GetRuleId()), rpc.BodyHash(in),
	)
	return answer(ctx, out, err, groupToProto)
}
