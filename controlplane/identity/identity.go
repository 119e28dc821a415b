// Package identity knows users, their credentials and roles, and the tokens that say who they are.
//
// What makes the law's token endpoint safe (it checks no password) is that a token says how its holder was proven, and
// one whose holder proved nothing can do nothing: package auth refuses it everywhere. Roles are never in a token; they
// are read from the bindings as they are when the token is used, so taking one away acts within a second on every
// member.
//
// Decisions of this version, until the rest of identity is there:
//   - Orgs and projects come to be with the first role bound in them; a project's id is unique in the cloud.
//   - A user's tokens die when their password is set: a token carries the count of settings that it was proven under
//     (its epoch), and one of another count is refused. No clock has a say in it.
//   - A token that names a project which is not in the org that it names acts nowhere.
//   - The administrator's tokens are signed by a key that follows from the cluster key, so whoever holds that can make
//     one without a running member: `trivet-controlplane admin-token`.
package identity

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"unicode"

	"github.com/trivet-cloud/trivet/controlplane/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/lead"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// DefaultTenant is there from the first boot.
var DefaultTenant = cloud.Tenant{Org: "default", Project: "default"}

// Admin is the user that is there from the first boot.
const Admin cloud.UserID = "admin"

// User is a name, perhaps with a credential and roles.
type User struct {
	ID        cloud.UserID
	Name      string
	Bindings  []cloud.Binding
	Password  *hash
	CreatedAt cloud.Time
	// Epoch counts the settings of the password: a token proven under another count is no longer valid.
	Epoch uint64
	// Since cuts the tokens that were made without looking at the record: one made before it is no longer valid.
	Since cloud.Time
}

// Registered reports whether a credential is there to prove the user by.
func (u *User) Registered() bool { return u.Password != nil || u.ID == Admin }

type project struct{ Org cloud.OrgID }

type born struct{ At cloud.Time }

var (
	users    = store.NewTable[User]("user")
	projects = store.NewTable[project]("project")
	births   = store.NewTable[born]("born")
)

// Options of the service. All but Dev are required.
type Options struct {
	Store    *store.Store
	Commands *lead.Commands
	Key      *clusterkey.Key
	Log      *slog.Logger
	// Dev lets holders who proved nothing act as project:admin of DefaultTenant.
	Dev bool
}

// Service is the identity service of one member.
type Service struct {
	opts    Options
	hostKey ed25519.PrivateKey
	keys    sync.Map // kid -> *signingKey
	misses  throttle
	// hashing bounds how many passwords are tried at once, since each takes memory, and queue how many wait for that.
	hashing, queue chan struct{}

	createUser  func(context.Context, newUser) (User, error)
	setPassword func(context.Context, newPassword) (struct{}, error)
	bind        func(context.Context, bindChange) (struct{}, error)
}

// New makes the service and adds its commands.
func New(opts Options) *Service {
	s := &Service{
		opts: opts, hostKey: ed25519.NewKeyFromSeed(opts.Key.Derive("host-token")),
		hashing: make(chan struct{}, maxHashing), queue: make(chan struct{}, maxQueue), misses: throttle{names: map[attempt]*count{}},
	}
	s.createUser = lead.Handle(opts.Commands, "identity.create-user", lead.Once, s.doCreateUser)
	s.setPassword = lead.Handle(opts.Commands, "identity.set-password", lead.Repeatable, s.doSetPassword)
	s.bind = lead.Handle(opts.Commands, "identity.bind", lead.Repeatable, s.doBind)
	return s
}

// Bootstrap makes what must be there from the first boot. It is a leader's task; only the first run does anything.
func (s *Service) Bootstrap(ctx context.Context) error {
	key, err := newSigningKey(s.opts.Key)
	if err != nil {
		return err
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		if done, err := births.Has(tx, "born"); done || err != nil {
			return err
		}
		births.Put(tx, &born{At: tx.Now()}, "born")
		projects.Put(tx, &project{Org: DefaultTenant.Org}, string(DefaultTenant.Project))
		users.Put(tx, &User{
			ID: Admin, Name: "Administrator", Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}, CreatedAt: tx.Now(),
		}, string(Admin))
		key.record.CreatedAt = tx.Now()
		signingKeys.Put(tx, &key.record, key.record.ID)
		primaryKey.Put(tx, &key.record.ID, "primary")
		return nil
	})
	return err
}

type newUser struct {
	ID   cloud.UserID
	Name string
}

func (s *Service) doCreateUser(ctx context.Context, q newUser) (user User, err error) {
	if err := cloud.CheckCallerID("id", string(q.ID)); err != nil {
		return user, err
	}
	if len(q.Name) > 256 || strings.ContainsFunc(q.Name, unicode.IsControl) {
		return user, fault.Invalid("name", "at most 256 printable bytes")
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		if taken, err := users.Has(tx, string(q.ID)); err != nil {
			return err
		} else if taken {
			return fault.New(fault.AlreadyExists, "user %s exists", q.ID)
		}
		user = User{ID: q.ID, Name: q.Name, CreatedAt: tx.Now()}
		users.Put(tx, &user, string(q.ID))
		return nil
	})
	return user, err
}

type newPassword struct {
	User cloud.UserID
	Hash hash
}

func (s *Service) doSetPassword(ctx context.Context, q newPassword) (struct{}, error) {
	return struct{}{}, s.change(ctx, q.User, func(tx *store.Tx, u *User) error {
		u.Password = &q.Hash
		u.Epoch++
		u.Since = tx.Now()
		return nil
	})
}

type bindChange struct {
	User    cloud.UserID
	Binding cloud.Binding
	Remove  bool
}

func (s *Service) doBind(ctx context.Context, q bindChange) (struct{}, error) {
	return struct{}{}, s.change(ctx, q.User, func(tx *store.Tx, u *User) error {
		u.Bindings = slices.DeleteFunc(slices.Clone(u.Bindings), func(b cloud.Binding) bool { return b == q.Binding })
		if q.Remove {
			if u.ID == Admin && q.Binding.Role == cloud.SystemAdmin {
				return fault.New(fault.FailedPrecondition, "%s keeps %s: nobody could undo it", Admin, cloud.SystemAdmin)
			}
			return nil
		}
		if !u.Registered() {
			return fault.New(fault.FailedPrecondition, "user %s has no credential: set a password first", u.ID)
		}
		if len(u.Bindings) >= 256 {
			return fault.New(fault.ResourceExhausted, "user %s has 256 roles", u.ID)
		}
		u.Bindings = append(u.Bindings, q.Binding)
		return s.placeProject(tx, q.Binding)
	})
}

// OrgOf is the org of a project; empty while nobody has a role in it.
func OrgOf(r store.Reader, id cloud.ProjectID) (cloud.OrgID, error) {
	p, err := projects.Get(r, string(id))
	if err != nil || p == nil {
		return "", err
	}
	return p.Org, nil
}

// placeProject makes the project of a binding known, in one org only.
func (s *Service) placeProject(tx *store.Tx, b cloud.Binding) error {
	if b.Project == "" {
		return nil
	}
	p, err := projects.Get(tx, string(b.Project))
	switch {
	case err != nil:
		return err
	case p == nil:
		projects.Put(tx, &project{Org: b.Org}, string(b.Project))
	case p.Org != b.Org:
		return fault.New(fault.FailedPrecondition, "project %s is of another org", b.Project)
	}
	return nil
}

func (s *Service) change(ctx context.Context, id cloud.UserID, f func(*store.Tx, *User) error) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		u, err := users.Get(tx, string(id))
		if err != nil {
			return err
		}
		if u == nil {
			return fault.New(fault.NotFound, "no user %s", id)
		}
		if err := f(tx, u); err != nil {
			return err
		}
		users.Put(tx, u, string(id))
		return nil
	})
	return err
}

// user reads a user as they were at most a second ago; nil when there is none.
func (s *Service) user(ctx context.Context, id cloud.UserID) (u *User, err error) {
	err = s.opts.Store.Recent(ctx, staleness, func(v *store.View) error {
		u, err = users.Get(v, string(id))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read user: %w", err)
	}
	return u, nil
}

// get is one user, as new as every change acknowledged before.
func (s *Service) get(ctx context.Context, id string) (u *User, err error) {
	if err := cloud.CheckCallerID("id", id); err != nil {
		return nil, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if u, err = users.Get(v, id); err == nil && u == nil {
			err = fault.New(fault.NotFound, "no user %s", id)
		}
		return err
	})
	return u, err
}

// list is a page of users.
func (s *Service) list(ctx context.Context, size int32, token string) ([]*User, string, error) {
	all := func(*User) bool { return true }
	return store.Page(ctx, s.opts.Store, users, store.PageRequest{Size: size, Token: token, Query: "users"}, all)
}
