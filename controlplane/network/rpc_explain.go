package network

import (
	"cmp"
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (r *server) ExplainPath(
	ctx context.Context, in *networkv1.ExplainPathRequest,
) (*networkv1.ExplainPathResponse, error) {
	t, err := admit(ctx, "ExplainPath", in)
	if err != nil {
		return nil, err
	}
	p := Packet{
		FromPort: cloud.PortID(in.GetFromPortId()), FromVM: cloud.VMID(in.GetFromVmId()),
		ToPort: cloud.PortID(in.GetToPortId()), ToVM: cloud.VMID(in.GetToVmId()),
		Port: uint16(in.GetPort()),
	}
	if in.GetPort() > 65535 {
		return nil, fault.Invalid("port", "must be at most 65535").With("constraint", "range")
	}
	if p.To, err = addressOf("to_address", in.GetToAddress()); err != nil {
		return nil, err
	}
	rule, err := ruleFrom(&networkv1.SecurityGroupRule{Protocol: cmp.Or(in.GetProtocol(), "tcp")})
	if err != nil || rule.AnyProtocol {
		return nil, fault.Invalid(
			"protocol", "must be tcp, udp, icmp, icmpv6, sctp or a number of 0 to 255, got %q", in.GetProtocol(),
		).With("constraint", "enum")
	}
	p.Protocol = rule.Protocol
	steps, err := r.s.ExplainPath(ctx, t, p)
	if err != nil {
		return nil, err
	}
	out := &networkv1.ExplainPathResponse{Passes: true}
	for _, s := range steps {
		out.Passes = out.Passes && s.Passes
		out.Steps = append(
			out.Steps,
			&networkv1.PathStep{Stage: s.Stage, ResourceId: s.Resource, RuleId: s.Rule, Explanation: s.Text, Passes: s.Passes},
		)
	}
	return out, nil
}
