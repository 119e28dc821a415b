package users

import (
	"encoding/base64"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Hashing is slow on purpose (bcrypt; some 50 ms at the default cost, twice that with each step more). HashAdd,
// HashChange and CheckPassword do it: the caller limits how many run at once, and calls them before it proposes.

// The cost of new hashes.
const (
	DefaultCost = bcrypt.DefaultCost
	MinCost     = bcrypt.MinCost
	MaxCost     = 16 // some 5 s; a hash that a client brings is refused above it, too
)

// errNoPasswordUser has no code of its own in etcd, nor a text in rpctypes.
var errNoPasswordUser = status.Error(codes.Unknown, "auth: authentication failed, password was given for no password user")

var errUnhashed = errors.New("HashAdd or HashChange must come first")

// HashAdd replaces the password of a new user by its hash, unless the user is to have none. A password of more than 72
// bytes is refused. A hash that the client gave is not taken.
func HashAdd(r *pb.AuthUserAddRequest, cost int) (err error) {
	if r.Options.GetNoPassword() {
		r.Password, r.HashedPassword = "", ""
		return nil
	}
	r.HashedPassword, err = hash(r.Password, cost)
	r.Password = ""
	return err
}

// HashChange replaces a new password by its hash. Without a password, a bcrypt hash (in base64) that the client gave
// stays, as in etcd: this is how hashes are taken over from elsewhere.
func HashChange(r *pb.AuthUserChangePasswordRequest, cost int) (err error) {
	if r.Password == "" {
		return nil
	}
	r.HashedPassword, err = hash(r.Password, cost)
	r.Password = ""
	return err
}

func hash(password string, cost int) (string, error) {
	h, err := bcrypt.GenerateFromPassword([]byte(password), cost)
	if err != nil {
		return "", status.Error(codes.Unknown, err.Error())
	}
	return base64.StdEncoding.EncodeToString(h), nil
}

func isHash(hash []byte) bool {
	cost, err := bcrypt.Cost(hash)
	return err == nil && cost <= MaxCost
}

// nobody is compared with when there is no such user, so that the answer takes as long: of cost DefaultCost, of nothing
// known.
const nobody = "$2a$10$7EqJtq98hPqEX7fNZaFWoOhi5lsYbGZ6gI2cRjYzqfTq5JkPZ4bZC"

// CheckPassword proves a password, slowly. Its errors are ErrGRPCAuthNotEnabled, ErrGRPCAuthFailed and etcd's text for a
// user without password. The state should be the newest: whoever has just been given a password uses it next.
func (s *State) CheckPassword(name, password string) error {
	if !s.enabled {
		return rpctypes.ErrGRPCAuthNotEnabled
	}
	u := s.users[name]
	known, stored := u != nil, []byte(nobody)
	if known {
		if u.Options.GetNoPassword() {
			return errNoPasswordUser
		}
		stored = u.Password
	}
	if bcrypt.CompareHashAndPassword(stored, []byte(password)) != nil || !known {
		return rpctypes.ErrGRPCAuthFailed
	}
	return nil
}

// Authenticate is CheckPassword and a token that proves it.
func (s *State) Authenticate(r *pb.AuthenticateRequest, t *Tokens, now Time) (*pb.AuthenticateResponse, error) {
	if err := s.CheckPassword(r.Name, r.Password); err != nil {
		return nil, err
	}
	return &pb.AuthenticateResponse{Token: t.Issue(r.Name, s.revision, now)}, nil
}
