package principal

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Grant contains the arguments of Bind, which gives a role to a user, and of Unbind, which removes it.
type Grant struct {
	User    cloud.UserID
	Binding cloud.Binding
	// By is the principal who gives or removes the role.
	By string
	// Always is set if the caller is system:admin, whose grants are effective without an invitation.
	Always bool
}

const (
	// maxPerOrg is the maximum number of roles that one user can have in one org and its projects.
	maxPerOrg = 64
	// maxBindings is the number of roles in all orgs with which a user can accept no more invitations. The limit does
	// not apply to roles given by the home org or by system:admin, so accepted invitations of other orgs cannot block
	// them.
	maxBindings = 256
)

// HomeOrg returns the org that a user belongs to, or "". Its administrators give the user roles in the org without an
// invitation. For a record written before home orgs existed, it is the org of the user's roles if all are in one org.
func (u *User) HomeOrg() cloud.OrgID {
	if u.HomeSettled {
		return u.Home
	}
	if orgs := cloud.OrgsOf(u.Bindings); len(orgs) == 1 {
		return orgs[0]
	}
	return ""
}

// Bind gives a role to a user if system:admin or the user's home org gives it, and creates an invitation otherwise. It
// returns NotFound unless the org and the project exist. The result does not reveal whether a user of another org
// exists. pending is set if it created an invitation.
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
		return false, fault.New(fault.FailedPrecondition, "user %s has no credential: set a password first", u.ID)
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

// setHomeOrg sets the user's home org to the org of a role that system:admin gives, if the user has no home org or the
// home org was deleted.
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

// belongsTo reports whether org is the user's home org or, for a service account, the org of its project. Such an org
// gives and removes roles in it and its projects without an invitation.
func (u *User) belongsTo(org cloud.OrgID) bool {
	switch {
	case u == nil || org == "":
		return false
	case u.Account != nil:
		return u.Account.Tenant.Org == org
	}
	return u.HomeOrg() == org
}

// addRole adds a role to a user. It also stores the org and project that calls without a tenant use until now as the
// user's defaults, so that the new role does not change them.
func addRole(tx *store.Tx, u *User, b cloud.Binding) error {
	if slices.Contains(u.Bindings, b) {
		return nil
	}
	u.Home, u.HomeSettled = u.HomeOrg(), true
	// Remove the roles in deleted projects and in earlier incarnations of projects, which never give access again. They
	// would count for maxPerOrg, and no list shows them, so no caller could remove them.
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
	after := append(slices.Clone(before), b)
	u.Defaults = u.Defaults.WithBindings(before).WithBindings(after)
	u.Bindings = after
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

// effective returns the roles whose org and project exist. It omits roles in an earlier, deleted project with the same
// ID.
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

// Unbind removes a role from a user, or deletes the invitation to it. It does nothing if the user has neither. Unless
// the caller is system:admin, the result does not reveal whether the user exists.
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
		return nil
	}
	u.Home, u.HomeSettled = u.HomeOrg(), true
	u.Bindings = slices.DeleteFunc(slices.Clone(u.Bindings), g.Binding.Same)
	left, err := effective(tx, u.Bindings)
	if err != nil {
		return err
	}
	u.Defaults = u.Defaults.WithBindings(left)
	Users.Put(tx, u, string(u.ID))
	return nil
}

// At returns the user's bindings within t: an org with its projects, one project, or, for the zero t, all of them.
func (u *User) At(t cloud.Tenant) (found []cloud.Binding) {
	for _, b := range u.Bindings {
		if isWithin(b, t) {
			found = append(found, b)
		}
	}
	return found
}

// isWithin reports whether a role is within t: an org with its projects, one project, or, for the zero t, anywhere.
func isWithin(b cloud.Binding, t cloud.Tenant) bool {
	return (t.Org == "" || b.Org == t.Org) && (t.Project == "" || b.Project == t.Project)
}
