package network

import (
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

type ruleToAdd struct {
	Group cloud.SecurityGroupID
	Rule  cloud.Rule
}

// AddSecurityGroupRule adds a rule to a security group and returns the group. It returns AlreadyExists if the group has
// an equal rule, and ResourceExhausted if it has MaxRules rules.
func (s *Service) AddSecurityGroupRule(
	ctx context.Context, t cloud.Tenant, group cloud.SecurityGroupID, rule cloud.Rule, body [32]byte,
) (Result[cloud.SecurityGroup], error) {
	if err := cloud.CheckUUID("security_group_id", string(group)); err != nil {
		return Result[cloud.SecurityGroup]{}, err
	}
	return addRuleCommand.Call(ctx, s.opts.Commands, change[ruleToAdd]{t, body, ruleToAdd{group, rule}})
}

var addRuleCommand = newCommand("network.rule.add", "AddSecurityGroupRule", addRule)

// addRule implements AddSecurityGroupRule in a transaction of the leader.
func addRule(tx *store.Tx, t cloud.Tenant, q ruleToAdd) (cloud.SecurityGroup, error) {
	g, err := find(tx, groups, kindGroup, t, string(q.Group))
	if err != nil {
		return cloud.SecurityGroup{}, err
	}
	if err := addRuleTo(tx, t, g, q.Rule); err != nil {
		return cloud.SecurityGroup{}, err
	}
	g.UpdatedAt = tx.Now()
	groups.Put(tx, g, string(t.Project), string(g.ID))
	return *g, nil
}

// addRuleTo checks a rule, gives it an ID and adds it to g. The caller writes the record of g.
func addRuleTo(tx *store.Tx, t cloud.Tenant, g *cloud.SecurityGroup, rule cloud.Rule) error {
	if err := rule.Check(); err != nil {
		return err
	}
	if len(g.Rules) >= cloud.MaxRules {
		return fault.New(
			fault.ResourceExhausted, "%s has %d rules and can have no more", label(kindGroup, g.Name, string(g.ID)),
			cloud.MaxRules,
		).WithReason("TOO_MANY_RULES")
	}
	for i := range g.Rules {
		if g.Rules[i].Equal(&rule) {
			return fault.New(
				fault.AlreadyExists, "%s has this rule already: %s", label(kindGroup, g.Name, string(g.ID)),
				g.Rules[i].ID,
			).WithReason("RULE_EXISTS").
				With("rule_id", string(g.Rules[i].ID))
		}
	}
	if rule.Group != "" && rule.Group != g.ID {
		if _, err := find(tx, groups, kindGroup, t, string(rule.Group)); err != nil {
			return err
		}
		groupReferrers.Put(tx, &struct{}{}, string(rule.Group), string(g.ID))
	}
	id, err := newID()
	if err != nil {
		return err
	}
	rule.ID = cloud.RuleID(id)
	g.Rules = append(g.Rules, rule)
	return nil
}

type ruleToRemove struct {
	Group cloud.SecurityGroupID
	Rule  cloud.RuleID
}

// RemoveSecurityGroupRule removes a rule from a security group and returns the group.
func (s *Service) RemoveSecurityGroupRule(
	ctx context.Context, t cloud.Tenant, group cloud.SecurityGroupID, rule cloud.RuleID, body [32]byte,
) (Result[cloud.SecurityGroup], error) {
	if err := cloud.CheckUUID("security_group_id", string(group)); err != nil {
		return Result[cloud.SecurityGroup]{}, err
	}
	if err := cloud.CheckUUID("rule_id", string(rule)); err != nil {
		return Result[cloud.SecurityGroup]{}, err
	}
	return removeRuleCommand.Call(ctx, s.opts.Commands, change[ruleToRemove]{t, body, ruleToRemove{group, rule}})
}

var removeRuleCommand = newCommand("network.rule.remove", "RemoveSecurityGroupRule", removeRule)

// removeRule implements RemoveSecurityGroupRule in a transaction of the leader.
func removeRule(tx *store.Tx, t cloud.Tenant, q ruleToRemove) (cloud.SecurityGroup, error) {
	g, err := find(tx, groups, kindGroup, t, string(q.Group))
	if err != nil {
		return cloud.SecurityGroup{}, err
	}
	i := slices.IndexFunc(g.Rules, func(r cloud.Rule) bool { return r.ID == q.Rule })
	if i < 0 {
		return cloud.SecurityGroup{}, notFound("rule", string(q.Rule))
	}
	remote := g.Rules[i].Group
	g.Rules = slices.Delete(g.Rules, i, i+1)
	if remote != "" && !slices.ContainsFunc(g.Rules, func(r cloud.Rule) bool { return r.Group == remote }) {
		groupReferrers.Delete(tx, string(remote), string(g.ID))
	}
	g.UpdatedAt = tx.Now()
	groups.Put(tx, g, string(t.Project), string(g.ID))
	return *g, nil
}
