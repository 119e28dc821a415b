package users

import (
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// The methods Can… and MustBeAuthenticated check a permission of a user. They return nil if the user has the
// permission, or if auth is not enabled. Otherwise they return the error for the client: ErrGRPCUserEmpty if the user's
// name is empty, and ErrGRPCPermissionDenied in all cases that a method's comment does not describe otherwise. The end
// of a key range is encoded as in requests: it is empty for a single key, and {0} for all keys from the first one on.

// LeaseKeys returns the keys attached to a lease, or none if the lease does not exist.
type LeaseKeys func(lease int64) ([][]byte, error)

// CanRange checks the permission to read, watch and compare the keys in [key, end).
func (s *State) CanRange(user string, key, end []byte) error {
	return s.checkPermission(user, func(g *grants) bool { return g.mayRead(spanOf(key, end)) })
}

// CanPut checks the permission to write a key.
func (s *State) CanPut(user string, key []byte) error {
	return s.checkPermission(user, func(g *grants) bool { return g.mayWrite(spanOf(key, nil)) })
}

// CanDelete checks the permission to delete the keys in [key, end).
func (s *State) CanDelete(user string, key, end []byte) error {
	return s.checkPermission(user, func(g *grants) bool { return g.mayWrite(spanOf(key, end)) })
}

func (s *State) checkPermission(name string, allowed func(*grants) bool) error {
	if !s.enabled {
		return nil
	}
	if name == "" {
		return rpctypes.ErrGRPCUserEmpty
	}
	u := s.users[name]
	if (u == nil || !u.isRoot() && !allowed(u.grants)) && !mutant.On(mutant.SkipPermissions) {
		return rpctypes.ErrGRPCPermissionDenied
	}
	return nil
}

// isRoot reports whether the user has the role root, which may do everything.
func (u *user) isRoot() bool { return slices.Contains(u.Roles, Root) }

// CanPutRequest checks the permissions for a put. The user must be allowed to write the key, and with prev_kv also to
// read it. With a lease, the user must be allowed to write all keys attached to that lease. Otherwise users could
// attach keys to a lease that they cannot revoke.
func (s *State) CanPutRequest(user string, r *pb.PutRequest, keys LeaseKeys) error {
	if err := s.CanPut(user, r.Key); err != nil {
		return err
	}
	if err := s.CanWriteLease(user, r.Lease, keys); err != nil {
		return err
	}
	if r.PrevKv {
		return s.CanRange(user, r.Key, nil)
	}
	return nil
}

// CanDeleteRequest checks the permission for a delete request. With prev_kv the range must also be readable.
func (s *State) CanDeleteRequest(user string, r *pb.DeleteRangeRequest) error {
	if err := s.CanDelete(user, r.Key, r.RangeEnd); err != nil || !r.PrevKv {
		return err
	}
	return s.CanRange(user, r.Key, r.RangeEnd)
}

// CanTxn checks the permissions for a transaction: for its compares and the operations of both branches, at every
// nesting level. The caller must limit the nesting depth.
func (s *State) CanTxn(user string, r *pb.TxnRequest, keys LeaseKeys) error {
	if !s.enabled {
		return nil
	}
	for _, c := range r.Compare {
		if err := s.CanRange(user, c.Key, c.RangeEnd); err != nil {
			return err
		}
	}
	for _, branch := range [][]*pb.RequestOp{r.Success, r.Failure} {
		for _, op := range branch {
			if err := s.canOp(user, op, keys); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *State) canOp(user string, op *pb.RequestOp, keys LeaseKeys) error {
	if r := op.GetRequestRange(); r != nil {
		return s.CanRange(user, r.Key, r.RangeEnd)
	}
	if r := op.GetRequestPut(); r != nil {
		return s.CanPutRequest(user, r, keys)
	}
	if r := op.GetRequestDeleteRange(); r != nil {
		return s.CanDeleteRequest(user, r)
	}
	if r := op.GetRequestTxn(); r != nil {
		return s.CanTxn(user, r, keys)
	}
	return nil
}

// CanWriteLease checks the permission to attach keys to a lease, to renew it and to revoke it. The user must be allowed
// to write all keys attached to the lease. Lease 0 means no lease; every user has permission then.
func (s *State) CanWriteLease(user string, lease int64, keys LeaseKeys) error {
	return s.canLease(user, lease, keys, (*State).CanPut)
}

// CanReadLease checks the permission to see a lease. The user must be allowed to read all keys attached to the lease.
func (s *State) CanReadLease(user string, lease int64, keys LeaseKeys) error {
	return s.canLease(user, lease, keys, func(s *State, user string, key []byte) error { return s.CanRange(user, key, nil) })
}

func (s *State) canLease(user string, lease int64, keys LeaseKeys, can func(*State, string, []byte) error) error {
	if lease == 0 || s.CanAdmin(user) == nil {
		return nil
	}
	attached, err := keys(lease)
	if err != nil {
		return err
	}
	for _, key := range attached {
		if err := can(s, user, key); err != nil {
			return err
		}
	}
	return nil
}

// MustBeAuthenticated checks that the request has a user. This is sufficient to grant a lease, and to read alarms and
// the status.
func (s *State) MustBeAuthenticated(user string) error {
	if s.enabled && user == "" {
		return rpctypes.ErrGRPCUserEmpty
	}
	return nil
}

// CanAdmin checks that the user has the role root. It returns ErrGRPCUserNotFound for an unknown user.
func (s *State) CanAdmin(user string) error {
	if !s.enabled {
		return nil
	}
	if user == "" {
		return rpctypes.ErrGRPCUserEmpty
	}
	u := s.users[user]
	if u == nil {
		return rpctypes.ErrGRPCUserNotFound
	}
	if !u.isRoot() {
		return rpctypes.ErrGRPCPermissionDenied
	}
	return nil
}

// CanGetUser checks the permission for UserGet: administrators may get every user, other users only themselves.
func (s *State) CanGetUser(user string, r *pb.AuthUserGetRequest) error {
	if err := s.CanAdmin(user); err != nil && r.Name != user {
		return err
	}
	return nil
}

// CanGetRole checks the permission for RoleGet: administrators may get every role, other users only roles that they
// have.
func (s *State) CanGetRole(user string, r *pb.AuthRoleGetRequest) error {
	if err := s.CanAdmin(user); err != nil && !s.hasRole(user, r.Role) {
		return err
	}
	return nil
}

func (s *State) hasRole(user, role string) bool {
	u := s.users[user]
	return u != nil && slices.Contains(u.Roles, role)
}
