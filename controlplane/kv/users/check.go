package users

import (
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// The checks answer nil, or the error that the client is to see: ErrGRPCUserEmpty when user is empty, else
// ErrGRPCPermissionDenied. All of them are nil while auth is not enabled. An end is as in requests: none for the one
// key, {0} for all from key on.

// LeaseKeys lists the keys attached to a lease: none when there is no such lease.
type LeaseKeys func(lease int64) ([][]byte, error)

// CanRange permits reading, watching and comparing.
func (s *State) CanRange(user string, key, end []byte) error {
	return s.permit(user, func(g *grants) bool { return g.mayRead(spanOf(key, end)) })
}

// CanPut permits writing a key.
func (s *State) CanPut(user string, key []byte) error {
	return s.permit(user, func(g *grants) bool { return g.mayWrite(spanOf(key, nil)) })
}

// CanDelete permits removing.
func (s *State) CanDelete(user string, key, end []byte) error {
	return s.permit(user, func(g *grants) bool { return g.mayWrite(spanOf(key, end)) })
}

func (s *State) permit(name string, may func(*grants) bool) error {
	if !s.enabled {
		return nil
	}
	if name == "" {
		return rpctypes.ErrGRPCUserEmpty
	}
	u := s.users[name]
	if u == nil || !u.isRoot() && !may(u.grants) {
		return rpctypes.ErrGRPCPermissionDenied
	}
	return nil
}

// isRoot says whether the user has the role root, which may do everything.
func (u *user) isRoot() bool { return slices.Contains(u.Roles, Root) }

// CanPutRequest permits a put: with prev_kv the key must be readable, with a lease all keys attached to it writable, for
// whoever could not end the lease shall not tie a key to it.
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

// CanDeleteRequest permits a delete: with prev_kv the range must be readable too.
func (s *State) CanDeleteRequest(user string, r *pb.DeleteRangeRequest) error {
	if err := s.CanDelete(user, r.Key, r.RangeEnd); err != nil || !r.PrevKv {
		return err
	}
	return s.CanRange(user, r.Key, r.RangeEnd)
}

// CanTxn permits a transaction when all of it is permitted, compares and both branches, at every depth. How deep it may
// be is the caller's to limit.
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

// CanWriteLease permits attaching keys to a lease, keeping it alive and ending it: all its keys must be writable. Lease 0
// is no lease.
func (s *State) CanWriteLease(user string, lease int64, keys LeaseKeys) error {
	return s.canLease(user, lease, keys, (*State).CanPut)
}

// CanReadLease permits seeing a lease: all its keys must be readable.
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

// MustBeKnown permits what any user may: granting a lease, reading alarms and the status.
func (s *State) MustBeKnown(user string) error {
	if s.enabled && user == "" {
		return rpctypes.ErrGRPCUserEmpty
	}
	return nil
}

// CanAdmin permits administration, to users with the role root. An unknown user is ErrGRPCUserNotFound.
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

// CanGetUser permits UserGet: to administrators, and to everybody for themselves.
func (s *State) CanGetUser(user string, r *pb.AuthUserGetRequest) error {
	if err := s.CanAdmin(user); err != nil && r.Name != user {
		return err
	}
	return nil
}

// CanGetRole permits RoleGet: to administrators, and to those who have the role.
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
