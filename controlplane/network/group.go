package network

import (
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// groups is the table of security groups, at net-security-group/<project>/<id>.
	groups = store.NewTable[cloud.SecurityGroup]("net-security-group")
	// groupPorts lists the ports of a security group, at group-port/<group>/<port>.
	groupPorts = store.NewTable[struct{}]("group-port")
	// groupReferrers lists the other groups whose rules refer to a group, at group-referrer/<group>/<other group>.
	groupReferrers = store.NewTable[struct{}]("group-referrer")
	// defaultGroups has the ID of the group "default" of a project, at group-default/<project>.
	defaultGroups = store.NewTable[cloud.SecurityGroupID]("group-default")
)

// GroupRequest describes a security group to create. The IDs of its rules are empty.
type GroupRequest struct {
	Name, Description string
	Rules             []cloud.Rule
}

// CreateSecurityGroup creates a security group. Without rules it permits all outgoing traffic.
func (s *Service) CreateSecurityGroup(
	ctx context.Context, t cloud.Tenant, q GroupRequest, body [32]byte,
) (Result[cloud.SecurityGroup], error) {
	if err := cloud.CheckDescription(q.Description); err != nil {
		return Result[cloud.SecurityGroup]{}, err
	}
	if q.Name == cloud.DefaultSecurityGroup {
		return Result[cloud.SecurityGroup]{}, errReservedName()
	}
	if len(q.Rules) > cloud.MaxRules {
		return Result[cloud.SecurityGroup]{}, fault.Invalid(
			"rules", "must be at most %d, got %d", cloud.MaxRules, len(q.Rules),
		).With("constraint", "max_items")
	}
	return createGroupCommand.Call(ctx, s.opts.Commands, change[GroupRequest]{t, body, q})
}

// errReservedName returns the error for a group that is to have the name of the group that each project has.
func errReservedName() error {
	return fault.Invalid("name", "%s is the name of the group that each project has", cloud.DefaultSecurityGroup).
		With("constraint", "reserved")
}

var createGroupCommand = newCommand("network.group.create", "CreateSecurityGroup", createGroup)

// createGroup implements CreateSecurityGroup in a transaction of the leader.
func createGroup(tx *store.Tx, t cloud.Tenant, q GroupRequest) (cloud.SecurityGroup, error) {
	rules := q.Rules
	if len(rules) == 0 {
		rules = allOutgoing()
	}
	g := cloud.SecurityGroup{Name: q.Name, Description: q.Description}
	return g, writeNewGroup(tx, t, &g, rules)
}

// writeNewGroup gives a group and its rules their IDs, counts the group in the quota and writes its records.
func writeNewGroup(tx *store.Tx, t cloud.Tenant, g *cloud.SecurityGroup, rules []cloud.Rule) error {
	if err := chargeQuota(tx, t, quantity{SecurityGroups: 1}); err != nil {
		return err
	}
	id, err := newID()
	if err != nil {
		return err
	}
	if err := claimName(tx, t.Project, kindGroup, g.Name, id); err != nil {
		return err
	}
	g.ID, g.Org, g.Project, g.CreatedAt, g.UpdatedAt = cloud.SecurityGroupID(id), t.Org, t.Project, tx.Now(), tx.Now()
	for _, r := range rules {
		if err := addRuleTo(tx, t, g, r); err != nil {
			return err
		}
	}
	groups.Put(tx, g, string(t.Project), id)
	return nil
}

// defaultGroup returns the ID of the project's group "default", which it creates if the project has none.
func defaultGroup(tx *store.Tx, t cloud.Tenant) (cloud.SecurityGroupID, error) {
	id, err := defaultGroups.Get(tx, string(t.Project))
	if err != nil {
		return "", err
	}
	if id != nil {
		return *id, nil
	}
	g := cloud.SecurityGroup{
		Name: cloud.DefaultSecurityGroup, Default: true,
		Description: "Traffic between the ports of this group, and all outgoing traffic.",
	}
	if err := writeNewGroup(tx, t, &g, allOutgoing()); err != nil {
		return "", err
	}
	for _, ipv6 := range []bool{false, true} {
		if err := addRuleTo(
			tx, t, &g, cloud.Rule{Direction: cloud.Ingress, IPv6: ipv6, AnyProtocol: true, Group: g.ID},
		); err != nil {
			return "", err
		}
	}
	groups.Put(tx, &g, string(t.Project), string(g.ID))
	defaultGroups.Put(tx, &g.ID, string(t.Project))
	return g.ID, nil
}

// allOutgoing returns the rules that permit all outgoing traffic.
func allOutgoing() []cloud.Rule {
	return []cloud.Rule{
		{Direction: cloud.Egress, AnyProtocol: true}, {Direction: cloud.Egress, IPv6: true, AnyProtocol: true},
	}
}

// chooseGroups returns the requested groups of a new port after it has checked that they exist, or the group "default"
// if the request names none.
func chooseGroups(tx *store.Tx, t cloud.Tenant, requested *[]cloud.SecurityGroupID) ([]cloud.SecurityGroupID, error) {
	if requested == nil {
		id, err := defaultGroup(tx, t)
		return []cloud.SecurityGroupID{id}, err
	}
	return *requested, checkGroupsExist(tx, t, *requested)
}

func checkGroupsExist(r store.Reader, t cloud.Tenant, ids []cloud.SecurityGroupID) error {
	for _, id := range ids {
		if _, err := find(r, groups, kindGroup, t, string(id)); err != nil {
			return err
		}
	}
	return nil
}

// useGroups records that a port has the groups. leaveGroups removes these records.
func useGroups(tx *store.Tx, port cloud.PortID, ids []cloud.SecurityGroupID) {
	for _, id := range ids {
		groupPorts.Put(tx, &struct{}{}, string(id), string(port))
	}
}

func leaveGroups(tx *store.Tx, port cloud.PortID, ids []cloud.SecurityGroupID) {
	for _, id := range ids {
		groupPorts.Delete(tx, string(id), string(port))
	}
}

func hasGroup(p *cloud.Port, id cloud.SecurityGroupID) bool { return slices.Contains(p.Groups, id) }

// GetSecurityGroup returns a security group of the project, or NotFound.
func (s *Service) GetSecurityGroup(
	ctx context.Context, t cloud.Tenant, id cloud.SecurityGroupID,
) (*cloud.SecurityGroup, error) {
	return get(ctx, s, groups, kindGroup, "id", t, string(id))
}

// ListSecurityGroups returns a page of the project's security groups, and the token of the next page.
func (s *Service) ListSecurityGroups(
	ctx context.Context, t cloud.Tenant, p page,
) ([]*cloud.SecurityGroup, string, error) {
	l := listing[cloud.SecurityGroup]{
		kind: kindGroup, table: groups, t: t, page: p, keep: func(*cloud.SecurityGroup) bool { return true },
		name: func(g *cloud.SecurityGroup) string { return g.Name },
	}
	if p.Name != "" {
		return listNamed(ctx, s, l)
	}
	return list(ctx, s, l)
}

// GroupUpdate describes a change of a security group. Nil fields keep their value.
type GroupUpdate struct {
	ID                cloud.SecurityGroupID
	Name, Description *string
}

// UpdateSecurityGroup changes the name and the description of a security group.
func (s *Service) UpdateSecurityGroup(
	ctx context.Context, t cloud.Tenant, q GroupUpdate, body [32]byte,
) (Result[cloud.SecurityGroup], error) {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return Result[cloud.SecurityGroup]{}, err
	}
	return updateGroupCommand.Call(ctx, s.opts.Commands, change[GroupUpdate]{t, body, q})
}

var updateGroupCommand = newCommand("network.group.update", "UpdateSecurityGroup", updateGroup)

// updateGroup implements UpdateSecurityGroup in a transaction of the leader.
func updateGroup(tx *store.Tx, t cloud.Tenant, q GroupUpdate) (cloud.SecurityGroup, error) {
	g, err := find(tx, groups, kindGroup, t, string(q.ID))
	if err != nil {
		return cloud.SecurityGroup{}, err
	}
	if g.Default && q.Name != nil && *q.Name != g.Name {
		return cloud.SecurityGroup{}, fault.Invalid("name", "the name of the group %s cannot be changed", g.Name).
			With("constraint", "reserved")
	}
	if !g.Default && q.Name != nil && *q.Name == cloud.DefaultSecurityGroup {
		return cloud.SecurityGroup{}, errReservedName()
	}
	if err := describe(
		tx, t.Project, kindGroup, string(g.ID), &g.Name, &g.Description, q.Name, q.Description,
	); err != nil {
		return cloud.SecurityGroup{}, err
	}
	g.UpdatedAt = tx.Now()
	groups.Put(tx, g, string(t.Project), string(g.ID))
	return *g, nil
}

// DeleteSecurityGroup deletes a security group that no port has and to which no rule of another group refers.
func (s *Service) DeleteSecurityGroup(
	ctx context.Context, t cloud.Tenant, id cloud.SecurityGroupID, body [32]byte,
) (Result[struct{}], error) {
	if err := cloud.CheckUUID("id", string(id)); err != nil {
		return Result[struct{}]{}, err
	}
	return deleteGroupCommand.Call(ctx, s.opts.Commands, change[cloud.SecurityGroupID]{t, body, id})
}

var deleteGroupCommand = newCommand("network.group.delete", "DeleteSecurityGroup", deleteGroup)

// deleteGroup implements DeleteSecurityGroup in a transaction of the leader.
func deleteGroup(tx *store.Tx, t cloud.Tenant, id cloud.SecurityGroupID) (none struct{}, err error) {
	g, err := find(tx, groups, kindGroup, t, string(id))
	if err != nil {
		return none, err
	}
	if g.Default {
		return none, fault.New(fault.FailedPrecondition, "the group %s is deleted with its project only", g.Name).
			WithReason("DEFAULT_GROUP")
	}
	users, err := groupUsers(tx, g)
	if err != nil {
		return none, err
	}
	if len(users) > 0 {
		return none, inUse(label(kindGroup, g.Name, string(id)), users)
	}
	return none, removeGroup(tx, t, g)
}

// removeGroup deletes the records of a security group.
func removeGroup(tx *store.Tx, t cloud.Tenant, g *cloud.SecurityGroup) error {
	for _, r := range g.Rules {
		if r.Group != "" {
			groupReferrers.Delete(tx, string(r.Group), string(g.ID))
		}
	}
	releaseName(tx, t.Project, kindGroup, g.Name)
	groups.Delete(tx, string(t.Project), string(g.ID))
	return returnQuota(tx, t, quantity{SecurityGroups: 1})
}

// groupUsers returns the labels of ports of a group and of groups whose rules refer to it, up to maxNamedUsers+1 of
// each.
func groupUsers(r store.Reader, g *cloud.SecurityGroup) ([]string, error) {
	with, err := listUsers(r, groupPorts, g.Project, string(g.ID), "", kindPort)
	if err != nil {
		return nil, err
	}
	referrers, err := listUsers(r, groupReferrers, g.Project, string(g.ID), "a rule of ", kindGroup)
	return append(with, referrers...), err
}
