package identity

import (
	"context"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	createGroupCommand = newCommand("create-group", leader.Keyed, func(_ *Service, tx *store.Tx, q newGroup) (principal.Group, error) {
		return valueOf(principal.CreateGroup(tx, q.Group, q.Name, q.By))
	})
	renameGroupCommand = newCommand("rename-group", leader.Repeatable, func(_ *Service, tx *store.Tx, q newGroup) (principal.Group, error) {
		g, err := valueOf(principal.RenameGroup(tx, q.Group, q.Name))
		if err == nil {
			g.Bindings, err = alive(tx, g.Bindings)
		}
		return g, err
	})
	deleteGroupCommand = newCommand("delete-group", leader.Keyed, func(_ *Service, tx *store.Tx, q principal.GroupRef) (none, error) {
		return none{}, principal.DeleteGroup(tx, q)
	})
	addMemberCommand = newCommand("add-group-member", leader.Repeatable, func(_ *Service, tx *store.Tx, q principal.Membership) (none, error) {
		return none{}, principal.AddMember(tx, q)
	})
	removeMemberCommand = newCommand("remove-group-member", leader.Repeatable, func(_ *Service, tx *store.Tx, q principal.Membership) (none, error) {
		return none{}, principal.RemoveMember(tx, q)
	})
	bindGroupCommand = newCommand("bind-group", leader.Repeatable, func(_ *Service, tx *store.Tx, q groupGrant) (none, error) {
		return none{}, principal.BindGroup(tx, q.Group, q.Binding)
	})
	unbindGroupCommand = newCommand("unbind-group", leader.Repeatable, func(_ *Service, tx *store.Tx, q groupGrant) (none, error) {
		return none{}, principal.UnbindGroup(tx, q.Group, q.Binding)
	})
)

// group returns a group with the roles that it has at present, or NotFound.
func (s *Service) group(ctx context.Context, ref principal.GroupRef) (g *principal.Group, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if g, err = principal.FindGroup(v, ref); err == nil {
			g.Bindings, err = alive(v, g.Bindings)
		}
		return err
	})
	return g, err
}

// groups returns a page of the groups of an org, or of all orgs if org is empty.
func (s *Service) groups(ctx context.Context, org cloud.OrgID, size int32, page string) ([]*principal.Group, string, error) {
	all := func(*principal.Group) bool { return true }
	return principal.Groups(ctx, s.opts.Store, org, all, size, page)
}

// groupMembers returns a page of the IDs of a group's members. It returns NotFound if the group does not exist.
func (s *Service) groupMembers(ctx context.Context, ref principal.GroupRef, size int32, page string) ([]*cloud.UserID, string, error) {
	ids, next, err := principal.GroupMembers(ctx, s.opts.Store, ref, size, page)
	if err == nil {
		_, err = s.group(ctx, ref)
	}
	return ids, next, err
}

// groupsOf returns the groups of the user u, with their present roles.
func groupsOf(v *store.View, u *principal.User) (out []*identityv1.Group, err error) {
	joined, err := u.MemberOf(v)
	for _, g := range joined {
		out = append(out, groupOnWire(g))
	}
	return out, err
}
