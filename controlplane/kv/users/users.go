// Package users is etcd's Auth for one keyspace: users, roles, permissions, passwords and tokens, as values and pure
// functions. A State is what the keyspace's records say; an admin's request becomes the steps of a program that changes
// the records; a check is a question to a State.
//
// It must not know how requests arrive, who proposes or when: no gRPC server, no consensus, no clock (times are handed in).
//
// # Semantics
//
// They are etcd's (server/auth of v3.7), with its error texts. Whoever proposes what a State permitted gives the program
// the epoch of the records that the State was loaded from: when they have changed, the engine refuses it and the check is
// made again. So a check never answers "revision of auth store is old"; only what outlives a State can be old.
//
// # Choices
//
//   - Tokens are stateless: user, auth revision, expiry and a MAC by a key that every member derives. As with etcd's simple
//     tokens a password change or the user's deletion voids them, and disabling auth voids all; other changes do not, so
//     one grant does not make every client hash its password again. They live from when they were issued, not from
//     their last use. An expired one is "invalid auth token": clientv3 then renews by itself, but for a further watch on
//     a stream that it has. So whoever serves a stream opens its token once and keeps the Claim, for which Accept is
//     asked again and again: a stream is as good as the token that it began with was, until that is void.
//   - An empty state is revision 1, as in etcd. Enabling does not raise the revision; all other changes do.
//   - Granting a permission that the role has on the same range replaces it, wherever it stands. etcd compares only the
//     first of several permissions that begin at the same key and may keep both.
//   - A role that is not there is the same as one without permissions.
//   - Numbers and sizes are bounded (see the constants): all of it is in memory, and is read anew after each change.
package users

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/authpb"
	"google.golang.org/protobuf/proto"
)

// Bounds that etcd does not have.
const (
	MaxNameBytes   = 1 << 10   // of a user's or role's name
	MaxUsers       = 5_000     // so that one program can take a role from all of them
	MaxRoles       = 5_000     //
	MaxRecordBytes = 512 << 10 // of a role with its permissions, a user with its roles' names
)

// Root is the user that administrates, and the role that may do everything.
const Root = "root"

// Prefix is what the names of all records of this package begin with.
const Prefix = "auth/"

const (
	recordSettings = Prefix + "settings"
	prefixUser     = Prefix + "user/"
	prefixRole     = Prefix + "role/"
)

// ErrUnknownFormat is of records that a newer program wrote.
var ErrUnknownFormat = errors.New("unknown format")

var errCorrupt = errors.New("corrupt record")

// State is who may do what. It does not change and may be used from several goroutines.
type State struct {
	settings
	users map[string]*user
	roles map[string]*authpb.Role
}

type settings struct {
	enabled  bool
	revision uint64
	voided   uint64 // tokens of older revisions are void: when auth was last disabled
}

// user is a user's record, and what its roles come to.
type user struct {
	*authpb.User
	since  uint64 // tokens of older revisions are void: when the user was added or got another password
	grants *grants
}

// Load makes the state of the keyspace's records whose names begin with Prefix; others are skipped. No record at all is
// the state of a new keyspace. It fails with ErrUnknownFormat, or when a record cannot be read.
func Load(records iter.Seq2[[]byte, []byte]) (*State, error) {
	s := &State{settings: settings{revision: 1}, users: map[string]*user{}, roles: map[string]*authpb.Role{}}
	for name, value := range records {
		if err := s.load(string(name), value); err != nil {
			return nil, fmt.Errorf("read record %s: %w", name, err)
		}
	}
	for _, u := range s.users {
		u.grants = &grants{user: u.User, roles: s.roles}
	}
	return s, nil
}

func (s *State) load(name string, value []byte) (err error) {
	switch {
	case name == recordSettings:
		s.settings, err = decodeSettings(value)
	case strings.HasPrefix(name, prefixUser):
		u := &user{User: &authpb.User{}}
		if u.since, err = decodeUser(value, u.User); err == nil {
			err = named(u.User.Name, name[len(prefixUser):])
		}
		s.users[string(u.User.Name)] = u
	case strings.HasPrefix(name, prefixRole):
		r := &authpb.Role{}
		if err = decodeRole(value, r); err == nil {
			err = named(r.Name, name[len(prefixRole):])
		}
		s.roles[string(r.Name)] = r
	case strings.HasPrefix(name, Prefix):
		return ErrUnknownFormat
	}
	return err
}

func named(is []byte, want string) error {
	if string(is) != want {
		return fmt.Errorf("it is of %q: %w", is, errCorrupt)
	}
	return nil
}

// Enabled says whether anybody is asked who they are.
func (s *State) Enabled() bool { return s.enabled }

// Revision is the auth revision: from 1, one more with each change but that auth was enabled.
func (s *State) Revision() uint64 { return s.revision }

// Users are all users by name, with their passwords' hashes. They are not to be changed.
func (s *State) Users() []*authpb.User {
	all := make([]*authpb.User, 0, len(s.users))
	for _, name := range slices.Sorted(maps.Keys(s.users)) {
		all = append(all, s.users[name].User)
	}
	return all
}

// Roles are all roles by name. They are not to be changed.
func (s *State) Roles() []*authpb.Role {
	all := make([]*authpb.Role, 0, len(s.roles))
	for _, name := range slices.Sorted(maps.Keys(s.roles)) {
		all = append(all, s.roles[name])
	}
	return all
}

// Every record begins with its format.
const format = 1

func header(b []byte) ([]byte, error) {
	switch {
	case len(b) == 0:
		return nil, errCorrupt
	case b[0] != format:
		return nil, fmt.Errorf("format %d, this program knows %d: %w", b[0], format, ErrUnknownFormat)
	}
	return b[1:], nil
}

func number(b []byte) (uint64, []byte, error) {
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, errCorrupt
	}
	return v, b[n:], nil
}

func (s settings) encode() []byte {
	b := []byte{format, 0}
	if s.enabled {
		b[1] = 1
	}
	return binary.AppendUvarint(binary.AppendUvarint(b, s.revision), s.voided)
}

func decodeSettings(b []byte) (s settings, err error) {
	if b, err = header(b); err != nil {
		return settings{}, err
	}
	if len(b) == 0 || b[0] > 1 {
		return settings{}, errCorrupt
	}
	s.enabled = b[0] == 1
	if s.revision, b, err = number(b[1:]); err != nil {
		return settings{}, err
	}
	if s.voided, b, err = number(b); err != nil {
		return settings{}, err
	}
	if len(b) > 0 || s.revision == 0 || s.voided > s.revision {
		return settings{}, errCorrupt
	}
	return s, nil
}

func encodeUser(u *authpb.User, since uint64) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.MarshalAppend(binary.AppendUvarint([]byte{format}, since), u)
}

func decodeUser(b []byte, u *authpb.User) (since uint64, err error) {
	if b, err = header(b); err != nil {
		return 0, err
	}
	if since, b, err = number(b); err != nil {
		return 0, err
	}
	return since, decode(b, u)
}

func encodeRole(r *authpb.Role) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.MarshalAppend([]byte{format}, r)
}

func decodeRole(b []byte, r *authpb.Role) (err error) {
	if b, err = header(b); err != nil {
		return err
	}
	return decode(b, r)
}

func decode(b []byte, m proto.Message) error {
	if err := proto.Unmarshal(bytes.Clone(b), m); err != nil {
		return fmt.Errorf("%w: %w", errCorrupt, err)
	}
	return nil
}
