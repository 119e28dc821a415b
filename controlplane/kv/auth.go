package kv

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// administer executes an Auth request that changes users, roles or whether Auth is enabled. While Auth is enabled, the
// caller needs the role root. The function change returns the steps to propose and the response. The result header is
// the revision for the response's header.
func administer[Q, A any](
	ctx context.Context, s *Service, r Q, change func(*users.State, Q) ([]command.Step, A, error),
) (response A, header int64, err error) {
	p, err := s.linearizablePolicy(ctx)
	for err == nil {
		if err = s.authorizeWith(ctx, p, func(p *policy, user string) error { return p.users.CanAdmin(user) }); err != nil {
			p, err = s.newerPolicy(ctx, p, err)
			continue
		}
		var steps []command.Step
		if steps, response, err = change(p.users, r); err != nil || len(steps) == 0 {
			return response, s.opts.Engine.Revision(), err
		}
		var found command.Result
		if found, err = s.propose(ctx, p.epoch, steps); err != nil {
			break
		}
		if found.Refused != command.RefusedEpoch {
			return response, found.Revision, refusalError(&found)
		}
		p, err = s.localPolicy()
	}
	return response, 0, clientError(ctx, err)
}

// linearizablePolicy returns a policy that includes every change acknowledged before the call.
func (s *Service) linearizablePolicy(ctx context.Context) (*policy, error) {
	if err := s.opts.Consensus.ReadIndex(ctx); err != nil {
		return nil, clientError(ctx, err)
	}
	return s.localPolicy()
}

// inspect serves a read-only Auth request. It runs the permission check c and then returns the result of query. The
// users and roles that query gets include every change acknowledged before the call of inspect.
func inspect[A any](ctx context.Context, s *Service, c check, query func(*users.State) (A, error)) (response A, err error) {
	p, err := s.linearizablePolicy(ctx)
	if err != nil {
		return response, err
	}
	if err := s.authorizeWith(ctx, p, c); err != nil {
		return response, err
	}
	return query(p.users)
}

// Limits of password hashing, which is slow on purpose and which clients can request. At most maxHashing passwords are
// hashed concurrently, and at most maxQueue more requests wait. Each request waits for at most hashTimeout.
const (
	maxHashing  = 4
	maxQueue    = 256
	hashTimeout = 10 * time.Second
)

// hash runs f, which computes a slow password hash. At most maxHashing calls run f at the same time. hash fails with
// ErrGRPCRequestTooManyRequests if maxQueue calls are waiting already, or after it has waited for hashTimeout.
func (s *Service) hash(ctx context.Context, f func() error) error {
	select {
	case s.queue <- struct{}{}:
		defer func() { <-s.queue }()
	default:
		return rpctypes.ErrGRPCRequestTooManyRequests
	}
	timeout := time.NewTimer(hashTimeout)
	defer timeout.Stop()
	select {
	case s.hashing <- struct{}{}:
		defer func() { <-s.hashing }()
		return f()
	case <-timeout.C:
		return rpctypes.ErrGRPCRequestTooManyRequests
	case <-ctx.Done():
		return clientError(ctx, ctx.Err())
	}
}

func mustBeAdmin(p *policy, user string) error { return p.users.CanAdmin(user) }

// Authenticate checks a user's password and returns a token.
func (s *Service) Authenticate(ctx context.Context, r *pb.AuthenticateRequest) (*pb.AuthenticateResponse, error) {
	p, err := s.linearizablePolicy(ctx)
	if err != nil {
		return nil, err
	}
	var out *pb.AuthenticateResponse
	if err := s.hash(ctx, func() (err error) {
		out, err = p.users.Authenticate(r, s.opts.Tokens, s.opts.Now())
		return err
	}); err != nil {
		return nil, err
	}
	out.Header = s.Header()
	return out, nil
}

// AuthEnable enables etcd's Auth: from then on, requests need a user with permission. The user root must exist and have
// the role root.
func (s *Service) AuthEnable(ctx context.Context, r *pb.AuthEnableRequest) (*pb.AuthEnableResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).Enable)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// AuthDisable disables etcd's Auth, so that every caller may do everything. All tokens become permanently invalid.
func (s *Service) AuthDisable(ctx context.Context, r *pb.AuthDisableRequest) (*pb.AuthDisableResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).Disable)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// AuthStatus returns whether Auth is enabled, and the auth revision.
func (s *Service) AuthStatus(ctx context.Context, r *pb.AuthStatusRequest) (*pb.AuthStatusResponse, error) {
	out, err := inspect(ctx, s, nil, func(u *users.State) (*pb.AuthStatusResponse, error) { return u.Status(r) })
	if err != nil {
		return nil, err
	}
	out.Header = s.Header()
	return out, nil
}

// AuthEnabled reports whether Auth is enabled, according to this member's local data, which may be outdated.
func (s *Service) AuthEnabled() bool {
	p, err := s.currentPolicy()
	return err != nil || p.users.Enabled() // if Auth's settings cannot be read, assume that Auth is enabled
}

// UserAdd adds a user.
func (s *Service) UserAdd(ctx context.Context, r *pb.AuthUserAddRequest) (*pb.AuthUserAddResponse, error) {
	if err := s.authorize(ctx, mustBeAdmin); err != nil { // checked before the slow hash
		return nil, clientError(ctx, err)
	}
	if err := s.hash(ctx, func() error { return users.HashAdd(r, s.opts.BcryptCost) }); err != nil {
		return nil, err
	}
	out, revision, err := administer(ctx, s, r, (*users.State).UserAdd)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// UserDelete deletes a user.
func (s *Service) UserDelete(ctx context.Context, r *pb.AuthUserDeleteRequest) (*pb.AuthUserDeleteResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).UserDelete)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// UserChangePassword changes a user's password.
func (s *Service) UserChangePassword(ctx context.Context, r *pb.AuthUserChangePasswordRequest) (*pb.AuthUserChangePasswordResponse, error) {
	if err := s.authorize(ctx, mustBeAdmin); err != nil { // checked before the slow hash
		return nil, clientError(ctx, err)
	}
	if err := s.hash(ctx, func() error { return users.HashChange(r, s.opts.BcryptCost) }); err != nil {
		return nil, err
	}
	out, revision, err := administer(ctx, s, r, (*users.State).UserChangePassword)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// UserGrantRole grants a role to a user.
func (s *Service) UserGrantRole(ctx context.Context, r *pb.AuthUserGrantRoleRequest) (*pb.AuthUserGrantRoleResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).UserGrantRole)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// UserRevokeRole revokes a role from a user.
func (s *Service) UserRevokeRole(ctx context.Context, r *pb.AuthUserRevokeRoleRequest) (*pb.AuthUserRevokeRoleResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).UserRevokeRole)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// UserGet returns a user's roles.
func (s *Service) UserGet(ctx context.Context, r *pb.AuthUserGetRequest) (*pb.AuthUserGetResponse, error) {
	out, err := inspect(ctx, s, func(p *policy, user string) error { return p.users.CanGetUser(user, r) },
		func(u *users.State) (*pb.AuthUserGetResponse, error) { return u.UserGet(r) })
	if err != nil {
		return nil, err
	}
	out.Header = s.Header()
	return out, nil
}

// UserList returns all users' names.
func (s *Service) UserList(ctx context.Context, r *pb.AuthUserListRequest) (*pb.AuthUserListResponse, error) {
	out, err := inspect(ctx, s, mustBeAdmin, func(u *users.State) (*pb.AuthUserListResponse, error) { return u.UserList(r) })
	if err != nil {
		return nil, err
	}
	out.Header = s.Header()
	return out, nil
}

// RoleAdd adds a role.
func (s *Service) RoleAdd(ctx context.Context, r *pb.AuthRoleAddRequest) (*pb.AuthRoleAddResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).RoleAdd)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// RoleDelete deletes a role and revokes it from all users.
func (s *Service) RoleDelete(ctx context.Context, r *pb.AuthRoleDeleteRequest) (*pb.AuthRoleDeleteResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).RoleDelete)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// RoleGet returns a role's permissions.
func (s *Service) RoleGet(ctx context.Context, r *pb.AuthRoleGetRequest) (*pb.AuthRoleGetResponse, error) {
	out, err := inspect(ctx, s, func(p *policy, user string) error { return p.users.CanGetRole(user, r) },
		func(u *users.State) (*pb.AuthRoleGetResponse, error) { return u.RoleGet(r) })
	if err != nil {
		return nil, err
	}
	out.Header = s.Header()
	return out, nil
}

// RoleList returns all roles' names.
func (s *Service) RoleList(ctx context.Context, r *pb.AuthRoleListRequest) (*pb.AuthRoleListResponse, error) {
	out, err := inspect(ctx, s, mustBeAdmin, func(u *users.State) (*pb.AuthRoleListResponse, error) { return u.RoleList(r) })
	if err != nil {
		return nil, err
	}
	out.Header = s.Header()
	return out, nil
}

// RoleGrantPermission grants a permission to a role.
func (s *Service) RoleGrantPermission(ctx context.Context, r *pb.AuthRoleGrantPermissionRequest) (*pb.AuthRoleGrantPermissionResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).RoleGrantPermission)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// RoleRevokePermission revokes a permission from a role.
func (s *Service) RoleRevokePermission(ctx context.Context, r *pb.AuthRoleRevokePermissionRequest) (*pb.AuthRoleRevokePermissionResponse, error) {
	out, revision, err := administer(ctx, s, r, (*users.State).RoleRevokePermission)
	if err != nil {
		return nil, err
	}
	out.Header = s.header(revision)
	return out, nil
}

// MustBeAuthenticated returns an error if Auth is enabled and the caller is not authenticated.
func (s *Service) MustBeAuthenticated(ctx context.Context) error {
	return clientError(ctx, s.authorize(ctx, mustBeAuthenticated))
}

// MustBeAdmin returns an error if Auth is enabled and the caller does not have the role root.
func (s *Service) MustBeAdmin(ctx context.Context) error {
	return clientError(ctx, s.authorize(ctx, mustBeAdmin))
}

// RootUser returns the caller's name if Auth is enabled and the caller has the role root, and an error otherwise.
// Unlike MustBeAdmin it also returns an error while Auth is disabled.
func (s *Service) RootUser(ctx context.Context) (name string, err error) {
	err = s.authorize(ctx, func(p *policy, user string) error {
		if !p.users.Enabled() {
			return rpctypes.ErrGRPCPermissionDenied
		}
		name = user
		return p.users.CanAdmin(user)
	})
	return name, clientError(ctx, err)
}
