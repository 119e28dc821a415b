package users

import (
	"bytes"
	"cmp"
	"slices"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// RoleAdd adds a role without permissions.
func (s *State) RoleAdd(r *pb.AuthRoleAddRequest) ([]command.Step, *pb.AuthRoleAddResponse, error) {
	if r.Name == "" {
		return nil, nil, rpctypes.ErrGRPCRoleEmpty
	}
	if s.roles[r.Name] != nil {
		return nil, nil, rpctypes.ErrGRPCRoleAlreadyExist
	}
	if err := checkLimits("role", r.Name, len(s.roles), MaxRoles); err != nil {
		return nil, nil, err
	}
	steps, err := s.editSteps(putRole(&authpb.Role{Name: []byte(r.Name)}))
	return steps, &pb.AuthRoleAddResponse{}, err
}

// RoleGet returns a role's permissions. For the role root it returns one permission to read and write all keys,
// whatever permissions root was granted.
func (s *State) RoleGet(r *pb.AuthRoleGetRequest) (*pb.AuthRoleGetResponse, error) {
	role := s.roles[r.Role]
	if role == nil {
		return nil, rpctypes.ErrGRPCRoleNotFound
	}
	if r.Role == Root {
		all := &authpb.Permission{PermType: authpb.Permission_READWRITE, Key: []byte{}, RangeEnd: []byte{0}}
		return &pb.AuthRoleGetResponse{Perm: []*authpb.Permission{all}}, nil
	}
	return &pb.AuthRoleGetResponse{Perm: cloneProto(role).KeyPermission}, nil
}

// RoleList returns all roles' names, sorted.
func (s *State) RoleList(*pb.AuthRoleListRequest) (*pb.AuthRoleListResponse, error) {
	r := &pb.AuthRoleListResponse{Roles: make([]string, 0, len(s.roles))}
	for _, role := range s.Roles() {
		r.Roles = append(r.Roles, string(role.Name))
	}
	return r, nil
}

// RoleDelete deletes a role and revokes it from all users. The role root cannot be deleted while auth is enabled.
func (s *State) RoleDelete(r *pb.AuthRoleDeleteRequest) ([]command.Step, *pb.AuthRoleDeleteResponse, error) {
	if s.enabled && r.Role == Root {
		return nil, nil, rpctypes.ErrGRPCInvalidAuthMgmt
	}
	if s.roles[r.Role] == nil {
		return nil, nil, rpctypes.ErrGRPCRoleNotFound
	}
	edits := []edit{remove(prefixRole + r.Role)}
	for _, u := range s.Users() {
		if slices.Contains(u.Roles, r.Role) {
			of := s.users[string(u.Name)]
			edits = append(edits, putUser(withoutRole(of, r.Role), of.tokensSince))
		}
	}
	steps, err := s.editSteps(edits...)
	return steps, &pb.AuthRoleDeleteResponse{}, err
}

// RoleGrantPermission grants a permission on a range of keys to a role. It replaces the role's permission on exactly
// the same range.
func (s *State) RoleGrantPermission(r *pb.AuthRoleGrantPermissionRequest) ([]command.Step, *pb.AuthRoleGrantPermissionResponse, error) {
	if r.Perm == nil {
		return nil, nil, rpctypes.ErrGRPCPermissionNotGiven
	}
	_, known := authpb.Permission_Type_name[int32(r.Perm.PermType)]
	if !known || !validPermission(r.Perm.Key, r.Perm.RangeEnd) {
		return nil, nil, rpctypes.ErrGRPCInvalidAuthMgmt
	}
	role := s.roles[r.Name]
	if role == nil {
		return nil, nil, rpctypes.ErrGRPCRoleNotFound
	}
	next := cloneProto(role)
	granted := &authpb.Permission{PermType: r.Perm.PermType, Key: r.Perm.Key, RangeEnd: r.Perm.RangeEnd}
	at, found := slices.BinarySearchFunc(next.KeyPermission, granted, compareRanges)
	if found {
		next.KeyPermission[at] = granted
	} else {
		next.KeyPermission = slices.Insert(next.KeyPermission, at, granted)
	}
	steps, err := s.editSteps(putRole(next))
	return steps, &pb.AuthRoleGrantPermissionResponse{}, err
}

// RoleRevokePermission revokes a role's permission on exactly the range [r.Key, r.RangeEnd).
func (s *State) RoleRevokePermission(r *pb.AuthRoleRevokePermissionRequest) ([]command.Step, *pb.AuthRoleRevokePermissionResponse, error) {
	role := s.roles[r.Role]
	if role == nil {
		return nil, nil, rpctypes.ErrGRPCRoleNotFound
	}
	at, found := slices.BinarySearchFunc(role.KeyPermission, &authpb.Permission{Key: r.Key, RangeEnd: r.RangeEnd}, compareRanges)
	if !found {
		return nil, nil, rpctypes.ErrGRPCPermissionNotGranted
	}
	next := cloneProto(role)
	next.KeyPermission = slices.Delete(next.KeyPermission, at, at+1)
	steps, err := s.editSteps(putRole(next))
	return steps, &pb.AuthRoleRevokePermissionResponse{}, err
}

// compareRanges orders a role's permissions by key, then by range end.
func compareRanges(a, b *authpb.Permission) int {
	return cmp.Or(bytes.Compare(a.Key, b.Key), bytes.Compare(a.RangeEnd, b.RangeEnd))
}
