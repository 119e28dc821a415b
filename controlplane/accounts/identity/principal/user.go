// Package principal stores the holders of tokens: users and service accounts, with their credentials and roles.
//
// The functions that change a principal run in the caller's transaction. The package does not depend on tokens or
// requests. Decisions:
//   - Users and service accounts share one table, so no two principals have the same ID. The ID of a service account is
//     generated.
//   - A name that any caller has registered has no credential, and only a user with a credential can get a role.
//   - A user has a home org. Roles given by the home org or by system:admin are effective at once. Roles given by
//     another org are invitations (invitation.go) until the user accepts them, so that no tenant changes the access of
//     another tenant's users. A user created without a home org gets the org of the first org role that system:admin
//     gives. A record written before there were home orgs has none: if all roles of the user are in one org, that org
//     is the home org.
//   - A group belongs to an org and gives its members roles in that org. Only users whose home org it is can be members,
//     because an org's administrators must not change the access of another org's users; system:admin may add others.
//     The roles of groups are read when a token is used, like a user's own, so a change takes effect within a second.
//   - The user's default project (cloud.Defaults) is the first project in which the user got a role, until that role is
//     removed. So another role does not change the tenant of calls that name none.
//   - The epoch of a principal is a number that is incremented by each event that invalidates its tokens: a new
//     password, a revocation, being disabled. It does not depend on clocks. If the ID of a deleted user is used again,
//     the new user's epoch continues from that of the deleted one.
//   - A service account's secret is stored encrypted, not hashed. The service account is also an access key of the
//     object storage, and checking a signature needs the secret itself. The secret is too long to be guessed.
//
// Keys: group/<org>/<group>, group-member/<org>/<group>/<user>, invitation/<user>/<org>, invitee/<org>/<user>,
// invitee-count/<org>, user/<id>, user-retired/<id>, user-identity/<provider>/<SHA-256 of issuer and subject>,
// service-account/<project>/<name>.
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

// Admin is the administrator, created at the first start of the cluster. A holder of the cluster key can always act as
// Admin.
const Admin cloud.UserID = "admin"

// Kind is the kind of a principal, user or service account. The values are those of part 2.6 of the wire contract.
type Kind string

const (
	Person         Kind = "User"
	ServiceAccount Kind = "ServiceAccount"
)

// Identity identifies a user at an external OpenID provider.
type Identity struct {
	Provider, Subject string
	// Issuer is the URL of the provider at the time when the identity was linked. If the configuration later gives the
	// same provider name to another issuer, that provider cannot authenticate the user.
	Issuer string
}

// User is the record of a principal: a user or, if Account is set, a service account.
type User struct {
	ID       cloud.UserID
	Name     string
	Bindings []cloud.Binding
	// Groups are the groups in which the user is a member, in the order in which it joined them.
	Groups []GroupRef `cbor:",omitempty"`
	// Home is the user's home org. It is valid only if HomeSettled is true. Read it with the method HomeOrg.
	Home        cloud.OrgID `cbor:",omitempty"`
	HomeSettled bool        `cbor:",omitempty"`
	// Defaults are the org and the projects that the user's calls use if they name no tenant.
	Defaults cloud.Defaults `cbor:",omitzero"`
	Password *password.Hash
	// Identities are the user's identities at external OpenID providers. Each is a credential, like the password.
	Identities []Identity `cbor:",omitempty"`
	Account    *Account   `cbor:",omitempty"`
	Disabled   bool       `cbor:",omitempty"`
	// Claimed is true if an unauthenticated caller registered the name.
	Claimed   bool `cbor:",omitempty"`
	CreatedAt cloud.Time
	// Epoch is incremented by each event that invalidates all tokens of the principal. A token contains the epoch at
	// the time of its issue, and is valid only while the principal has the same epoch.
	Epoch uint64
	// Since is the time before which tokens signed with the host key are invalid. Such tokens contain no epoch.
	Since cloud.Time
}

// IDAndName implements store.Object, for audit records. For a service account, it returns the ID and the name. For a
// user, it returns the ID twice, because a user's ID is readable text such as "ada".
func (u *User) IDAndName() (id, name string) {
	if u.Account == nil {
		return string(u.ID), string(u.ID)
	}
	return string(u.ID), u.Name
}

// Users is the table of all principals: user/<id>.
var Users = store.NewTable[User]("user")

var (
	// retired holds the epochs of deleted users: user-retired/<id>. If a user with the same ID is created later, its
	// epoch is one higher, so that the tokens of the deleted user stay invalid.
	retired = store.NewTable[uint64]("user-retired")
	// linked maps each external identity to the ID of its user: user-identity/<provider>/<SHA-256 of issuer and
	// subject>.
	linked = store.NewTable[cloud.UserID]("user-identity")
)

// maxIdentities is the maximum number of external identities of a user. maxSubject is the maximum length of an
// identity's subject, in bytes.
const (
	maxIdentities = 16
	maxSubject    = 255
)

// Kind returns ServiceAccount if Account is set, and Person otherwise.
func (u *User) Kind() Kind {
	if u.Account != nil {
		return ServiceAccount
	}
	return Person
}

// Registered reports whether the principal has a credential.
func (u *User) Registered() bool {
	return u.Password != nil || len(u.Identities) > 0 || u.Account != nil || u.ID == Admin
}

// Unused reports whether the principal is only a name: an unauthenticated caller registered it, and it has no
// credential and no role. It returns false for a name that an administrator disabled.
func (u *User) Unused() bool {
	return u.Claimed && !u.Registered() && len(u.Bindings) == 0 && !u.Disabled
}

// invalidateTokens invalidates all tokens that the principal has got so far. It increments Epoch and sets Since to the
// present time. The caller must store the record.
func (u *User) invalidateTokens(tx *store.Tx) {
	u.Epoch++
	u.Since = tx.Now()
}

// Missing returns the NotFound error for a principal that does not exist.
func Missing(id cloud.UserID) *fault.Fault { return fault.New(fault.NotFound, "no user %s", id) }

// Find returns the principal with the given ID, or NotFound.
func Find(r store.Reader, id cloud.UserID) (*User, error) {
	u, err := Users.Get(r, string(id))
	if err == nil && u == nil {
		err = Missing(id)
	}
	return u, err
}

// Create creates a user without a credential or role. The parameter home is the org that the user belongs to, or "".
// The parameter open is true if an unauthenticated caller registers the name.
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

// add stores a new principal, or returns AlreadyExists. If a user with the same ID was deleted before, the epoch of the
// new user is one higher than that of the deleted user.
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

// Change applies the function f to the record of a principal, and stores the changed record. It returns NotFound if the
// principal does not exist. If f returns an error, Change returns that error and stores nothing.
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

// checkIsUser returns FailedPrecondition if the principal u is a service account. Functions that accept only users call
// it.
func checkIsUser(u *User) error {
	if u.Account != nil {
		return fault.New(fault.FailedPrecondition, "%s is a service account of project %s: it is created and deleted there", u.ID, u.Account.Tenant.Project)
	}
	return nil
}

// Rename changes the display name of a user. It returns FailedPrecondition for a service account, whose name is part of
// its username.
func Rename(tx *store.Tx, id cloud.UserID, name string) (*User, error) {
	if err := tenant.CheckName("name", name); err != nil {
		return nil, err
	}
	return Change(tx, id, func(u *User) error {
		if err := checkIsUser(u); err != nil {
			return err
		}
		u.Name = name
		return nil
	})
}

// SetPassword sets a user's password, and revokes all tokens that the user has got so far.
func SetPassword(tx *store.Tx, id cloud.UserID, h password.Hash) (*User, error) {
	return Change(tx, id, func(u *User) error {
		if err := checkIsUser(u); err != nil {
			return err
		}
		u.Password = &h
		u.invalidateTokens(tx)
		return nil
	})
}

// Revoke revokes all tokens of a principal.
func Revoke(tx *store.Tx, id cloud.UserID) (*User, error) {
	return Change(tx, id, func(u *User) error { u.invalidateTokens(tx); return nil })
}

// SetDisabled disables or enables a user. Disabling revokes all tokens.
func SetDisabled(tx *store.Tx, id cloud.UserID, disabled bool) (*User, error) {
	return Change(tx, id, func(u *User) error {
		if err := checkIsUser(u); err != nil {
			return err
		}
		if u.ID == Admin && disabled {
			return fault.New(fault.FailedPrecondition, "%s cannot be disabled: nobody else could enable it again", Admin)
		}
		if disabled && !u.Disabled {
			u.invalidateTokens(tx)
		}
		u.Disabled = disabled
		return nil
	})
}

// Delete removes a user with its credentials and roles. If the user had a credential, Delete also marks the open
// invitations to the user name as declined. It returns FailedPrecondition for Admin and for a service account.
func Delete(tx *store.Tx, id cloud.UserID) error {
	u, err := Change(tx, id, func(u *User) error {
		if u.ID == Admin {
			return fault.New(fault.FailedPrecondition, "%s cannot be deleted: nobody else could create it again", Admin)
		}
		return checkIsUser(u)
	})
	if err != nil {
		return err
	}
	return remove(tx, u)
}

// remove deletes the record of a principal and the index entries of its external identities. For a user, it stores the
// epoch in the table retired.
func remove(tx *store.Tx, u *User) error {
	for _, i := range u.Identities {
		linked.Delete(tx, i.key()...)
	}
	for _, g := range u.Groups {
		groupMembers.Delete(tx, append(g.path(), string(u.ID))...)
	}
	if u.Account == nil { // account IDs are random and never reused
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

// key returns the key of the identity i in the table linked.
func (i Identity) key() []string {
	sum := sha256.Sum256([]byte(i.Issuer + "\x00" + i.Subject))
	return []string{i.Provider, hex.EncodeToString(sum[:])}
}

// Link adds an external identity as a credential of a user. An identity can be linked with one user only.
func Link(tx *store.Tx, id cloud.UserID, i Identity) (*User, error) {
	if i.Subject == "" || len(i.Subject) > maxSubject {
		return nil, fault.Invalid("identity.subject", "must be 1 to %d bytes", maxSubject)
	}
	return Change(tx, id, func(u *User) error {
		if err := checkIsUser(u); err != nil {
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

// Unlink removes an external identity from a user. It also revokes all tokens of the user, because some of them may
// have been issued for this identity.
func Unlink(tx *store.Tx, id cloud.UserID, i Identity) (*User, error) {
	return Change(tx, id, func(u *User) error {
		at := slices.IndexFunc(u.Identities, func(had Identity) bool { return had.Provider == i.Provider && had.Subject == i.Subject })
		if at < 0 {
			return fault.New(fault.NotFound, "user %s has no such identity at %s", id, i.Provider)
		}
		linked.Delete(tx, u.Identities[at].key()...)
		u.Identities = slices.Delete(u.Identities, at, at+1)
		u.invalidateTokens(tx)
		return nil
	})
}

// Linked returns the ID of the user with whom an external identity is linked, or "".
func Linked(r store.Reader, i Identity) (cloud.UserID, error) {
	id, err := linked.Get(r, i.key()...)
	if err != nil || id == nil {
		return "", err
	}
	return *id, nil
}
