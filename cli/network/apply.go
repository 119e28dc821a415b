package network

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/apply"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/flagfile"
	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// Kinds describes VPCs, subnets and security groups for `trivet apply`, in the order in which they can refer to each
// other.
func Kinds() []*apply.Kind {
	return []*apply.Kind{
		{
			Names: []string{"vpc", "network"}, File: &flagfile.File{Argument: "name"},
			New: func(s *session.Session) (*cobra.Command, apply.PlanFunc) {
				f, c := &vpcFlags{}, &cobra.Command{Use: "vpc"}
				f.register(s, c)
				return c, planOf(s, vpcs(), f, c)
			},
		},
		{
			Names: []string{"subnet"}, File: &flagfile.File{Argument: "name"},
			New: func(s *session.Session) (*cobra.Command, apply.PlanFunc) {
				f, c := &subnetFlags{}, &cobra.Command{Use: "subnet"}
				f.register(s, c)
				return c, planOf(s, subnets(), f, c)
			},
		},
		{
			Names: []string{"security-group"},
			File:  &flagfile.File{Argument: "name", Aliases: map[string]string{"rules": "rule"}},
			New: func(s *session.Session) (*cobra.Command, apply.PlanFunc) {
				f, c := &groupFlags{}, &cobra.Command{Use: "security-group"}
				f.register(c)
				return c, planOf(s, groups(), f, c)
			},
		},
	}
}

// applicable are the flags of a create command that `trivet apply` compares with an object.
type applicable[T object] interface {
	// check returns a *session.Usage error if a flag is invalid.
	check() error
	// create creates the object.
	create(ctx context.Context, t *target, name string) (T, error)
	// compare sets the changes and the function Do of a plan for an object that exists.
	compare(ctx context.Context, t *target, x *comparison, o T) error
}

// comparison compares the flags of a create command with an object that exists.
type comparison struct {
	// given reports whether a flag is given.
	given func(flag string) bool
	run   *apply.Run
	plan  *apply.Plan
}

// planOf returns the function that compares flags with the object of the kind that has the name of the file.
func planOf[T object](s *session.Session, k *kind[T], f applicable[T], c *cobra.Command) apply.PlanFunc {
	return func(ctx context.Context, conn *dial.Conn, run *apply.Run, name string) (*apply.Plan, error) {
		t := newTarget(s, conn)
		if err := f.check(); err != nil {
			return nil, err
		}
		matches, err := k.matches(ctx, t, t.query(), name)
		if err != nil {
			return nil, err
		}
		if len(matches) == 0 {
			return &apply.Plan{Create: true, Do: func(ctx context.Context) error {
				_, err := f.create(ctx, t, name)
				return err
			}}, nil
		}
		id, err := session.One("network "+k.command, s.Scope(), name, matches)
		if err != nil {
			return nil, err
		}
		o, err := k.get(ctx, t, id)
		if err != nil {
			return nil, err
		}
		x := &comparison{given: c.Flags().Changed, run: run, plan: &apply.Plan{}}
		return x.plan, f.compare(ctx, t, x, o)
	}
}

// fixed returns an error if the value of a flag is given and differs from the present one. It compares prefixes and
// addresses as such, not as text.
func (x *comparison) fixed(flag, present, file string) error {
	if !x.given(flag) || apply.SameAddress(present, file) {
		return nil
	}
	return apply.Fixed(flag, present, file)
}

// fixedIPv6 returns an error if the flag --ipv6 is given and the object has an IPv6 prefix though the flag is false, or
// has none though it is true.
func (x *comparison) fixedIPv6(present string, file bool) error {
	if !x.given("ipv6") || (present != "") == file {
		return nil
	}
	return apply.Fixed("ipv6", strconv.FormatBool(present != ""), strconv.FormatBool(file))
}

// description returns the new description, or nil if the object has it already or the file gives none.
func (x *comparison) description(present, file string) *string {
	if !x.given("description") || present == file {
		return nil
	}
	x.plan.Add("description")
	return &file
}

func (f *vpcFlags) compare(_ context.Context, t *target, x *comparison, v *networkv1.Vpc) error {
	req := &f.request
	if err := firstError(
		x.fixed("cidr", v.GetCidrBlock(), req.GetCidrBlock()),
		x.fixed("ipv6-cidr", v.GetIpv6CidrBlock(), req.GetIpv6CidrBlock()),
		x.fixed("service-cidr", v.GetServiceCidrBlock(), req.GetServiceCidrBlock()),
		x.fixed("mtu", number(v.GetMtu()), number(req.GetMtu())),
		x.fixedIPv6(v.GetIpv6CidrBlock(), f.ipv6),
	); err != nil {
		return err
	}
	update := &networkv1.UpdateVpcRequest{OrgId: t.org, ProjectId: t.project, Id: v.GetId()}
	update.Description = x.description(v.GetDescription(), req.GetDescription())
	x.plan.Do = func(ctx context.Context) error {
		_, err := t.client.UpdateVpc(ctx, update)
		return err
	}
	return nil
}

func (f *subnetFlags) compare(ctx context.Context, t *target, x *comparison, n *networkv1.Subnet) error {
	req := &f.request
	if x.given("vpc") {
		if id, err := vpcs().find(ctx, t, f.vpc); err != nil {
			return err
		} else if id != n.GetVpcId() {
			return apply.Fixed("vpc", t.labels(ctx).of(vpcs(), n.GetVpcId()), f.vpc)
		}
	}
	if err := firstError(
		x.fixed("cidr", n.GetCidrBlock(), req.GetCidrBlock()),
		x.fixed("ipv6-cidr", n.GetIpv6CidrBlock(), req.GetIpv6CidrBlock()),
		x.fixed("gateway", n.GetGatewayIp(), req.GetGatewayIp()),
		x.fixedIPv6(n.GetIpv6CidrBlock(), f.ipv6),
	); err != nil {
		return err
	}
	update := &networkv1.UpdateSubnetRequest{OrgId: t.org, ProjectId: t.project, Id: n.GetId()}
	update.Description = x.description(n.GetDescription(), req.GetDescription())
	if dhcp := !f.noDHCP; x.given("no-dhcp") && dhcp != n.GetDhcpEnabled() {
		x.plan.Add("DHCP %s", map[bool]string{true: "on", false: "off"}[dhcp])
		update.DhcpEnabled = &dhcp
	}
	if x.given("dns") && !slices.EqualFunc(req.GetDnsServers(), n.GetDnsServers(), apply.SameAddress) {
		x.plan.Add("dns %s", strings.Join(req.GetDnsServers(), ","))
		update.DnsServers = &networkv1.DnsServers{Addresses: req.GetDnsServers()}
	}
	x.plan.Do = func(ctx context.Context) error {
		_, err := t.client.UpdateSubnet(ctx, update)
		return err
	}
	return nil
}

func (f *groupFlags) compare(ctx context.Context, t *target, x *comparison, g *networkv1.SecurityGroup) error {
	specs, err := f.specs()
	if err != nil {
		return err
	}
	description := x.description(g.GetDescription(), f.description)
	var missing []*networkv1.SecurityGroupRule
	for i, spec := range specs {
		rule, err := spec.rule(ctx, t)
		if err != nil && !x.run.WillExist(err, "security-group", spec.group) {
			return err
		}
		same := func(have *networkv1.SecurityGroupRule) bool { return sameTraffic(have, rule) }
		if err == nil && slices.ContainsFunc(slices.Concat(g.GetRules(), missing), same) {
			continue
		}
		missing = append(missing, rule)
		x.plan.Add("rule %q added", f.rules[i])
	}
	x.plan.Do = func(ctx context.Context) error {
		if description != nil {
			req := &networkv1.UpdateSecurityGroupRequest{
				OrgId: t.org, ProjectId: t.project, Id: g.GetId(), Description: description,
			}
			if _, err := t.client.UpdateSecurityGroup(ctx, req); err != nil {
				return err
			}
		}
		for _, rule := range missing {
			req := &networkv1.AddSecurityGroupRuleRequest{
				OrgId: t.org, ProjectId: t.project, SecurityGroupId: g.GetId(), Rule: rule,
			}
			if _, err := t.client.AddSecurityGroupRule(ctx, req); err != nil {
				return err
			}
		}
		return nil
	}
	return nil
}
