// Package users implements etcd's Auth for one keyspace: users, roles, permissions, passwords and tokens, as values and
// functions without side effects. A State is decoded from the keyspace's records. An admin request on a State returns
// the steps of a program that changes the records; a check on a State returns nil or the error for the client.
//
// The package must not depend on how requests arrive, who proposes or when: it uses no gRPC server, no consensus and no
// clock (the caller passes the time).
//
// # Semantics
//
// The rules and the error texts are etcd's (server/auth of v3.7). A program that was checked with a State must carry
// the epoch of the records that the State was loaded from. If the records have changed, the engine refuses the program,
// and the caller repeats the check. So a check never returns "revision of auth store is old"; only tokens can be
// outdated.
//
// # Decisions
//
//   - Members do not store tokens. A token contains user, auth revision, expiry and a MAC with a key that every member
//     derives. As with etcd's simple tokens, a password change or the user's deletion revokes the user's tokens, and
//     disabling auth revokes all tokens. Other changes, such as a grant, revoke no tokens. Otherwise every client would
//     have to authenticate again, and the members would have to hash every password again. The lifetime of a token
//     begins when it is issued; its use does not extend it. A request with an expired token fails with "invalid auth
//     token". clientv3 then requests a new token by itself, except for a further watch on an existing stream. So the
//     server of a stream verifies the token only once (Open), and passes the resulting Claim to Accept for every
//     request. The stream remains authenticated until that token is revoked.
//   - An empty state has revision 1, as in etcd. Enabling does not increment the revision; all other changes do.
//   - Granting a permission replaces the role's permission on the same range, if any. etcd compares only the first of
//     several permissions that begin at the same key, and may keep both.
//   - A role that does not exist is treated as a role without permissions.
//   - Numbers and sizes are limited (see the constants), because the state is in memory, and loaded again after each
//     change.
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

// Limits of users and roles that etcd does not have.
const (
	MaxNameBytes   = 1 << 10   // bytes in a user's or role's name
	MaxUsers       = 5_000     // users in a keyspace; so few that one program can revoke a role from all of them
	MaxRoles       = 5_000     // roles in a keyspace
	MaxRecordBytes = 512 << 10 // bytes of a role with its permissions, or of a user with the names of its roles
)

// Root is the name of the administrator, and of the role that may do everything.
const Root = "root"

// Prefix is the prefix of the names of all records of this package.
const Prefix = "auth/"

const (
	recordSettings = Prefix + "settings"
	prefixUser     = Prefix + "user/"
	prefixRole     = Prefix + "role/"
)

// ErrUnknownFormat is returned for records that a newer version of Trivet wrote.
var ErrUnknownFormat = errors.New("unknown format")

var errCorrupt = errors.New("corrupt record")

// State holds users, roles and permissions. It is immutable and safe for concurrent use.
type State struct {
	settings
	users map[string]*user
	roles map[string]*authpb.Role
}

type settings struct {
	enabled    bool
	revision   uint64
	disabledAt uint64 // auth revision at which auth was last disabled; tokens of older revisions are invalid
}

// user holds a user's record and the permissions of the user's roles.
type user struct {
	*authpb.User
	tokensSince uint64 // auth revision of the user's creation or last password change; older tokens are invalid
	grants      *grants
}

// Load decodes the state from the keyspace's records. It skips records whose names do not begin with Prefix. Without
// records it returns the state of a new keyspace. It returns ErrUnknownFormat for records of a newer version of Trivet,
// and an error for a record that cannot be decoded.
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
		if u.tokensSince, err = decodeUser(value, u.User); err == nil {
			err = checkRecordName(u.User.Name, name[len(prefixUser):])
		}
		s.users[string(u.User.Name)] = u
	case strings.HasPrefix(name, prefixRole):
		r := &authpb.Role{}
		if err = decodeRole(value, r); err == nil {
			err = checkRecordName(r.Name, name[len(prefixRole):])
		}
		s.roles[string(r.Name)] = r
	case strings.HasPrefix(name, Prefix):
		return ErrUnknownFormat
	}
	return err
}

func checkRecordName(name []byte, want string) error {
	if string(name) != want {
		return fmt.Errorf("the record holds %q: %w", name, errCorrupt)
	}
	return nil
}

// Enabled reports whether auth is enabled.
func (s *State) Enabled() bool { return s.enabled }

// Revision returns the auth revision. It starts at 1 and grows by one with each change except enabling auth.
func (s *State) Revision() uint64 { return s.revision }

// Users returns all users sorted by name, with their password hashes. The caller must not change them.
func (s *State) Users() []*authpb.User {
	all := make([]*authpb.User, 0, len(s.users))
	for _, name := range slices.Sorted(maps.Keys(s.users)) {
		all = append(all, s.users[name].User)
	}
	return all
}

// Roles returns all roles sorted by name. The caller must not change them.
func (s *State) Roles() []*authpb.Role {
	all := make([]*authpb.Role, 0, len(s.roles))
	for _, name := range slices.Sorted(maps.Keys(s.roles)) {
		all = append(all, s.roles[name])
	}
	return all
}

// format is the version of the encoding, and the first byte of every record's value.
const format = 1

func stripFormat(b []byte) ([]byte, error) {
	switch {
	case len(b) == 0:
		return nil, errCorrupt
	case b[0] != format:
		return nil, fmt.Errorf("format %d, this program knows %d: %w", b[0], format, ErrUnknownFormat)
	}
	return b[1:], nil
}

func readUvarint(b []byte) (uint64, []byte, error) {
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
	return binary.AppendUvarint(binary.AppendUvarint(b, s.revision), s.disabledAt)
}

func decodeSettings(b []byte) (s settings, err error) {
	if b, err = stripFormat(b); err != nil {
		return settings{}, err
	}
	if len(b) == 0 || b[0] > 1 {
		return settings{}, errCorrupt
	}
	s.enabled = b[0] == 1
	if s.revision, b, err = readUvarint(b[1:]); err != nil {
		return settings{}, err
	}
	if s.disabledAt, b, err = readUvarint(b); err != nil {
		return settings{}, err
	}
	if len(b) > 0 || s.revision == 0 || s.disabledAt > s.revision {
		return settings{}, errCorrupt
	}
	return s, nil
}

func encodeUser(u *authpb.User, tokensSince uint64) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.MarshalAppend(binary.AppendUvarint([]byte{format}, tokensSince), u)
}

func decodeUser(b []byte, u *authpb.User) (tokensSince uint64, err error) {
	if b, err = stripFormat(b); err != nil {
		return 0, err
	}
	if tokensSince, b, err = readUvarint(b); err != nil {
		return 0, err
	}
	return tokensSince, decode(b, u)
}

func encodeRole(r *authpb.Role) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.MarshalAppend([]byte{format}, r)
}

func decodeRole(b []byte, r *authpb.Role) (err error) {
	if b, err = stripFormat(b); err != nil {
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
