package network

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func groups() *kind[*networkv1.SecurityGroup] {
	return &kind[*networkv1.SecurityGroup]{
		command: "group", noun: "security group", arg: "GROUP",
		header:    []string{"NAME", "RULES", "DEFAULT", "DESCRIPTION"},
		wideInAll: []string{"DESCRIPTION"},
		row: func(g *networkv1.SecurityGroup, _ *labels) []string {
			return []string{nameOf(g), strconv.Itoa(len(g.GetRules())), yes(g.GetIsDefault()), g.GetDescription()}
		},
		fields: func(g *networkv1.SecurityGroup, _ *labels) [][2]string {
			return [][2]string{{"Default", yes(g.GetIsDefault())}, {"Rules", strconv.Itoa(len(g.GetRules()))}}
		},
		more: func(w io.Writer, g *networkv1.SecurityGroup, l *labels) error {
			if len(g.GetRules()) == 0 {
				return nil
			}
			if _, err := fmt.Fprintln(w); err != nil {
				return err
			}
			return list.Print(w, ruleColumns(l), g.GetRules()...)
		},
		about: func(g *networkv1.SecurityGroup) string { return fmt.Sprintf("%d rules", len(g.GetRules())) },
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.SecurityGroup, string, error) {
			page, err := c.ListSecurityGroups(ctx, &networkv1.ListSecurityGroupsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name,
			})
			return page.GetSecurityGroups(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.SecurityGroup, string, error) {
			page, err := c.ListAllSecurityGroups(ctx, &networkv1.ListAllSecurityGroupsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetSecurityGroups(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.SecurityGroup, error) {
			return t.client.GetSecurityGroup(ctx, &networkv1.GetSecurityGroupRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeleteSecurityGroup(
				ctx, &networkv1.DeleteSecurityGroupRequest{OrgId: t.org, ProjectId: t.project, Id: id},
			)
			return err
		},
	}
}

// groupCommand returns the command `trivet network group`.
func groupCommand(s *session.Session) *cobra.Command {
	c := group("group", "Create and list security groups",
		`Create and list security groups. A security group permits traffic of the ports that have it. A port with several
groups may send and receive what any of them permits; replies of a permitted connection pass.`,
		`  trivet network group create web --rule "ingress tcp/443" --rule "egress any"
  trivet network rule create web ingress tcp/22 --from 10.0.0.0/16
  trivet network group show web`)
	c.Aliases = []string{"security-group"}
	c.AddCommand(createGroupCommand(s), groups().listCommand(s),
		groups().showCommand(s, "Show a security group and its rules"),
		updateGroupCommand(s), groups().deleteCommand(s, "Delete a security group that no port and no rule uses"))
	return c
}

// groupFlags are the flags of `trivet network group create`.
type groupFlags struct {
	rules       []string
	description string
}

func createGroupCommand(s *session.Session) *cobra.Command {
	f := &groupFlags{}
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a security group", Args: session.Exactly("NAME"),
		Long: `Create a security group. Without --rule, it permits all outgoing and no incoming traffic. With --rule, it has only
the given rules: add "egress any" to permit outgoing traffic too. A rule without "from" or "to" is for all IPv4
addresses; add "from ::/0" or "to ::/0" for all IPv6 addresses. A --rule is

  ` + ruleForm + `

in quotes, where PROTOCOL is
` + trafficForm + `.`,
		Example: `  trivet network group create web --rule "ingress tcp/443" --rule "ingress tcp/22 from 10.0.0.0/16" --rule "egress any"
  trivet network group create web6 --rule "ingress tcp/443" --rule "ingress tcp/443 from ::/0" --rule "egress any to ::/0"
  trivet network group create db --rule "ingress tcp/5432 from group:web"`,
	}
	f.register(c)
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		name, err := nameArg(args)
		if err != nil {
			return err
		}
		g, err := f.create(ctx, t, name)
		return groups().printMade(ctx, t, g, err)
	})
	return c
}

// register adds the flags to c.
func (f *groupFlags) register(c *cobra.Command) {
	c.Flags().StringArrayVar(&f.rules, "rule", nil, "a rule, repeatable: see above")
	c.Flags().StringVar(&f.description, "description", "", "description")
}

// specs parses the rules of the flags.
func (f *groupFlags) specs() (specs []ruleSpec, err error) {
	specs = make([]ruleSpec, len(f.rules))
	for i, text := range f.rules {
		if specs[i], err = parseRule("--rule", text); err != nil {
			return nil, err
		}
	}
	return specs, nil
}

// check returns a *session.Usage error if a flag is invalid.
func (f *groupFlags) check() error {
	_, err := f.specs()
	return err
}

// create creates the security group that the flags describe.
func (f *groupFlags) create(ctx context.Context, t *target, name string) (*networkv1.SecurityGroup, error) {
	req := &networkv1.CreateSecurityGroupRequest{OrgId: t.org, ProjectId: t.project, Name: name, Description: f.description}
	specs, err := f.specs()
	if err != nil {
		return nil, err
	}
	for _, spec := range specs {
		rule, err := spec.rule(ctx, t)
		if err != nil {
			return nil, err
		}
		req.Rules = append(req.Rules, rule)
	}
	return t.client.CreateSecurityGroup(ctx, req)
}

func updateGroupCommand(s *session.Session) *cobra.Command {
	var change changes
	c := groups().argCommand(s, "update", "Change the name and description of a security group")
	c.Long = "Change the name and description of a security group. `trivet network rule` changes its rules."
	c.Example = "  trivet network group update web --description \"HTTPS from everywhere\""
	change.add(c)
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := change.check(); err != nil {
			return err
		}
		id, err := groups().find(ctx, t, args[0])
		if err != nil {
			return err
		}
		g, err := t.client.UpdateSecurityGroup(ctx, &networkv1.UpdateSecurityGroupRequest{
			OrgId: t.org, ProjectId: t.project, Id: id, Name: change.newName(), Description: change.newDescription(),
		})
		return groups().printMade(ctx, t, g, err)
	})
	return c
}
