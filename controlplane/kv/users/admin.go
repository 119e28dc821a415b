package users

import (
	"encoding/base64"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Each request of etcd's Auth service has a method below. The methods for changes return the steps to propose, or none
// if nothing changes. All methods return the response without its header. If a method returns an error, the caller must
// return the error to the client and propose nothing. The caller must check permissions before it calls a method
// (CanAdmin, CanGetUser, CanGetRole; Status needs none).

// Enable enables auth; the user root must exist and have the role root.
func (s *State) Enable(*pb.AuthEnableRequest) ([]command.Step, *pb.AuthEnableResponse, error) {
	if s.enabled {
		return nil, &pb.AuthEnableResponse{}, nil
	}
	root := s.users[Root]
	if root == nil {
		return nil, nil, rpctypes.ErrGRPCRootUserNotExist
	}
	if !root.isRoot() {
		return nil, nil, rpctypes.ErrGRPCRootRoleNotExist
	}
	next := s.settings
	next.enabled = true
	return []command.Step{set(recordSettings, next.encode())}, &pb.AuthEnableResponse{}, nil
}

// Disable disables auth. All tokens become permanently invalid.
func (s *State) Disable(*pb.AuthDisableRequest) ([]command.Step, *pb.AuthDisableResponse, error) {
	if !s.enabled {
		return nil, &pb.AuthDisableResponse{}, nil
	}
	next := settings{enabled: false, revision: s.revision + 1, disabledAt: s.revision + 1}
	return []command.Step{set(recordSettings, next.encode())}, &pb.AuthDisableResponse{}, nil
}

// Status returns whether auth is enabled, and the auth revision.
func (s *State) Status(*pb.AuthStatusRequest) (*pb.AuthStatusResponse, error) {
	return &pb.AuthStatusResponse{Enabled: s.enabled, AuthRevision: s.revision}, nil
}

// UserAdd adds a user. HashAdd must have replaced the password by its hash.
func (s *State) UserAdd(r *pb.AuthUserAddRequest) ([]command.Step, *pb.AuthUserAddResponse, error) {
	if r.Name == "" {
		return nil, nil, rpctypes.ErrGRPCUserEmpty
	}
	if s.users[r.Name] != nil {
		return nil, nil, rpctypes.ErrGRPCUserAlreadyExist
	}
	if err := checkLimits("user", r.Name, len(s.users), MaxUsers); err != nil {
		return nil, nil, err
	}
	u := &authpb.User{Name: []byte(r.Name), Options: r.Options}
	if u.Options == nil {
		u.Options = &authpb.UserAddOptions{}
	}
	if !u.Options.NoPassword {
		var err error
		if u.Password, err = requestHash(r.Password, r.HashedPassword); err != nil {
			return nil, nil, err
		}
	}
	steps, err := s.editSteps(putUser(u, s.revision+1))
	return steps, &pb.AuthUserAddResponse{}, err
}

// UserDelete deletes a user. The user root cannot be deleted while auth is enabled.
func (s *State) UserDelete(r *pb.AuthUserDeleteRequest) ([]command.Step, *pb.AuthUserDeleteResponse, error) {
	if s.enabled && r.Name == Root {
		return nil, nil, rpctypes.ErrGRPCInvalidAuthMgmt
	}
	if s.users[r.Name] == nil {
		return nil, nil, rpctypes.ErrGRPCUserNotFound
	}
	steps, err := s.editSteps(remove(prefixUser + r.Name))
	return steps, &pb.AuthUserDeleteResponse{}, err
}

// UserChangePassword changes a user's password and invalidates the user's tokens. HashChange must have replaced the
// password by its hash. For a user with the option NoPassword, no password is stored. If the request has neither a
// password nor a hash, login with a password is disabled, as in etcd.
func (s *State) UserChangePassword(r *pb.AuthUserChangePasswordRequest) ([]command.Step, *pb.AuthUserChangePasswordResponse, error) {
	u := s.users[r.Name]
	if u == nil {
		return nil, nil, rpctypes.ErrGRPCUserNotFound
	}
	next := &authpb.User{Name: u.Name, Roles: u.Roles, Options: u.Options}
	if !u.Options.GetNoPassword() {
		var err error
		if next.Password, err = requestHash(r.Password, r.HashedPassword); err != nil {
			return nil, nil, err
		}
	}
	steps, err := s.editSteps(putUser(next, s.revision+1))
	return steps, &pb.AuthUserChangePasswordResponse{}, err
}

// UserGet returns a user's roles.
func (s *State) UserGet(r *pb.AuthUserGetRequest) (*pb.AuthUserGetResponse, error) {
	u := s.users[r.Name]
	if u == nil {
		return nil, rpctypes.ErrGRPCUserNotFound
	}
	return &pb.AuthUserGetResponse{Roles: slices.Clone(u.Roles)}, nil
}

// UserList returns all users' names, sorted.
func (s *State) UserList(*pb.AuthUserListRequest) (*pb.AuthUserListResponse, error) {
	r := &pb.AuthUserListResponse{Users: make([]string, 0, len(s.users))}
	for _, u := range s.Users() {
		r.Users = append(r.Users, string(u.Name))
	}
	return r, nil
}

// UserGrantRole grants a role to a user. The role must exist unless it is root. If the user has the role already,
// nothing changes.
func (s *State) UserGrantRole(r *pb.AuthUserGrantRoleRequest) ([]command.Step, *pb.AuthUserGrantRoleResponse, error) {
	u := s.users[r.User]
	if u == nil {
		return nil, nil, rpctypes.ErrGRPCUserNotFound
	}
	if r.Role != Root && s.roles[r.Role] == nil {
		return nil, nil, rpctypes.ErrGRPCRoleNotFound
	}
	if slices.Contains(u.Roles, r.Role) {
		return nil, &pb.AuthUserGrantRoleResponse{}, nil
	}
	roles := append(slices.Clone(u.Roles), r.Role)
	slices.Sort(roles)
	steps, err := s.editSteps(putUser(withRoles(u, roles), u.tokensSince))
	return steps, &pb.AuthUserGrantRoleResponse{}, err
}

// UserRevokeRole revokes a role from a user. While auth is enabled, the role root cannot be revoked from the user root.
func (s *State) UserRevokeRole(r *pb.AuthUserRevokeRoleRequest) ([]command.Step, *pb.AuthUserRevokeRoleResponse, error) {
	if s.enabled && r.Name == Root && r.Role == Root {
		return nil, nil, rpctypes.ErrGRPCInvalidAuthMgmt
	}
	u := s.users[r.Name]
	if u == nil {
		return nil, nil, rpctypes.ErrGRPCUserNotFound
	}
	if !slices.Contains(u.Roles, r.Role) {
		return nil, nil, rpctypes.ErrGRPCRoleNotGranted
	}
	steps, err := s.editSteps(putUser(withoutRole(u, r.Role), u.tokensSince))
	return steps, &pb.AuthUserRevokeRoleResponse{}, err
}

func withRoles(u *user, roles []string) *authpb.User {
	return &authpb.User{Name: u.Name, Password: u.Password, Options: u.Options, Roles: roles}
}

func withoutRole(u *user, role string) *authpb.User {
	return withRoles(u, slices.DeleteFunc(slices.Clone(u.Roles), func(r string) bool { return r == role }))
}

// edit holds a step that changes a user or a role, or the error that prevented it.
type edit struct {
	step command.Step
	err  error
}

// editSteps returns a step that increments the auth revision, followed by the steps of the edits. If an edit contains
// an error, editSteps returns that error instead.
func (s *State) editSteps(edits ...edit) ([]command.Step, error) {
	next := s.settings
	next.revision++
	steps := []command.Step{set(recordSettings, next.encode())}
	for _, e := range edits {
		if e.err != nil {
			return nil, e.err
		}
		steps = append(steps, e.step)
	}
	return steps, nil
}

func set(name string, value []byte) command.Step {
	return command.Step{Kind: command.StepSetRecord, Key: []byte(name), Value: value}
}

func remove(name string) edit {
	return edit{step: command.Step{Kind: command.StepDeleteRecord, Key: []byte(name)}}
}

func putUser(u *authpb.User, tokensSince uint64) edit {
	b, err := encodeUser(u, tokensSince)
	return put(prefixUser+string(u.Name), "user", b, err)
}

func putRole(r *authpb.Role) edit {
	b, err := encodeRole(r)
	return put(prefixRole+string(r.Name), "role", b, err)
}

func put(name, noun string, value []byte, err error) edit {
	if err != nil {
		return edit{err: fmt.Errorf("encode %s: %w", noun, err)}
	}
	if len(value) > MaxRecordBytes {
		return edit{err: status.Errorf(codes.ResourceExhausted,
			"etcdserver: %s would take %d bytes, at most %d", noun, len(value), MaxRecordBytes)}
	}
	return edit{step: set(name, value)}
}

// checkLimits returns an error if name is longer than MaxNameBytes, or if count, the number of existing users or roles,
// has reached limit.
func checkLimits(noun, name string, count, limit int) error {
	if len(name) > MaxNameBytes {
		return status.Errorf(codes.InvalidArgument, "etcdserver: %s name of %d bytes, at most %d", noun, len(name), MaxNameBytes)
	}
	if count >= limit {
		return status.Errorf(codes.ResourceExhausted, "etcdserver: there are %d %ss already, which is the limit", count, noun)
	}
	return nil
}

// requestHash decodes the password hash of a request. It returns an error if the request still has a password that was
// not hashed, or if the hash is not a valid bcrypt hash. An empty hash is valid.
func requestHash(password, hashed string) ([]byte, error) {
	if password != "" {
		return nil, fmt.Errorf("a password was not hashed: %w", errNotHashed)
	}
	hash, err := base64.StdEncoding.DecodeString(hashed)
	if err != nil || len(hash) > 0 && !isHash(hash) {
		return nil, errNoPasswordUser
	}
	return hash, nil
}

func cloneProto[M proto.Message](m M) M { return proto.Clone(m).(M) }
