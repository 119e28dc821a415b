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

// Hashing a password is slow on purpose (bcrypt): it takes about 50 ms at the default cost, and twice as long with each
// increment of the cost. HashAdd, HashChange and CheckPassword compute a hash. The caller must limit how many of these
// calls run concurrently, and must call them before it proposes the change.

// bcrypt costs of new password hashes.
const (
	DefaultCost = bcrypt.DefaultCost
	MinCost     = bcrypt.MinCost
	MaxCost     = 16 // about 5 s; more expensive hashes from clients are refused, too
)

// errNoPasswordUser has etcd's text. Package rpctypes does not contain this error, for which etcd defines no gRPC code.
var errNoPasswordUser = status.Error(codes.Unknown, "auth: authentication failed, password was given for no password user")

var errNotHashed = errors.New("call HashAdd or HashChange first")

// HashAdd replaces the password of a new user by its hash. It ignores a hash that the request contains. For a user with
// the option NoPassword, it clears password and hash. It returns an error for a password of more than 72 bytes.
func HashAdd(r *pb.AuthUserAddRequest, cost int) (err error) {
	if r.Options.GetNoPassword() {
		r.Password, r.HashedPassword = "", ""
		return nil
	}
	r.HashedPassword, err = hash(r.Password, cost)
	r.Password = ""
	return err
}

// HashChange replaces the new password in the request by its hash. If the request has no password, its bcrypt hash (in
// base64) is kept, as in etcd. So hashes can be imported from other systems.
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

// unknownUserHash is the hash that CheckPassword uses for unknown users, so that the response takes as long as for a
// known user. It has cost DefaultCost, and no known password.
const unknownUserHash = "$2a$10$7EqJtq98hPqEX7fNZaFWoOhi5lsYbGZ6gI2cRjYzqfTq5JkPZ4bZC"

// CheckPassword checks a user's password, which is slow. It returns ErrGRPCAuthNotEnabled, ErrGRPCAuthFailed, or an
// error with etcd's text for a user without a password. The state s should be the newest one, since clients often use a
// new password at once.
func (s *State) CheckPassword(name, password string) error {
	if !s.enabled {
		return rpctypes.ErrGRPCAuthNotEnabled
	}
	u := s.users[name]
	known, stored := u != nil, []byte(unknownUserHash)
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

// Authenticate checks the password in r with CheckPassword, and returns a token for the user.
func (s *State) Authenticate(r *pb.AuthenticateRequest, t *Tokens, now Time) (*pb.AuthenticateResponse, error) {
	if err := s.CheckPassword(r.Name, r.Password); err != nil {
		return nil, err
	}
	return &pb.AuthenticateResponse{Token: t.Issue(r.Name, s.revision, now)}, nil
}
