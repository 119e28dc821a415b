package network

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// requireRefused calls f, which must return a fault of the given kind and change no record.
func (s *script) requireRefused(t *testing.T, kind fault.Kind, f func() (proto.Message, error)) {
	t.Helper()
	revision := s.store.Revision()
	_, err := f()
	refusal, ok := fault.From(err)
	require.True(t, ok, "%v", err)
	require.Equal(t, kind, refusal.Kind, "%v", err)
	require.Equal(t, revision, s.store.Revision(), "records were changed")
}

// tcpRules returns count rules, each of which permits incoming TCP to one port.
func tcpRules(count int) (rules []*networkv1.SecurityGroupRule) {
	for i := range count {
		rules = append(rules, &networkv1.SecurityGroupRule{
			Direction: networkv1.Direction_DIRECTION_INGRESS, Protocol: "tcp", PortMin: uint32(1 + i),
			PortMax: uint32(1 + i),
		})
	}
	return rules
}

// setGroups replaces the security groups of a port of the tenant evil.
func (s *script) setGroups(port string, ids []string) (proto.Message, error) {
	return s.server.UpdatePort(s.as(evil, ""), &networkv1.UpdatePortRequest{
		Id: port, SecurityGroups: &networkv1.GroupIds{Ids: ids},
	})
}

// TestTenThousandRules requires that 10,000 rules in one group are refused, that 10,000 rules in groups of the maximum
// size are accepted, and that a port has at most the rules of 16 groups.
func TestTenThousandRules(t *testing.T) {
	s, own, _ := newProjects(t)
	ctx := s.as(evil, "")
	create := func(rules int) (proto.Message, error) {
		return s.server.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{Rules: tcpRules(rules)})
	}
	s.requireRefused(t, fault.InvalidArgument, func() (proto.Message, error) { return create(10_000) })
	s.requireRefused(t, fault.InvalidArgument, func() (proto.Message, error) { return create(cloud.MaxRules + 1) })
	var ids []string
	for range 10_000 / cloud.MaxRules {
		g, err := create(cloud.MaxRules)
		require.NoError(t, err)
		ids = append(ids, g.(*networkv1.SecurityGroup).GetId())
	}
	s.requireRefused(t, fault.ResourceExhausted, func() (proto.Message, error) {
		return s.server.AddSecurityGroupRule(ctx, &networkv1.AddSecurityGroupRuleRequest{
			SecurityGroupId: ids[0],
			Rule:            &networkv1.SecurityGroupRule{Direction: networkv1.Direction_DIRECTION_INGRESS, Protocol: "udp"},
		})
	})
	s.requireRefused(t, fault.InvalidArgument, func() (proto.Message, error) {
		return s.setGroups(own["vm-port"], ids[:17])
	})
	_, err := s.setGroups(own["vm-port"], ids[:16])
	require.NoError(t, err)
	for port, passes := range map[uint32]bool{1: true, cloud.MaxRules: true, cloud.MaxRules + 1: false} {
		path, err := s.server.ExplainPath(ctx, &networkv1.ExplainPathRequest{
			FromPortId: own["port"], ToPortId: own["vm-port"], Protocol: "tcp", Port: port,
		})
		require.NoError(t, err)
		require.Equal(t, passes, path.GetPasses(), "port %d: %v", port, path)
	}
}

// TestCycleOfGroups requires that groups may refer to each other in a cycle, that a path through them is evaluated, and
// that a group of the cycle can be deleted only after the rule that refers to it.
func TestCycleOfGroups(t *testing.T) {
	s, own, _ := newProjects(t)
	ctx := s.as(evil, "")
	const length = 5
	var ids, rules []string
	for range length {
		g, err := s.server.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{})
		require.NoError(t, err)
		ids = append(ids, g.GetId())
	}
	for i, id := range ids { // each group permits the members of the next one
		rule := &networkv1.SecurityGroupRule{
			Direction: networkv1.Direction_DIRECTION_INGRESS, Protocol: "any", RemoteGroupId: ids[(i+1)%length],
		}
		g, err := s.server.AddSecurityGroupRule(ctx, &networkv1.AddSecurityGroupRuleRequest{SecurityGroupId: id, Rule: rule})
		require.NoError(t, err)
		rules = append(rules, g.GetRules()[len(g.GetRules())-1].GetId())
	}
	for port, group := range map[string]string{"port": ids[1], "vm-port": ids[0]} {
		_, err := s.setGroups(own[port], []string{group})
		require.NoError(t, err)
	}
	explain := func(from, to string) (*networkv1.ExplainPathResponse, error) {
		return s.server.ExplainPath(ctx, &networkv1.ExplainPathRequest{FromPortId: own[from], ToPortId: own[to]})
	}
	path, err := explain("port", "vm-port")
	require.NoError(t, err)
	require.True(t, path.GetPasses(), "%v", path)
	path, err = explain("vm-port", "port")
	require.NoError(t, err)
	require.False(t, path.GetPasses(), "%v", path)

	for _, id := range ids {
		s.requireRefused(t, fault.FailedPrecondition, func() (proto.Message, error) {
			return s.server.DeleteSecurityGroup(ctx, &networkv1.DeleteSecurityGroupRequest{Id: id})
		})
	}
	for i, id := range ids {
		request := &networkv1.RemoveSecurityGroupRuleRequest{SecurityGroupId: id, RuleId: rules[i]}
		_, err := s.server.RemoveSecurityGroupRule(ctx, request)
		require.NoError(t, err)
	}
	_, err = s.server.DeleteSecurityGroup(ctx, &networkv1.DeleteSecurityGroupRequest{Id: ids[2]})
	require.NoError(t, err)
}

// TestDeleteWhatIsInUse requires that the deletion of a resource that another one uses is refused, names a user, and
// changes nothing.
func TestDeleteWhatIsInUse(t *testing.T) {
	s, own, _ := newProjects(t)
	for _, c := range []struct{ method, request, user string }{
		{"DeleteVpc", `{"id": "$vpc"}`, "subnet"},
		{"DeleteVpc", `{"id": "$peer-vpc"}`, "peering"},
		{"DeleteSubnet", `{"id": "$subnet"}`, "port"},
		{"DeletePort", `{"id": "$vm-port"}`, "VM"},
		{"DeleteSecurityGroup", `{"id": "$group"}`, "port"},
	} {
		s.requireRefused(t, fault.FailedPrecondition, func() (proto.Message, error) {
			out, err := s.request(evil, c.method, expand(c.request, own))
			require.ErrorContains(t, err, c.user, fmt.Sprint(c))
			return out, err
		})
	}
}
