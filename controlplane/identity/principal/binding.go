package principal

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/controlplane/tenant"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Grant is a role to be given to a user, or to be taken away.
type Grant struct {
	User    cloud.UserID
	Binding cloud.Binding
	// By is the principal who gives or takes it.
	By string
	// Always is set for system:admin, whose grants are effective without the user's consent.
	Always bool
}

const (
	// maxPerOrg bounds the roles that one user has in one org and its projects.
	maxPerOrg = 64
	// maxBindings bounds the roles that a user has in all orgs before they can accept no more invitations. Roles given by
	// the home org and by system:admin do not count against it: what a user accepted elsewhere takes nobody's room.
	maxBindings = 256
)

// HomeOrg returns the org that a user belongs to, whose administrators give the user roles there without asking. It is
// empty for none. A user recorded before there were home orgs belongs to the org of their roles, if it is only one.
func (u *User) HomeOrg() cloud.OrgID {
	if u.HomeSettled {
		return u.Home
	}
	if orgs := cloud.OrgsOf(u.Bindings); len(orgs) == 1 {
		return orgs[0]
	}
	return ""
}

// Bind gives a role to a user, or invites them to it when neither system:admin nor their home org gives it. The org and the
// project must exist. Whether a user of another org exists makes no difference to the answer.
// pending is set for an invitation.
func Bind(tx *store.Tx, g Grant) (pending bool, err error) {
	if err := cloud.CheckCallerID("user_id", string(g.User)); err != nil {
		return false, err
	}
	u, err := Users.Get(tx, string(g.User))
	if err != nil {
		return false, err
	}
	if !g.Always && !u.belongsTo(g.Binding.Org) {
		if err := place(tx, &g.Binding); err != nil {
			return false, err
		}
		if u != nil && u.Account == nil && slices.Contains(u.Bindings, g.Binding) {
			return false, nil // the user accepted it
		}
		return true, invite(tx, g)
	}
	switch {
	case u == nil:
		return false, Missing(g.User)
	case u.Account != nil:
		return false, person(u)
	case !u.Registered():
		return false, fault.New(fault.FailedPrecondition, "user %s has no credential: set a password first", u.ID)
	}
	if err := place(tx, &g.Binding); err != nil {
		return false, err
	}
	if err := withdraw(tx, g); err != nil {
		return false, err
	}
	if err := adopt(tx, u, g); err != nil {
		return false, err
	}
	return false, give(tx, u, g.Binding)
}

// adopt makes the org of a role that system:admin gives the home org of a user who has none, or none that still exists.
func adopt(tx *store.Tx, u *User, g Grant) error {
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

// belongsTo reports whether an org may manage the roles of a principal in the org without asking: it is a user's home org, or
// that of a service account's project.
func (u *User) belongsTo(org cloud.OrgID) bool {
	switch {
	case u == nil || org == "":
		return false
	case u.Account != nil:
		return u.Account.Tenant.Org == org
	}
	return u.HomeOrg() == org
}

// give adds a role to a user, in the present incarnation of its project, and settles where calls go that name no project, so that this does not change that.
func give(tx *store.Tx, u *User, b cloud.Binding) error {
	if slices.Contains(u.Bindings, b) {
		return nil
	}
	u.Home, u.HomeSettled = u.HomeOrg(), true
	// Roles in deleted projects and in earlier incarnations never give access again. They are dropped: nobody sees them, so
	// nobody could make room by taking them away.
	before, err := effective(tx, slices.DeleteFunc(slices.Clone(u.Bindings), b.Same))
	if err != nil {
		return err
	}
	if in := countIn(before, b.Org); in >= maxPerOrg {
		if b.Org == "" {
			return fault.New(fault.ResourceExhausted, "user %s has %d roles in the cloud", u.ID, in)
		}
		return fault.New(fault.ResourceExhausted, "user %s has %d roles in org %s: take one away first", u.ID, in, b.Org)
	}
	u.Defaults = u.Defaults.Settle(before).Settle(append(slices.Clone(before), b))
	u.Bindings = before
	u.Bindings = append(u.Bindings, b)
	Users.Put(tx, u, string(u.ID))
	return nil
}

func countIn(all []cloud.Binding, org cloud.OrgID) (n int) {
	for _, b := range all {
		if b.Org == org {
			n++
		}
	}
	return n
}

// effective returns the roles whose org and project exist, the project in the incarnation of the role.
func effective(r store.Reader, all []cloud.Binding) (found []cloud.Binding, err error) {
	for _, b := range all {
		now := b
		switch err := place(r, &now); {
		case err == nil && now == b:
			found = append(found, b)
		case err == nil:
		case !fault.Is(err, fault.NotFound):
			return nil, err
		}
	}
	return found, nil
}

// Unbind takes a role away, or withdraws the invitation to it. Nothing happens when the user has neither. Except for
// system:admin, whether the user exists makes no difference to the answer.
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
		return person(u)
	case u.Account != nil:
		return nil
	case u.ID == Admin && g.Binding.Role == cloud.SystemAdmin:
		return fault.New(fault.FailedPrecondition, "%s keeps %s: nobody could undo it", Admin, cloud.SystemAdmin)
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
	u.Defaults = u.Defaults.Settle(left)
	Users.Put(tx, u, string(u.ID))
	return nil
}

// At are those of a principal's bindings that stand for a place: an org's own and those of its projects, one project's, or
// with neither all.
func (u *User) At(t cloud.Tenant) (found []cloud.Binding) {
	for _, b := range u.Bindings {
		if within(b, t) {
			found = append(found, b)
		}
	}
	return found
}

// within reports whether a role is in a place: in an org or one of its projects, in one project, or anywhere for none.
func within(b cloud.Binding, t cloud.Tenant) bool {
	return (t.Org == "" || b.Org == t.Org) && (t.Project == "" || b.Project == t.Project)
}
