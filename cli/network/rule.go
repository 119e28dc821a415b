package network

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// ruleCommand returns the command `trivet network rule`.
func ruleCommand(s *session.Session) *cobra.Command {
	c := group("rule", "Add, show and remove rules of security groups",
		`Add, show and remove rules of security groups. A rule permits traffic; what no rule of a port's groups permits is
dropped. Changes apply within a second, also to connections that exist.`,
		`  trivet network rule create web ingress tcp/443
  trivet network rule create db ingress tcp/5432 --from group:web
  trivet network rule list web`)
	c.AddCommand(addRuleCommand(s), listRulesCommand(s), showRuleCommand(s), removeRuleCommand(s))
	return c
}

func addRuleCommand(s *session.Session) *cobra.Command {
	spec := ruleSpec{dashes: "--"}
	var from, to, description string
	c := &cobra.Command{
		Use:   "create GROUP ingress|egress PROTOCOL [from|to REMOTE]",
		Short: "Add a rule to a security group",
		Args: func(c *cobra.Command, args []string) error {
			return session.Exactly("GROUP", "ingress|egress", "PROTOCOL")(c, args[:len(args)-len(remoteWords(args))])
		},
		Long: `Add a rule to a security group. PROTOCOL is
` + trafficForm + `.

A rule for ingress permits what comes from --from, and one for egress what goes to --to: a prefix, an address, or
group:NAME for the ports that have this group. The words of ` + "`trivet network rule list`" + ` are accepted too:
"from REMOTE" and "to REMOTE" are the same as the flags. Without --from and --to, the rule is for all IPv4 addresses, or with
--ipv6 for all IPv6 addresses.`,
		Example: `  trivet network rule create web ingress tcp/443 --from 0.0.0.0/0
  trivet network rule create web ingress tcp/443 --from ::/0
  trivet network rule create db ingress tcp/5432 --from group:web
  trivet network rule create db egress udp/53 --to 9.9.9.9
  trivet network rule create web ingress tcp/22 from 10.0.0.0/8`,
		ValidArgsFunction: argCompletions(groups().complete(s),
			cobra.FixedCompletions([]string{"ingress", "egress"}, cobra.ShellCompDirectiveNoFileComp),
			cobra.FixedCompletions([]string{"tcp/", "udp/", "sctp/", "icmp", "icmpv6", "any"}, cobra.ShellCompDirectiveNoSpace)),
	}
	session.Old(c, "add")
	p := c.Flags()
	p.StringVar(&from, "from", "", "source of ingress: CIDR, address or group:NAME (default: all IPv4 addresses)")
	p.StringVar(&to, "to", "", "destination of egress: CIDR, address or group:NAME (default: all IPv4 addresses)")
	p.BoolVar(&spec.ipv6, "ipv6", false, "the rule is for IPv6 (default for IPv6 prefixes and icmpv6)")
	p.StringVar(&description, "description", "", "description")
	for _, flag := range []string{"from", "to"} {
		completeFlag(c, flag, prefixed(groupPrefix, groups().complete(s)))
	}
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) (err error) {
		if words := remoteWords(args); len(words) > 0 {
			if from != "" || to != "" {
				return session.Usagef("give the remote with the words %q or with a flag, not both", strings.Join(words, " "))
			}
			if words[0] == "from" {
				from = words[1]
			} else {
				to = words[1]
			}
		}
		if err := spec.parse(args[1], args[2], from, to); err != nil {
			return err
		}
		req := &networkv1.AddSecurityGroupRuleRequest{OrgId: t.org, ProjectId: t.project}
		if req.SecurityGroupId, err = groups().find(ctx, t, args[0]); err != nil {
			return err
		}
		if req.Rule, err = spec.rule(ctx, t); err != nil {
			return err
		}
		req.Rule.Description = description
		g, err := t.client.AddSecurityGroupRule(ctx, req)
		if err != nil {
			return err
		}
		// The service appends the new rule.
		added := g.GetRules()[max(len(g.GetRules())-1, 0):]
		if len(added) == 0 {
			return s.Done(args[0], "changed")
		}
		return s.Print(added[0], []string{added[0].GetId()}, func(w io.Writer) error {
			return list.Print(w, ruleColumns(t.labels(ctx)), added...)
		})
	})
	return c
}

// remoteWords returns the words "from REMOTE" or "to REMOTE" at the end of the arguments of `rule create`, or nil.
func remoteWords(args []string) []string {
	if len(args) == 5 && (args[3] == "from" || args[3] == "to") {
		return args[3:]
	}
	return nil
}

func listRulesCommand(s *session.Session) *cobra.Command {
	c := groups().argCommand(s, "list", "List the rules of a security group")
	var all []*networkv1.SecurityGroupRule
	rules := &list.Kind[*networkv1.SecurityGroupRule]{
		Page: func(_ context.Context, _ *dial.Conn, q list.Query) ([]*networkv1.SecurityGroupRule, string, error) {
			return list.Slice(all, q)
		},
		Name: (*networkv1.SecurityGroupRule).GetId,
		Columns: func(ctx context.Context, s *session.Session, conn *dial.Conn) []list.Column[*networkv1.SecurityGroupRule] {
			return ruleColumns(newTarget(s, conn).labels(ctx))
		},
	}
	flags := rules.AddFlags(s, c)
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		g, err := groups().read(ctx, t, args[0])
		if err != nil {
			return err
		}
		all = g.GetRules()
		return rules.List(ctx, s, t.conn, flags)
	})
	return c
}

func showRuleCommand(s *session.Session) *cobra.Command {
	c := ruleArgCommand(s, "show", "Show a rule of a security group")
	c.Long = `Show a rule of a security group. RULE is the ID of the rule, or the rule itself in quotes, as ` + "`trivet network rule list`" + `
prints it.`
	c.Example = `  trivet network rule show web "ingress tcp/22 from 10.0.0.0/16"`
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := checkRuleArg(args[1]); err != nil {
			return err
		}
		g, err := groups().read(ctx, t, args[0])
		if err != nil {
			return err
		}
		id, err := ruleIn(ctx, t, g, args)
		if err != nil {
			return err
		}
		i := slices.Index(ruleIDs(g), id)
		if i < 0 {
			return errNoRule(args)
		}
		r, l := g.GetRules()[i], t.labels(ctx)
		return s.Print(r, []string{r.GetId()}, func(w io.Writer) error { return show.Fields(w, ruleFields(g, r, l)) })
	})
	return c
}

// ruleFields returns the fields of a rule of the security group g.
func ruleFields(g *networkv1.SecurityGroup, r *networkv1.SecurityGroupRule, l *labels) [][2]string {
	version := "IPv4"
	if r.GetEthertype() == networkv1.Ethertype_ETHERTYPE_IPV6 {
		version = "IPv6"
	}
	peer := "From"
	if r.GetDirection() == networkv1.Direction_DIRECTION_EGRESS {
		peer = "To"
	}
	return [][2]string{
		{"Rule", ruleText(r, l)}, {"ID", r.GetId()}, {"Group", g.GetName()}, {"Direction", show.Enum("DIRECTION", r.GetDirection())},
		{"Protocol", traffic(r)}, {peer, remoteText(r, l)}, {"IP version", version}, {"Description", r.GetDescription()},
	}
}

func removeRuleCommand(s *session.Session) *cobra.Command {
	c := ruleArgCommand(s, "delete", "Remove a rule from a security group")
	c.Long = `Remove a rule from a security group. Connections that only this rule permitted end within a second. RULE is the ID of
the rule, or the rule itself in quotes, as ` + "`trivet network rule list`" + ` prints it.`
	c.Example = `  trivet network rule list web
  trivet network rule delete web "ingress tcp/22 from 10.0.0.0/16"
  trivet network rule delete web 0192f0c1-9d3c-7a51-8f2b-6f1c5a3e7d20`
	session.Old(c, "remove")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := checkRuleArg(args[1]); err != nil {
			return err
		}
		group, err := groups().find(ctx, t, args[0])
		if err != nil {
			return err
		}
		rule, err := findRule(ctx, t, group, args)
		if err != nil {
			return err
		}
		if _, err := t.client.RemoveSecurityGroupRule(ctx, &networkv1.RemoveSecurityGroupRuleRequest{
			OrgId: t.org, ProjectId: t.project, SecurityGroupId: group, RuleId: rule,
		}); err != nil {
			return err
		}
		return s.Done(args[1], "removed")
	})
	return c
}

// ruleArgCommand returns a command with the arguments GROUP and RULE, and shell completion for both.
func ruleArgCommand(s *session.Session, verb, short string) *cobra.Command {
	return &cobra.Command{
		Use:   verb + " GROUP RULE",
		Short: short,
		Args:  session.Exactly("GROUP", "RULE"),
		ValidArgsFunction: argCompletions(groups().complete(s), func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			return s.Names(func(ctx context.Context, conn *dial.Conn) ([]string, error) {
				t := newTarget(s, conn)
				g, err := groups().read(ctx, t, args[0])
				if err != nil {
					return nil, err
				}
				l := t.labels(ctx)
				ids := ruleIDs(g)
				for i, r := range g.GetRules() {
					ids[i] += "\t" + ruleText(r, l) // shells show the text after the tab as a description
				}
				return ids, nil
			})(cmd, args, prefix)
		}),
	}
}

const ruleArg = "RULE"

// checkRuleArg returns a *session.Usage error unless text is an ID or has the form of a rule. A rule with a remote
// group may end with the mark of IPv6, which only ruleText writes.
func checkRuleArg(text string) error {
	if session.IsID(text) {
		return nil
	}
	_, err := parseRule(ruleArg, strings.TrimSuffix(text, ipv6Mark))
	return err
}

// findRule returns the ID of the rule that args[1] names, by its ID or as text, in the security group args[0] with an
// ID. It makes no call for an ID.
func findRule(ctx context.Context, t *target, group string, args []string) (string, error) {
	if session.IsID(args[1]) {
		return args[1], nil
	}
	g, err := groups().get(ctx, t, group)
	if err != nil {
		return "", err
	}
	return ruleIn(ctx, t, g, args)
}

// ruleIn is like findRule for the security group g, which was read.
func ruleIn(ctx context.Context, t *target, g *networkv1.SecurityGroup, args []string) (string, error) {
	if session.IsID(args[1]) {
		return args[1], nil
	}
	text, isIPv6 := strings.CutSuffix(args[1], ipv6Mark)
	spec, err := parseRule(ruleArg, text)
	if err != nil {
		return "", err
	}
	if isIPv6 {
		spec.parsed.Ethertype = networkv1.Ethertype_ETHERTYPE_IPV6
	}
	wanted, err := spec.rule(ctx, t)
	if err != nil {
		return "", err
	}
	for _, r := range g.GetRules() {
		if sameTraffic(r, wanted) {
			return r.GetId(), nil
		}
	}
	return "", errNoRule(args)
}

func errNoRule(args []string) error {
	return session.NotFound(fmt.Sprintf("`trivet network rule list %s` shows its rules", args[0]), "security group %s has no rule %q", args[0], args[1])
}

// sameTraffic reports whether two rules permit the same traffic, so that a group cannot have both.
func sameTraffic(a, b *networkv1.SecurityGroupRule) bool {
	bare := func(r *networkv1.SecurityGroupRule) *networkv1.SecurityGroupRule {
		r = proto.CloneOf(r)
		r.Id, r.Description, r.Protocol = "", "", cmp.Or(r.GetProtocol(), "any")
		r.Ethertype = cmp.Or(r.GetEthertype(), networkv1.Ethertype_ETHERTYPE_IPV4)
		if r.GetRemoteCidr() == "0.0.0.0/0" || r.GetRemoteCidr() == "::/0" {
			r.RemoteCidr = ""
		}
		return r
	}
	return proto.Equal(bare(a), bare(b))
}

// argCompletions returns a shell completion that uses one function for each argument in turn.
func argCompletions(of ...cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= len(of) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return of[len(args)](cmd, args, prefix)
	}
}

func ruleIDs(g *networkv1.SecurityGroup) (ids []string) {
	for _, r := range g.GetRules() {
		ids = append(ids, r.GetId())
	}
	return ids
}
