package principal

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Bind gives a role to a user who has a credential. The org and the project must be there.
func Bind(tx *store.Tx, id cloud.UserID, b cloud.Binding) error {
	_, err := Change(tx, id, func(u *User) error {
		if err := person(u); err != nil {
			return err
		}
		if !u.Registered() {
			return fault.New(fault.FailedPrecondition, "user %s has no credential: set a password first", u.ID)
		}
		if err := place(tx, &b); err != nil {
			return err
		}
		if slices.Contains(u.Bindings, b) {
			return nil
		}
		// A binding of an earlier incarnation of the project gives nothing any more, and the new one takes its place.
		u.Bindings = slices.DeleteFunc(slices.Clone(u.Bindings), b.Same)
		if len(u.Bindings) >= maxBindings {
			return fault.New(fault.ResourceExhausted, "user %s has %d roles", u.ID, maxBindings)
		}
		u.Bindings = append(u.Bindings, b)
		return nil
	})
	return err
}

// Unbind takes a role away; nothing happens when the user does not have it.
func Unbind(tx *store.Tx, id cloud.UserID, b cloud.Binding) error {
	_, err := Change(tx, id, func(u *User) error {
		if err := person(u); err != nil {
			return err
		}
		if u.ID == Admin && b.Role == cloud.SystemAdmin {
			return fault.New(fault.FailedPrecondition, "%s keeps %s: nobody could undo it", Admin, cloud.SystemAdmin)
		}
		u.Bindings = slices.DeleteFunc(slices.Clone(u.Bindings), b.Same)
		return nil
	})
	return err
}

// At are those of a principal's bindings that stand for a place: an org's own and those of its projects, one project's, or
// with neither all.
func (u *User) At(t cloud.Tenant) (found []cloud.Binding) {
	for _, b := range u.Bindings {
		if (t.Org == "" || b.Org == t.Org) && (t.Project == "" || b.Project == t.Project) {
			found = append(found, b)
		}
	}
	return found
}
