package principal

import (
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Invitations holds the roles that one org offers to one user name. The user need not exist. Invitations are stored
// apart from the user's record, because verifying a token does not need them.
//
// Decisions:
//   - The limits apply per org and name (maxOpen) and per org (maxInvitees), so no org uses up the limits of another.
//     Only system:admin creates orgs, so the number of invitations to one name is bounded too.
//   - The records, and what the inviting org can read, do not depend on whether the user exists. So the org sees a
//     declined invitation as open until it expires. The same holds for the invitations of a deleted user; a later user
//     of that name does not see them.
type Invitations struct {
	User cloud.UserID
	Org  cloud.OrgID
	Open []Invitation
}

// Invitation is an offer of one role.
type Invitation struct {
	Binding cloud.Binding
	By      string
	At      cloud.Time
	Expires cloud.Time
	// Declined is true if the user declined the invitation, which is then no longer shown to the user.
	Declined bool `cbor:",omitempty"`
}

// invitee is an index entry: a user name that an org has invited.
type invitee struct {
	User cloud.UserID
	Org  cloud.OrgID
}

var (
	// invitations holds the invitations of one org to one user name: invitation/<user>/<org>.
	invitations = store.NewTable[Invitations]("invitation")
	// invitees indexes the records of invitations by org: invitee/<org>/<user>.
	invitees = store.NewTable[invitee]("invitee")
	// inviteeCount holds the number of invitees of an org: invitee-count/<org>.
	inviteeCount = store.NewTable[uint64]("invitee-count")
)

const (
	// maxOpen is the maximum number of open invitations of one org to one user name.
	maxOpen = 8
	// maxInvitees is the maximum number of user names to which one org has open invitations.
	maxInvitees = 1000
	// invitationLife is how long an invitation is open, in milliseconds: 30 days.
	invitationLife = 30 * 24 * 3600 * 1000
	// renewAfter is the minimum age of an invitation, in milliseconds, at which giving the same role again restarts the
	// time invitationLife.
	renewAfter = 3600 * 1000
)

// invite stores an invitation to a role, which is open for invitationLife. If there is an invitation to the role and it
// is older than renewAfter, invite renews it. If maxOpen or maxInvitees would be exceeded, invite returns
// ResourceExhausted.
func invite(tx *store.Tx, g Grant) error {
	rec, err := invitations.Get(tx, string(g.User), string(g.Binding.Org))
	if err != nil {
		return err
	}
	now := tx.Now()
	if rec == nil {
		rec = &Invitations{User: g.User, Org: g.Binding.Org}
	}
	rec.forget(now)
	if i := rec.find(g.Binding); i >= 0 {
		if p := &rec.Open[i]; now-p.At >= renewAfter {
			p.By, p.At, p.Expires = g.By, now, now+invitationLife
			return rec.save(tx)
		}
		return nil
	}
	if len(rec.Open) >= maxOpen {
		return fault.New(fault.ResourceExhausted,
			"%d invitations of org %s to %s are open: withdraw one, or wait until they are answered or end", maxOpen, rec.Org, g.User)
	}
	rec.Open = append(rec.Open, Invitation{Binding: g.Binding, By: g.By, At: now, Expires: now + invitationLife})
	return rec.save(tx)
}

// find returns the index of the invitation to the role b in r.Open, or -1 if there is none.
func (r *Invitations) find(b cloud.Binding) int {
	return slices.IndexFunc(r.Open, func(i Invitation) bool { return b.Same(i.Binding) })
}

// forget removes the expired invitations from r.Open. The caller must store the record.
func (r *Invitations) forget(now cloud.Time) {
	r.Open = slices.DeleteFunc(r.Open, func(i Invitation) bool { return now >= i.Expires })
}

// save stores the record r and its index entry, and updates inviteeCount. If r has no invitations left, save deletes
// both.
func (r *Invitations) save(tx *store.Tx) error {
	user, org := string(r.User), string(r.Org)
	had, err := invitees.Has(tx, org, user)
	if err != nil {
		return err
	}
	if len(r.Open) > 0 {
		invitations.Put(tx, r, user, org)
	} else {
		invitations.Delete(tx, user, org)
	}
	if had == (len(r.Open) > 0) {
		return nil
	}
	count, err := inviteeCount.Get(tx, org)
	if err != nil {
		return err
	}
	if count == nil {
		count = new(uint64)
	}
	switch {
	case !had && *count >= maxInvitees:
		return fault.New(fault.ResourceExhausted,
			"org %s has open invitations to %d users: withdraw some, or wait until they are answered or end", org, maxInvitees)
	case !had:
		*count++
		invitees.Put(tx, &invitee{r.User, r.Org}, org, user)
	default:
		*count -= min(*count, 1)
		invitees.Delete(tx, org, user)
	}
	if *count == 0 {
		inviteeCount.Delete(tx, org)
		return nil
	}
	inviteeCount.Put(tx, count, org)
	return nil
}

// withdraw removes the invitation to the role in g, if there is one.
func withdraw(tx *store.Tx, g Grant) error {
	if g.Binding.Org == "" {
		return nil
	}
	rec, err := invitations.Get(tx, string(g.User), string(g.Binding.Org))
	if err != nil || rec == nil {
		return err
	}
	i := rec.find(g.Binding)
	if i < 0 {
		return nil
	}
	rec.Open = slices.Delete(rec.Open, i, i+1)
	return rec.save(tx)
}

func errNotInvited(id cloud.UserID, b cloud.Binding) error {
	return fault.New(fault.NotFound, "%s has no invitation to %s in %s", id, b.Role, cloud.Tenant{Org: b.Org, Project: b.Project})
}

// findInvitation returns the record with the invitation of the user id to the role b, and the index of the invitation
// in Open. It returns NotFound if there is no such invitation or the user has declined it.
func findInvitation(tx *store.Tx, id cloud.UserID, b cloud.Binding) (*Invitations, int, error) {
	if b.Org == "" {
		return nil, 0, errNotInvited(id, b)
	}
	rec, err := invitations.Get(tx, string(id), string(b.Org))
	if err != nil {
		return nil, 0, err
	}
	if rec == nil {
		return nil, 0, errNotInvited(id, b)
	}
	rec.forget(tx.Now())
	i := rec.find(b)
	if i < 0 || rec.Open[i].Declined {
		return nil, 0, errNotInvited(id, b)
	}
	return rec, i, nil
}

// Accept gives a user the role of an open invitation, and removes the invitation. If the user has the role already,
// Accept does nothing. It returns NotFound if there is no invitation, and ResourceExhausted if the user has maxBindings
// roles.
func Accept(tx *store.Tx, id cloud.UserID, b cloud.Binding) error {
	u, err := Find(tx, id)
	if err != nil {
		return err
	}
	missing := setIncarnation(tx, &b)
	if missing == nil && slices.Contains(u.Bindings, b) {
		return nil
	}
	rec, i, err := findInvitation(tx, id, b)
	if err != nil {
		return err
	}
	had, err := effective(tx, u.Bindings)
	if err != nil {
		return err
	}
	switch {
	case missing != nil:
		return missing
	case rec.Open[i].Binding != b:
		return errNotInvited(id, b) // the invitation is to an earlier, deleted project with the same ID
	case len(had) >= maxBindings:
		return fault.New(fault.ResourceExhausted, "%s has %d roles: give one up first", id, maxBindings)
	}
	if err := addRole(tx, u, b); err != nil {
		return err
	}
	rec.Open = slices.Delete(rec.Open, i, i+1)
	return rec.save(tx)
}

// Decline hides an invitation from a user. The inviting org sees it as open until it expires.
func Decline(tx *store.Tx, id cloud.UserID, b cloud.Binding) error {
	rec, i, err := findInvitation(tx, id, b)
	if err != nil {
		return err
	}
	rec.Open[i].Declined = true
	return rec.save(tx)
}

// declineAll marks all invitations to a user name as declined, so that they are not shown to a user who is created with
// that name later.
func declineAll(tx *store.Tx, id cloud.UserID) error {
	all, _, err := invitations.List(tx, 0, string(id))
	if err != nil {
		return err
	}
	for _, r := range all {
		for i := range r.Value.Open {
			r.Value.Open[i].Declined = true
		}
		invitations.Put(tx, r.Value, r.Path...)
	}
	return nil
}

// WithdrawAll removes all invitations to roles in an org or project that is being deleted.
func WithdrawAll(tx *store.Tx, t cloud.Tenant) error {
	all, _, err := invitees.List(tx, 0, string(t.Org))
	if err != nil {
		return err
	}
	for _, r := range all {
		rec, err := invitations.Get(tx, string(r.Value.User), string(t.Org))
		if err != nil {
			return err
		}
		if rec == nil {
			continue
		}
		before := len(rec.Open)
		rec.Open = slices.DeleteFunc(rec.Open, func(i Invitation) bool { return t.Contains(i.Binding.Tenant()) })
		if len(rec.Open) == before {
			continue
		}
		if err := rec.save(tx); err != nil {
			return err
		}
	}
	return nil
}

// InvitationsTo returns a page of the open invitations to a user, sorted by org.
func InvitationsTo(ctx context.Context, s *store.Store, id cloud.UserID, size int32, token string) (found []*Invitations, next string, err error) {
	now := s.Now()
	hidden := func(i Invitation) bool { return i.Declined || now >= i.Expires }
	req := store.PageRequest{Size: size, Token: token, Query: "invitations\x00" + string(id)}
	keep := func(r *Invitations) bool {
		r.Open = slices.DeleteFunc(r.Open, hidden)
		return len(r.Open) > 0
	}
	return store.Page(ctx, s, invitations, req, keep, string(id))
}

// InvitationsOf returns a page of the open invitations to roles within the tenant t, sorted by user. The zero t means
// all orgs.
func InvitationsOf(ctx context.Context, s *store.Store, t cloud.Tenant, size int32, token string) (found []*Invitations, next string, err error) {
	var path []string
	if t.Org != "" {
		path = append(path, string(t.Org))
	}
	req := store.PageRequest{Size: size, Token: token, Query: "invitees\x00" + t.String()}
	all, next, err := store.Page(ctx, s, invitees, req, func(*invitee) bool { return true }, path...)
	if err != nil {
		return nil, "", err
	}
	now := s.Now()
	err = s.Local(func(v *store.View) error {
		for _, i := range all {
			rec, err := invitations.Get(v, string(i.User), string(i.Org))
			if err != nil {
				return err
			}
			if rec == nil {
				continue
			}
			rec.forget(now)
			rec.Open = slices.DeleteFunc(rec.Open, func(i Invitation) bool { return !t.Contains(i.Binding.Tenant()) })
			if len(rec.Open) > 0 {
				found = append(found, rec)
			}
		}
		return nil
	})
	return found, next, err
}

// forgetAtOnce is the maximum number of records that one transaction of ForgetInvitations reads.
const forgetAtOnce = 500

// ForgetInvitations removes the expired invitations.
func ForgetInvitations(ctx context.Context, s *store.Store) error {
	var after []string
	for more := true; more; {
		begin := after // the transaction function may run again, and must then begin at the same record
		_, err := s.Update(ctx, func(tx *store.Tx) error {
			page, rest, err := invitations.ListAfter(tx.Unguarded(), forgetAtOnce, begin)
			if err != nil {
				return err
			}
			last := begin
			for _, r := range page {
				last = r.Path
				before := len(r.Value.Open)
				if r.Value.forget(tx.Now()); len(r.Value.Open) == before {
					continue
				}
				// Read the record in the transaction, so that a concurrent change of the record makes the transaction
				// run again.
				rec, err := invitations.Get(tx, r.Path...)
				if err != nil {
					return err
				}
				if rec == nil {
					continue
				}
				rec.forget(tx.Now())
				if err := rec.save(tx); err != nil {
					return err
				}
			}
			after, more = last, rest
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
