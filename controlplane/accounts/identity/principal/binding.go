package principal

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Grant holds the arguments of Bind, which gives a role to a user, and of Unbind, which removes a role from a user.
type Grant struct {
	User    cloud.UserID
	Binding cloud.Binding
	// By is the principal who gives or removes the role.
	By string
	// Always is true if the caller is system:admin. Such a caller gives a role without an invitation.
	Always bool
}

const (
	// maxPerOrg is the maximum number of roles that one user can have in one org and its projects.
	maxPerOrg = 64
	// maxBindings limits invitations: a user who has this many roles in all orgs together cannot accept one. The limit
	// does not apply to roles that the home org or system:admin gives, so that roles in other orgs cannot prevent them.
	maxBindings = 256
)

// HomeOrg returns the org that a user belongs to, or "". The org's administrators give the user roles in that org
// without an invitation. Records written before home orgs existed have no home org: HomeOrg then returns the org of the
// user's roles if all of them are in one org.
func (u *User) HomeOrg() cloud.OrgID {
	if u.HomeSettled {
		return u.Home
	}
	if orgs := cloud.OrgsOf(u.Bindings); len(orgs) == 1 {
		return orgs[0]
	}
	return ""
}

// Bind gives a role to a user. If the caller is neither system:admin nor the user's home org, Bind creates an
// invitation to the role instead, and returns pending = true. It returns NotFound if the org or the project does not
// exist. The result does not reveal whether a user of another org exists.
func Bind(tx *store.Tx, g Grant) (pending bool, err error) {
	if err := cloud.CheckCallerID("user_id", string(g.User)); err != nil {
		return false, err
	}
	u, err := Users.Get(tx, string(g.User))
	if err != nil {
		return false, err
	}
	if !g.Always && !u.belongsTo(g.Binding.Org) {
		if err := setIncarnation(tx, &g.Binding); err != nil {
			return false, err
		}
		if u != nil && u.Account == nil && slices.Contains(u.Bindings, g.Binding) {
			return false, nil // the user has accepted an earlier invitation to this role
		}
		return true, invite(tx, g)
	}
	switch {
	case u == nil:
		return false, Missing(g.User)
	case u.Account != nil:
		return false, checkIsUser(u)
	case !u.Registered():
		return false, errNoCredential(u)
	}
	if err := setIncarnation(tx, &g.Binding); err != nil {
		return false, err
	}
	if err := withdraw(tx, g); err != nil {
		return false, err
	}
	if err := setHomeOrg(tx, u, g); err != nil {
		return false, err
	}
	return false, addRole(tx, u, g.Binding)
}

func errNoCredential(u *User) error {
	return fault.New(fault.FailedPrecondition, "user %s has no credential: set a password first", u.ID)
}

// setHomeOrg is called when a role is given to the user u. It changes the home org only if system:admin gives the role,
// and u has no home org or the home org was deleted. It then makes the org of the role the home org.
func setHomeOrg(tx *store.Tx, u *User, g Grant) error {
	home := u.HomeOrg()
	if !g.Always || g.Binding.Org == "" || home == g.Binding.Org {
		return nil
	}
	if home != "" {
		if o, err := tenant.FindOrg(tx, home); err != nil || o != nil {
			return err
		}
	}
	u.Home, u.HomeSettled = g.Binding.Org, true
	Users.Put(tx, u, string(u.ID))
	return nil
}

// belongsTo reports whether org is the home org of the user or, for a service account, the org of its project. If so,
// the administrators of org can give and remove the principal's roles in org without an invitation.
func (u *User) belongsTo(org cloud.OrgID) bool {
	switch {
	case u == nil || org == "":
		return false
	case u.Account != nil:
		return u.Account.Tenant.Org == org
	}
	return u.HomeOrg() == org
}

// addRole adds a role to a user. Before that, it stores the org and the project that the user's calls without a tenant
// use at present as the user's defaults. So the new role does not change the tenant of such calls.
func addRole(tx *store.Tx, u *User, b cloud.Binding) error {
	if slices.Contains(u.Bindings, b) {
		return nil
	}
	u.Home, u.HomeSettled = u.HomeOrg(), true
	// Remove the user's roles in deleted projects and in earlier incarnations of projects. They no longer give access
	// and appear in no list, so no caller could remove them, but they would count for maxPerOrg.
	before, err := effective(tx, slices.DeleteFunc(slices.Clone(u.Bindings), b.Same))
	if err != nil {
		return err
	}
	if in := countIn(before, b.Org); in >= maxPerOrg {
		if b.Org == "" {
			return fault.New(fault.ResourceExhausted, "user %s has %d roles that are not limited to an org: remove one first", u.ID, in)
		}
		return fault.New(fault.ResourceExhausted, "user %s has %d roles in org %s: remove one first", u.ID, in, b.Org)
	}
	u.Bindings = append(slices.Clone(before), b)
	had, err := u.withGroups(tx, before)
	if err != nil {
		return err
	}
	now, err := u.withGroups(tx, u.Bindings)
	if err != nil {
		return err
	}
	u.Defaults = u.Defaults.WithBindings(had).WithBindings(now)
	Users.Put(tx, u, string(u.ID))
	return nil
}

// countIn returns how many of the roles are in an org or its projects.
func countIn(all []cloud.Binding, org cloud.OrgID) (n int) {
	for _, b := range all {
		if b.Org == org {
			n++
		}
	}
	return n
}

// effective returns the roles whose org and project exist. It omits a role in a deleted project, even if a new project
// has the same ID.
func effective(r store.Reader, all []cloud.Binding) (found []cloud.Binding, err error) {
	for _, b := range all {
		now := b
		switch err := setIncarnation(r, &now); {
		case err == nil && now == b:
			found = append(found, b)
		case err == nil:
		case !fault.Is(err, fault.NotFound):
			return nil, err
		}
	}
	return found, nil
}

// Unbind removes a role from a user, or deletes the invitation to the role. If the user has neither, Unbind does
// nothing. The result does not reveal whether a user of another org exists, except to system:admin.
func Unbind(tx *store.Tx, g Grant) error {
	if err := cloud.CheckCallerID("user_id", string(g.User)); err != nil {
		return err
	}
	if err := withdraw(tx, g); err != nil {
		return err
	}
	u, err := Users.Get(tx, string(g.User))
	if err != nil {
		return err
	}
	switch known := g.Always || u.belongsTo(g.Binding.Org); {
	case u == nil && g.Always:
		return Missing(g.User)
	case u == nil:
		return nil
	case u.Account != nil && known:
		return checkIsUser(u)
	case u.Account != nil:
		return nil
	case u.ID == Admin && g.Binding.Role == cloud.SystemAdmin:
		return fault.New(fault.FailedPrecondition, "%s cannot lose the role %s: nobody else could give it back", Admin, cloud.SystemAdmin)
	}
	if !slices.ContainsFunc(u.Bindings, g.Binding.Same) {
		return checkNotByGroup(tx, u, g.Binding)
	}
	u.Home, u.HomeSettled = u.HomeOrg(), true
	u.Bindings = slices.DeleteFunc(slices.Clone(u.Bindings), g.Binding.Same)
	left, err := u.Roles(tx)
	if err != nil {
		return err
	}
	u.Defaults = u.Defaults.WithBindings(left)
	Users.Put(tx, u, string(u.ID))
	return nil
}

// At returns the user's roles within the tenant t: an org including its projects, or one project. The zero t returns
// all roles.
func (u *User) At(t cloud.Tenant) (found []cloud.Binding) {
	for _, b := range u.Bindings {
		if t.Contains(b.Tenant()) {
			found = append(found, b)
		}
	}
	return found
}

// checkNotByGroup returns FailedPrecondition if a group gives the user u the role b, which Unbind cannot remove.
func checkNotByGroup(r store.Reader, u *User, b cloud.Binding) error {
	joined, err := u.MemberOf(r)
	for _, group := range joined {
		if slices.ContainsFunc(group.Bindings, b.Same) {
			return fault.New(fault.FailedPrecondition, "%s has the role %s by the group %s: remove %s from the group, or the role from the group",
				u.ID, b.Role, group.ID, u.ID)
		}
	}
	return err
}
