// Package principal keeps those who can hold tokens: users and service accounts, how they prove who they are, and the roles
// they have.
//
// Everything here happens inside a transaction that is the caller's. It knows no tokens and no requests. Decisions:
//   - Users and service accounts share one table, so no two principals have the same id. A service account's id is ours.
//   - A name alone (what anybody may register) has no credential, and only who has one can be given a role.
//   - A user has a home org. Roles of the home org, and those that system:admin gives, are effective at once; those of
//     another org are invitations (invitation.go) until the user accepts them, so that no tenant changes what another
//     tenant's users can do. A user made without a home org gets the org of the first role in an org that system:admin
//     gives. Of users recorded before there were home orgs it is the only org that they have roles in, or none.
//   - The default project is the first one in which the user got a role, until that role is taken away
//     (cloud.Defaults), so that another role never changes the tenant of calls with a token in use.
//   - The epoch of a principal counts what ended its tokens: a new password, a revocation, being disabled. No clock has a
//     say in it. It goes on when an id is used again after the principal was deleted.
//   - A service account's secret is kept sealed, not hashed: it is too long to be guessed, and the same record is a key of
//     the object storage, whose signatures need the secret itself.
//
// Keys: invitation/<user>/<org>, invitee/<org>/<user>, invitee-count/<org>, user/<id>, user-retired/<id>, user-identity/<provider>/<SHA-256 of issuer and subject>, service-account/<project>/<name>.
package principal

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Admin is the user that is there from the first boot. Who holds the cluster key can always be it.
const Admin cloud.UserID = "admin"

// Kind is a sort of principal, as the spec's part 2.6 names it.
type Kind string

const (
	Person         Kind = "User"
	ServiceAccount Kind = "ServiceAccount"
)

// Identity is who somebody is at an outside provider.
type Identity struct {
	Provider, Subject string
	// Issuer is the provider's: who takes its name later vouches for nobody of it.
	Issuer string
}

// User is a principal. Account is set of a service account.
type User struct {
	ID       cloud.UserID
	Name     string
	Bindings []cloud.Binding
	// Home is the org that a user belongs to. It is valid only if HomeSettled is set; use HomeOrg.
	Home        cloud.OrgID `cbor:",omitempty"`
	HomeSettled bool        `cbor:",omitempty"`
	// Defaults are the tenants of the user's calls that name none.
	Defaults cloud.Defaults `cbor:",omitzero"`
	Password *password.Hash
	// Identities are credentials too.
	Identities []Identity `cbor:",omitempty"`
	Account    *Account   `cbor:",omitempty"`
	Disabled   bool       `cbor:",omitempty"`
	// Claimed is set of a name that anybody registered.
	Claimed   bool `cbor:",omitempty"`
	CreatedAt cloud.Time
	// Epoch counts what ended all tokens: one proven under another count is no longer valid.
	Epoch uint64
	// Since cuts the tokens that were made without looking at the record: one made before it is no longer valid.
	Since cloud.Time
}

// Users are all principals.
var Users = store.NewTable[User]("user")

var (
	// retired are the epochs of those who were deleted.
	retired = store.NewTable[uint64]("user-retired")
	linked  = store.NewTable[cloud.UserID]("user-identity")
)

// Limits of a principal.
const (
	maxIdentities = 16
	maxSubject    = 255
)

// Kind is what sort of principal it is.
func (u *User) Kind() Kind {
	if u.Account != nil {
		return ServiceAccount
	}
	return Person
}

// Registered reports whether a credential is there to prove the user by.
func (u *User) Registered() bool {
	return u.Password != nil || len(u.Identities) > 0 || u.Account != nil || u.ID == Admin
}

// Unused reports whether the principal is a name that was registered without a token and has no credential and no role
// since. A name that an administrator disabled is not unused.
func (u *User) Unused() bool {
	return u.Claimed && !u.Registered() && len(u.Bindings) == 0 && !u.Disabled
}

// cut ends all tokens of a principal.
func (u *User) cut(tx *store.Tx) {
	u.Epoch++
	u.Since = tx.Now()
}

// Missing says that there is no principal of an id.
func Missing(id cloud.UserID) *fault.Fault { return fault.New(fault.NotFound, "no user %s", id) }

// Find is a principal that is there, or NotFound.
func Find(r store.Reader, id cloud.UserID) (*User, error) {
	u, err := Users.Get(r, string(id))
	if err == nil && u == nil {
		err = Missing(id)
	}
	return u, err
}

// Create creates a user without a credential or role. home is the org that the user belongs to, or ""; open is set if
// an unauthenticated caller registers the name.
func Create(tx *store.Tx, id cloud.UserID, name string, home cloud.OrgID, open bool) (*User, error) {
	if err := cloud.CheckCallerID("id", string(id)); err != nil {
		return nil, err
	}
	if err := tenant.CheckName("name", name); err != nil {
		return nil, err
	}
	if home != "" {
		if err := cloud.CheckCallerID("org_id", string(home)); err != nil {
			return nil, err
		}
		if o, err := tenant.FindOrg(tx, home); err != nil {
			return nil, err
		} else if o == nil {
			return nil, tenant.NoOrg(home)
		}
	}
	return add(tx, &User{ID: id, Name: name, Home: home, Claimed: open})
}

func add(tx *store.Tx, u *User) (*User, error) {
	if taken, err := Users.Has(tx, string(u.ID)); err != nil {
		return nil, err
	} else if taken {
		return nil, fault.New(fault.AlreadyExists, "user %s exists", u.ID)
	}
	before, err := retired.Get(tx, string(u.ID))
	if err != nil {
		return nil, err
	}
	if before != nil {
		u.Epoch, u.Since = *before+1, tx.Now()
		retired.Delete(tx, string(u.ID))
	}
	u.CreatedAt, u.HomeSettled = tx.Now(), true
	Users.Put(tx, u, string(u.ID))
	return u, nil
}

// Change is an update of one principal.
func Change(tx *store.Tx, id cloud.UserID, f func(*User) error) (*User, error) {
	if err := cloud.CheckCallerID("user_id", string(id)); err != nil {
		return nil, err
	}
	u, err := Find(tx, id)
	if err != nil {
		return nil, err
	}
	if err := f(u); err != nil {
		return nil, err
	}
	Users.Put(tx, u, string(id))
	return u, nil
}

// person refuses what only a user has.
func person(u *User) error {
	if u.Account != nil {
		return fault.New(fault.FailedPrecondition, "%s is a service account of project %s: it is created and deleted there", u.ID, u.Account.Tenant.Project)
	}
	return nil
}

// SetPassword registers or changes a user's password, and ends the tokens of before.
func SetPassword(tx *store.Tx, id cloud.UserID, h password.Hash) (*User, error) {
	return Change(tx, id, func(u *User) error {
		if err := person(u); err != nil {
			return err
		}
		u.Password = &h
		u.cut(tx)
		return nil
	})
}

// Revoke ends all tokens of a principal.
func Revoke(tx *store.Tx, id cloud.UserID) (*User, error) {
	return Change(tx, id, func(u *User) error { u.cut(tx); return nil })
}

// SetDisabled shuts a user out, or lets them in again.
func SetDisabled(tx *store.Tx, id cloud.UserID, disabled bool) (*User, error) {
	return Change(tx, id, func(u *User) error {
		if err := person(u); err != nil {
			return err
		}
		if u.ID == Admin && disabled {
			return fault.New(fault.FailedPrecondition, "%s cannot be disabled: nobody else could enable it again", Admin)
		}
		if disabled && !u.Disabled {
			u.cut(tx)
		}
		u.Disabled = disabled
		return nil
	})
}

// Delete removes a user with credentials and roles.
func Delete(tx *store.Tx, id cloud.UserID) error {
	u, err := Change(tx, id, func(u *User) error {
		if u.ID == Admin {
			return fault.New(fault.FailedPrecondition, "%s cannot be deleted: nobody else could create it again", Admin)
		}
		return person(u)
	})
	if err != nil {
		return err
	}
	return remove(tx, u)
}

func remove(tx *store.Tx, u *User) error {
	for _, i := range u.Identities {
		linked.Delete(tx, i.key()...)
	}
	if u.Account == nil { // the id of an account is drawn, and never again
		retired.Put(tx, &u.Epoch, string(u.ID))
		if u.Registered() { // no invitation was meant for a user without a credential
			if err := declineAll(tx, u.ID); err != nil {
				return err
			}
		}
	}
	Users.Delete(tx, string(u.ID))
	return nil
}

func (i Identity) key() []string {
	sum := sha256.Sum256([]byte(i.Issuer + "\x00" + i.Subject))
	return []string{i.Provider, hex.EncodeToString(sum[:])}
}

// Link registers an identity at an outside provider as a user's credential. It can be one user's only.
func Link(tx *store.Tx, id cloud.UserID, i Identity) (*User, error) {
	if i.Subject == "" || len(i.Subject) > maxSubject {
		return nil, fault.Invalid("identity.subject", "must be 1 to %d bytes", maxSubject)
	}
	return Change(tx, id, func(u *User) error {
		if err := person(u); err != nil {
			return err
		}
		switch holder, err := linked.Get(tx, i.key()...); {
		case err != nil:
			return err
		case holder != nil && *holder == id:
			return nil
		case holder != nil:
			return fault.New(fault.AlreadyExists, "that identity at %s is another user's", i.Provider)
		case len(u.Identities) >= maxIdentities:
			return fault.New(fault.ResourceExhausted, "user %s has %d identities", id, maxIdentities)
		}
		u.Identities = append(u.Identities, i)
		linked.Put(tx, &id, i.key()...)
		return nil
	})
}

// Unlink takes an identity away from a user, and ends the tokens that it may have proved.
func Unlink(tx *store.Tx, id cloud.UserID, i Identity) (*User, error) {
	return Change(tx, id, func(u *User) error {
		at := slices.IndexFunc(u.Identities, func(had Identity) bool { return had.Provider == i.Provider && had.Subject == i.Subject })
		if at < 0 {
			return fault.New(fault.NotFound, "user %s has no such identity at %s", id, i.Provider)
		}
		linked.Delete(tx, u.Identities[at].key()...)
		u.Identities = slices.Delete(u.Identities, at, at+1)
		u.cut(tx)
		return nil
	})
}

// Linked is the user that an outside identity stands for; empty when it is nobody's.
func Linked(r store.Reader, i Identity) (cloud.UserID, error) {
	id, err := linked.Get(r, i.key()...)
	if err != nil || id == nil {
		return "", err
	}
	return *id, nil
}
