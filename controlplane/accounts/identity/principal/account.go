package principal

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"encoding/base64"
	"regexp"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Account holds the fields of a principal that is a service account.
type Account struct {
	Tenant cloud.Tenant
	Name   string
	// Sealed is the secret, encrypted with the cluster key.
	Sealed    []byte
	CreatedBy string
	// Expires is 0 if the account does not expire.
	Expires cloud.Time `cbor:",omitempty"`
}

// accounts maps the project and the name of each service account to its ID: service-account/<project>/<name>.
var accounts = store.NewTable[cloud.UserID]("service-account")

// maxAccounts is the maximum number of service accounts of a project.
const maxAccounts = 1000

// Secret holds the ID and the secret of a new service account. Call NewSecret outside of transactions, because a
// transaction may run several times.
type Secret struct {
	ID     cloud.UserID
	Text   string
	Sealed []byte
}

// AccountPrefix is the prefix of the IDs of service accounts.
const AccountPrefix = "TV"

// NewSecret generates a random ID and secret, and encrypts the secret with the cluster key.
func NewSecret(key *clusterkey.Key) Secret {
	id := make([]byte, 10)
	rand.Read(id)
	return NewSecretFor(key, cloud.UserID(AccountPrefix+base32.StdEncoding.EncodeToString(id)))
}

// NewSecretFor is like NewSecret for the service account with the given ID.
func NewSecretFor(key *clusterkey.Key, id cloud.UserID) Secret {
	text := make([]byte, 30)
	rand.Read(text)
	s := Secret{ID: id, Text: base64.RawURLEncoding.EncodeToString(text)}
	s.Sealed = key.Seal(sealedName(s.ID), []byte(s.Text))
	return s
}

func sealedName(id cloud.UserID) string { return "service-account/" + string(id) }

// Open returns the decrypted secret of a service account.
func (u *User) Open(key *clusterkey.Key) ([]byte, error) {
	return key.Open(sealedName(u.ID), u.Account.Sealed)
}

// Expired reports whether the principal is a service account whose expiry has passed.
func (u *User) Expired(now cloud.Time) bool {
	return u.Account != nil && u.Account.Expires != 0 && now >= u.Account.Expires
}

// NewAccount holds the parameters of CreateAccount. ID and Sealed are from NewSecret; By is the principal who creates
// the account.
type NewAccount struct {
	Tenant  cloud.Tenant
	Name    string
	Roles   []cloud.Role
	Expires cloud.Time
	ID      cloud.UserID
	Sealed  []byte
	By      string
}

// Check returns InvalidArgument if the parameters are invalid.
func (n *NewAccount) Check(now cloud.Time) error {
	if err := cloud.CheckName("name", n.Name); err != nil {
		return err
	}
	if len(n.Roles) == 0 {
		return fault.Invalid("roles", "a service account needs a role")
	}
	if err := checkRoles(n.Roles); err != nil {
		return err
	}
	return checkExpiry(n.Expires, now)
}

func checkRoles(roles []cloud.Role) error {
	for i, role := range roles {
		if !strings.HasPrefix(string(role), "project:") || !slices.Contains(cloud.Roles(), role) {
			return fault.Invalid("roles", "%q is not a role in a project", role)
		}
		if slices.Contains(roles[:i], role) {
			return fault.Invalid("roles", "%q stands twice", role)
		}
	}
	return nil
}

func checkExpiry(expires, now cloud.Time) error {
	if expires != 0 && expires <= now {
		return fault.Invalid("expires_at", "is over already")
	}
	return nil
}

// CreateAccount creates a service account. It returns NotFound if the org or the project does not exist.
func CreateAccount(tx *store.Tx, n NewAccount) (*User, error) {
	if err := n.Check(tx.Now()); err != nil {
		return nil, err
	}
	at := cloud.Binding{Org: n.Tenant.Org, Project: n.Tenant.Project}
	if err := setIncarnation(tx, &at); err != nil {
		return nil, err
	}
	project := string(n.Tenant.Project)
	all, _, err := accounts.List(tx, 0, project)
	if err != nil {
		return nil, err
	}
	if len(all) >= maxAccounts {
		return nil, fault.New(fault.ResourceExhausted, "project %s has %d service accounts", project, maxAccounts)
	}
	if slices.ContainsFunc(all, func(r store.Record[cloud.UserID]) bool { return r.Path[1] == n.Name }) {
		return nil, fault.New(fault.AlreadyExists, "project %s has a service account called %s", project, n.Name)
	}
	u := &User{
		ID: n.ID, Name: n.Name,
		Account: &Account{Tenant: n.Tenant, Name: n.Name, Sealed: n.Sealed, CreatedBy: n.By, Expires: n.Expires},
	}
	u.Bindings = bindingsAt(at, n.Roles)
	if u, err = add(tx, u); err != nil {
		return nil, err
	}
	accounts.Put(tx, &u.ID, project, n.Name)
	return u, nil
}

// bindingsAt returns a binding of each role in the project of the binding at.
func bindingsAt(at cloud.Binding, roles []cloud.Role) (all []cloud.Binding) {
	for _, role := range roles {
		b := at
		b.Role = role
		all = append(all, b)
	}
	return all
}

// AccountChange holds the parameters of UpdateAccount.
type AccountChange struct {
	Tenant cloud.Tenant
	ID     cloud.UserID
	// Roles are all roles that the account has after the change. Empty means that the roles stay.
	Roles []cloud.Role
	// Expires is the new end of the account, where 0 means never. Nil means that the end stays.
	Expires *cloud.Time
	// Sealed is a new secret from NewSecretFor. Nil means that the secret stays.
	Sealed []byte
}

// Check returns InvalidArgument if the parameters are invalid.
func (c *AccountChange) Check(now cloud.Time) error {
	if err := checkRoles(c.Roles); err != nil || c.Expires == nil {
		return err
	}
	return checkExpiry(*c.Expires, now)
}

// UpdateAccount changes a service account of the project c.Tenant. A new secret invalidates the tokens that were issued
// with the old one. UpdateAccount returns NotFound if the account belongs to another project.
func UpdateAccount(tx *store.Tx, c AccountChange) (*User, error) {
	if err := c.Check(tx.Now()); err != nil {
		return nil, err
	}
	u, err := AccountOf(tx, c.Tenant, c.ID)
	if err != nil {
		return nil, err
	}
	if len(c.Roles) > 0 {
		at := cloud.Binding{Org: c.Tenant.Org, Project: c.Tenant.Project}
		if err := setIncarnation(tx, &at); err != nil {
			return nil, err
		}
		u.Bindings = bindingsAt(at, c.Roles)
	}
	if c.Expires != nil {
		u.Account.Expires = *c.Expires
	}
	if c.Sealed != nil {
		u.Account.Sealed = c.Sealed
		u.invalidateTokens(tx)
	}
	Users.Put(tx, u, string(u.ID))
	return u, nil
}

// accountName matches the name of a service account with its project, NAME@ORG/PROJECT. No ID contains a slash.
var accountName = regexp.MustCompile(`^([a-z][a-z0-9-]{0,62})@([^/]+)/([^/]+)$`)

// ParseAccountName splits the name of a service account with its project, such as ci@acme/web. It returns false for
// other texts, such as IDs.
func ParseAccountName(text string) (name string, t cloud.Tenant, ok bool) {
	m := accountName.FindStringSubmatch(text)
	if m == nil {
		return "", t, false
	}
	t, err := cloud.ParseTenant(m[2], m[3])
	return m[1], t, err == nil
}

// Username returns the name of the service account with its project, which ParseAccountName splits.
func (a *Account) Username() string { return a.Name + "@" + a.Tenant.String() }

// FindAccount returns the service account of the project t with a name, or nil.
func FindAccount(r store.Reader, t cloud.Tenant, name string) (*User, error) {
	id, err := accounts.Get(r, string(t.Project), name)
	if err != nil || id == nil {
		return nil, err
	}
	u, err := Users.Get(r, string(*id))
	if err != nil || u == nil || u.Account == nil || u.Account.Tenant != t {
		return nil, err
	}
	return u, nil
}

// AccountOf returns the service account of the project t with an ID. It returns NotFound if the account belongs to
// another project.
func AccountOf(r store.Reader, t cloud.Tenant, id cloud.UserID) (*User, error) {
	u, err := Users.Get(r, string(id))
	if err != nil {
		return nil, err
	}
	if u == nil || u.Account == nil || u.Account.Tenant != t {
		return nil, fault.New(fault.NotFound, "no service account %s", id)
	}
	return u, nil
}

// DeleteAccount deletes a service account that belongs to the project t. It returns NotFound if the account belongs to
// another project.
func DeleteAccount(tx *store.Tx, t cloud.Tenant, id cloud.UserID) error {
	u, err := AccountOf(tx, t, id)
	if err != nil {
		return err
	}
	accounts.Delete(tx, string(t.Project), u.Account.Name)
	return remove(tx, u)
}

// DeleteAccounts deletes all service accounts of a project that is being deleted.
func DeleteAccounts(tx *store.Tx, project cloud.ProjectID) error {
	all, _, err := accounts.List(tx, 0, string(project))
	if err != nil {
		return err
	}
	for _, r := range all {
		u, err := Users.Get(tx, string(*r.Value))
		if err != nil {
			return err
		}
		accounts.Delete(tx, r.Path...)
		if u != nil {
			if err := remove(tx, u); err != nil {
				return err
			}
		}
	}
	return nil
}

// Accounts returns a page of a project's service accounts, sorted by name.
func Accounts(ctx context.Context, s *store.Store, t cloud.Tenant, size int32, token string) (found []*User, next string, err error) {
	req := store.PageRequest{Size: size, Token: token, Query: "accounts\x00" + t.String()}
	ids, next, err := store.Page(ctx, s, accounts, req, func(*cloud.UserID) bool { return true }, string(t.Project))
	if err != nil {
		return nil, "", err
	}
	err = s.Local(func(v *store.View) error {
		for _, id := range ids {
			u, err := Users.Get(v, string(*id))
			if err != nil {
				return err
			}
			if u != nil && u.Account != nil && u.Account.Tenant == t {
				found = append(found, u)
			}
		}
		return nil
	})
	return found, next, err
}
