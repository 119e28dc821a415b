package principal

import (
	"cmp"
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Group is a set of users of an org. Its members have the roles of the group, in addition to their own.
type Group struct {
	ID        cloud.GroupID
	Org       cloud.OrgID
	Name      string
	Bindings  []cloud.Binding
	CreatedAt cloud.Time
	CreatedBy string
}

// IDAndName returns the ID and the name, for the audit.
func (g *Group) IDAndName() (id, name string) { return string(g.ID), g.Name }

// GroupRef identifies a group.
type GroupRef struct {
	Org cloud.OrgID
	ID  cloud.GroupID
}

var (
	// groups is the table of groups: group/<org>/<group>.
	groups = store.NewTable[Group]("group")
	// groupMembers is the index of the members of each group: group-member/<org>/<group>/<user>.
	groupMembers = store.NewTable[cloud.UserID]("group-member")
)

// Limits of groups. A change of a group's roles, and its deletion, change the records of all members in one
// transaction, so maxMembers bounds the size of a transaction.
const (
	maxGroups       = 100 // of an org
	maxMembers      = 500 // of a group
	maxGroupRoles   = 32  // of a group
	maxGroupsOfUser = 16
)

func (g GroupRef) path() []string { return []string{string(g.Org), string(g.ID)} }

// FindGroup returns a group, or NotFound.
func FindGroup(r store.Reader, ref GroupRef) (*Group, error) {
	g, err := groups.Get(r, ref.path()...)
	if err == nil && g == nil {
		err = fault.New(fault.NotFound, "org %s has no group %s", ref.Org, ref.ID)
	}
	return g, err
}

// CreateGroup creates a group without members and roles. It returns NotFound if the org does not exist, and
// AlreadyExists if the org has a group with the ID.
func CreateGroup(tx *store.Tx, ref GroupRef, name, by string) (*Group, error) {
	if err := cloud.CheckCallerID("id", string(ref.ID)); err != nil {
		return nil, err
	}
	if err := tenant.CheckName("name", name); err != nil {
		return nil, err
	}
	if o, err := tenant.FindOrg(tx, ref.Org); err != nil {
		return nil, err
	} else if o == nil {
		return nil, tenant.NoOrg(ref.Org)
	}
	all, _, err := groups.List(tx, 0, string(ref.Org))
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(all, func(r store.Record[Group]) bool { return r.Value.ID == ref.ID }) {
		return nil, fault.New(fault.AlreadyExists, "org %s already has a group %s", ref.Org, ref.ID)
	}
	if len(all) >= maxGroups {
		return nil, fault.New(fault.ResourceExhausted, "org %s has %d groups: delete one first", ref.Org, maxGroups)
	}
	if name == "" {
		name = string(ref.ID)
	}
	g := &Group{ID: ref.ID, Org: ref.Org, Name: name, CreatedAt: tx.Now(), CreatedBy: by}
	groups.Put(tx, g, ref.path()...)
	return g, nil
}

// RenameGroup changes the display name of a group. An empty name means the ID. It returns NotFound if the group does not
// exist.
func RenameGroup(tx *store.Tx, ref GroupRef, name string) (*Group, error) {
	if err := tenant.CheckName("name", name); err != nil {
		return nil, err
	}
	g, err := FindGroup(tx, ref)
	if err != nil {
		return nil, err
	}
	g.Name = cmp.Or(name, string(ref.ID))
	groups.Put(tx, g, ref.path()...)
	return g, nil
}

// DeleteGroup deletes a group. Its members lose its roles.
func DeleteGroup(tx *store.Tx, ref GroupRef) error {
	if _, err := FindGroup(tx, ref); err != nil {
		return err
	}
	members, err := membersOf(tx, ref)
	if err != nil {
		return err
	}
	for _, u := range members {
		if err := leave(tx, u, ref); err != nil {
			return err
		}
	}
	groups.Delete(tx, ref.path()...)
	return nil
}

// CheckNoGroups returns FailedPrecondition if an org has groups.
func CheckNoGroups(r store.Reader, org cloud.OrgID) error {
	all, _, err := groups.List(r, 1, string(org))
	if err != nil || len(all) == 0 {
		return err
	}
	return fault.New(fault.FailedPrecondition, "org %s has group %s: delete its groups first", org, all[0].Value.ID)
}

// Membership holds the arguments of AddMember and RemoveMember.
type Membership struct {
	Group GroupRef
	User  cloud.UserID
	// Always is true if the caller is system:admin. Such a caller adds users of every org.
	Always bool
}

// find checks the ID of the user and that the group exists. It returns the user, or nil if the user does not exist.
func (m *Membership) find(r store.Reader) (*User, error) {
	if err := cloud.CheckCallerID("user_id", string(m.User)); err != nil {
		return nil, err
	}
	if _, err := FindGroup(r, m.Group); err != nil {
		return nil, err
	}
	return Users.Get(r, string(m.User))
}

// AddMember adds a user to a group. It does nothing if the user is a member. If the caller is not system:admin, the org
// of the group must be the user's home org. Otherwise AddMember returns FailedPrecondition, which does not reveal
// whether the user exists.
func AddMember(tx *store.Tx, m Membership) error {
	u, err := m.find(tx)
	if err != nil {
		return err
	}
	switch {
	case !m.Always && !u.belongsTo(m.Group.Org) && !mutant.On(mutant.AnyGroupMember):
		return fault.New(fault.FailedPrecondition,
			"%s is not a user whose home org is %s: only such users can be in its groups; invite others with a role", m.User, m.Group.Org)
	case u == nil:
		return Missing(m.User)
	case u.Account != nil:
		return checkIsUser(u)
	case !u.Registered():
		return errNoCredential(u)
	case slices.Contains(u.Groups, m.Group):
		return nil
	case len(u.Groups) >= maxGroupsOfUser:
		return fault.New(fault.ResourceExhausted, "%s is in %d groups: remove the user from one first", u.ID, maxGroupsOfUser)
	}
	members, _, err := groupMembers.List(tx, 0, m.Group.path()...)
	if err != nil {
		return err
	}
	if len(members) >= maxMembers {
		return fault.New(fault.ResourceExhausted, "group %s has %d members", m.Group.ID, maxMembers)
	}
	if err := setHomeOrg(tx, u, Grant{User: u.ID, Binding: cloud.Binding{Org: m.Group.Org}, Always: m.Always}); err != nil {
		return err
	}
	groupMembers.Put(tx, &u.ID, append(m.Group.path(), string(u.ID))...)
	return changeRoles(tx, u, func() { u.Groups = append(slices.Clone(u.Groups), m.Group) })
}

// RemoveMember removes a user from a group. It does nothing if the user is not a member.
func RemoveMember(tx *store.Tx, m Membership) error {
	u, err := m.find(tx)
	if err != nil {
		return err
	}
	if u == nil || !slices.Contains(u.Groups, m.Group) {
		// A control-plane member of an earlier version may have dropped the group from the record of the user only.
		groupMembers.Delete(tx, append(m.Group.path(), string(m.User))...)
		return nil
	}
	return leave(tx, u, m.Group)
}

// leave removes the user u from a group.
func leave(tx *store.Tx, u *User, ref GroupRef) error {
	groupMembers.Delete(tx, append(ref.path(), string(u.ID))...)
	return changeRoles(tx, u, func() {
		u.Groups = slices.DeleteFunc(slices.Clone(u.Groups), func(g GroupRef) bool { return g == ref })
	})
}

// changeRoles applies change, which changes the groups of the user u, and stores u. An additional group does not change
// the tenant of the user's calls that name none, like an additional role (see addRole).
func changeRoles(tx *store.Tx, u *User, change func()) error {
	before, err := u.Roles(tx)
	if err != nil {
		return err
	}
	u.Home, u.HomeSettled = u.HomeOrg(), true
	change()
	after, err := u.Roles(tx)
	if err != nil {
		return err
	}
	u.Defaults = u.Defaults.WithBindings(before).WithBindings(after)
	Users.Put(tx, u, string(u.ID))
	return nil
}

// BindGroup gives a role to a group. The role must be in the org of the group or in one of its projects.
func BindGroup(tx *store.Tx, ref GroupRef, b cloud.Binding) error {
	g, err := FindGroup(tx, ref)
	if err != nil {
		return err
	}
	if err := setIncarnation(tx, &b); err != nil {
		return err
	}
	if slices.Contains(g.Bindings, b) {
		return nil
	}
	left, err := effective(tx, slices.DeleteFunc(slices.Clone(g.Bindings), b.Same))
	if err != nil {
		return err
	}
	if len(left) >= maxGroupRoles {
		return fault.New(fault.ResourceExhausted, "group %s has %d roles: remove one first", g.ID, maxGroupRoles)
	}
	return changeGroup(tx, g, append(left, b))
}

// UnbindGroup removes a role from a group. It does nothing if the group does not have the role.
func UnbindGroup(tx *store.Tx, ref GroupRef, b cloud.Binding) error {
	g, err := FindGroup(tx, ref)
	if err != nil || !slices.ContainsFunc(g.Bindings, b.Same) {
		return err
	}
	return changeGroup(tx, g, slices.DeleteFunc(slices.Clone(g.Bindings), b.Same))
}

// changeGroup stores the group g with the given roles. It also stores the members whose defaults change.
func changeGroup(tx *store.Tx, g *Group, bindings []cloud.Binding) error {
	ref := GroupRef{g.Org, g.ID}
	members, err := membersOf(tx, ref)
	if err != nil {
		return err
	}
	for _, u := range members {
		before, err := u.Roles(tx)
		if err != nil {
			return err
		}
		u.Defaults = u.Defaults.WithBindings(before)
	}
	g.Bindings = bindings
	groups.Put(tx, g, ref.path()...)
	for _, u := range members {
		after, err := u.Roles(tx)
		if err != nil {
			return err
		}
		u.Defaults = u.Defaults.WithBindings(after)
		Users.Put(tx, u, string(u.ID))
	}
	return nil
}

// membersOf returns the members of a group.
func membersOf(tx *store.Tx, ref GroupRef) (members []*User, err error) {
	all, _, err := groupMembers.List(tx, 0, ref.path()...)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		u, err := Users.Get(tx, string(*r.Value))
		if err != nil {
			return nil, err
		}
		if u != nil {
			members = append(members, u)
		}
	}
	return members, nil
}

// Roles returns the roles that the principal has at present: its own and those of its groups, each once. It omits roles
// in deleted orgs and projects.
func (u *User) Roles(r store.Reader) ([]cloud.Binding, error) {
	own, err := effective(r, u.Bindings)
	if err != nil {
		return nil, err
	}
	return u.withGroups(r, own)
}

// withGroups returns own and the roles of the principal's groups, each once.
func (u *User) withGroups(r store.Reader, own []cloud.Binding) ([]cloud.Binding, error) {
	all := slices.Clip(own)
	joined, err := u.MemberOf(r)
	for _, g := range joined {
		for _, b := range g.Bindings {
			if !slices.Contains(all, b) {
				all = append(all, b)
			}
		}
	}
	return all, err
}

// MemberOf returns the groups of the user, without their roles in deleted projects.
func (u *User) MemberOf(r store.Reader) (found []*Group, err error) {
	for _, ref := range u.Groups {
		g, err := groups.Get(r, ref.path()...)
		if err != nil {
			return nil, err
		}
		if g == nil {
			continue
		}
		if g.Bindings, err = effective(r, g.Bindings); err != nil {
			return nil, err
		}
		found = append(found, g)
	}
	return found, nil
}

// At returns the group's roles within the tenant t, like User.At.
func (g *Group) At(t cloud.Tenant) (found []cloud.Binding) {
	for _, b := range g.Bindings {
		if t.Contains(b.Tenant()) {
			found = append(found, b)
		}
	}
	return found
}

// Groups returns a page of the groups of an org (of all orgs if org is empty) for which keep returns true, sorted by org
// and ID. Their roles in deleted projects are omitted.
func Groups(ctx context.Context, s *store.Store, org cloud.OrgID, keep func(*Group) bool, size int32, token string) (found []*Group, next string, err error) {
	var path []string
	if org != "" {
		path = append(path, string(org))
	}
	found, next, err = store.Page(ctx, s, groups, store.PageRequest{Size: size, Token: token, Query: "groups"}, keep, path...)
	if err != nil {
		return nil, "", err
	}
	err = s.Local(func(v *store.View) error {
		for _, g := range found {
			if g.Bindings, err = effective(v, g.Bindings); err != nil {
				return err
			}
		}
		return nil
	})
	return found, next, err
}

// GroupMembers returns a page of the IDs of a group's members, sorted.
func GroupMembers(ctx context.Context, s *store.Store, ref GroupRef, size int32, token string) ([]*cloud.UserID, string, error) {
	req := store.PageRequest{Size: size, Token: token, Query: "group members"}
	return store.Page(ctx, s, groupMembers, req, func(*cloud.UserID) bool { return true }, ref.path()...)
}
