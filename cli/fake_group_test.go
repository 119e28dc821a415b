package main

import (
	"cmp"
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

func (f *fakeIdentity) CreateGroup(_ context.Context, in *identityv1.CreateGroupRequest) (*identityv1.Group, error) {
	if _, err := find(f.groups, "group", in.GetId()); err == nil {
		return nil, failed(codes.AlreadyExists, "", "org %s has a group %s", in.GetOrgId(), in.GetId())
	}
	g := &identityv1.Group{
		Id: in.GetId(), OrgId: in.GetOrgId(), Name: cmp.Or(in.GetName(), in.GetId()), CreatedAt: now.UnixMilli(), CreatedBy: "admin",
	}
	f.groups = append(f.groups, g)
	return g, nil
}

func (f *fakeIdentity) GetGroup(_ context.Context, in *identityv1.GetGroupRequest) (*identityv1.Group, error) {
	return find(f.groups, "group", in.GetId())
}

// ListGroups returns the groups of an org or, without one, of all orgs.
func (f *fakeIdentity) ListGroups(_ context.Context, in *identityv1.ListGroupsRequest) (*identityv1.ListGroupsResponse, error) {
	out := &identityv1.ListGroupsResponse{}
	for _, g := range f.groups {
		if in.GetOrgId() == "" || in.GetOrgId() == g.GetOrgId() {
			out.Groups = append(out.Groups, g)
		}
	}
	return out, nil
}

func (f *fakeIdentity) DeleteGroup(_ context.Context, in *identityv1.DeleteGroupRequest) (*emptypb.Empty, error) {
	return remove(&f.groups, "group", in.GetId())
}

func (f *fakeIdentity) AddGroupMember(_ context.Context, in *identityv1.AddGroupMemberRequest) (*emptypb.Empty, error) {
	if in.GetUserId() == "mallory" {
		return nil, failed(codes.FailedPrecondition, "", "mallory is not a user whose home org is %s", in.GetOrgId())
	}
	f.members[in.GetGroupId()] = append(f.members[in.GetGroupId()], in.GetUserId())
	return &emptypb.Empty{}, nil
}

func (f *fakeIdentity) RemoveGroupMember(_ context.Context, in *identityv1.RemoveGroupMemberRequest) (*emptypb.Empty, error) {
	f.members[in.GetGroupId()] = slices.DeleteFunc(f.members[in.GetGroupId()], func(u string) bool { return u == in.GetUserId() })
	return &emptypb.Empty{}, nil
}

func (f *fakeIdentity) ListGroupMembers(_ context.Context, in *identityv1.ListGroupMembersRequest) (*identityv1.ListGroupMembersResponse, error) {
	return &identityv1.ListGroupMembersResponse{UserIds: f.members[in.GetGroupId()]}, nil
}
