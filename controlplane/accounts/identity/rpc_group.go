package identity

import (
	"context"

	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// admitGroup authorizes a call about a group of an org, and returns the group. It does not check that the group exists.
func admitGroup(ctx context.Context, method, org, field, id string) (ref principal.GroupRef, err error) {
	at, err := auth.Admit(ctx, auth.Method(service+method), org, "")
	if err != nil {
		return ref, err
	}
	if err := cloud.CheckCallerID("org_id", string(at.Org)); err != nil {
		return ref, err
	}
	return principal.GroupRef{Org: at.Org, ID: cloud.GroupID(id)}, cloud.CheckCallerID(field, id)
}

func (r *server) CreateGroup(ctx context.Context, in *identityv1.CreateGroupRequest) (*identityv1.Group, error) {
	ref, err := admitGroup(ctx, "CreateGroup", in.GetOrgId(), "id", in.GetId())
	if err != nil {
		return nil, err
	}
	g, err := createGroupCommand.Call(ctx, r.s.opts.Commands, newGroup{Group: ref, Name: in.GetName(), By: auth.CallerOf(ctx).Name()})
	if err != nil {
		return nil, err
	}
	return groupOnWire(&g), nil
}

func (r *server) GetGroup(ctx context.Context, in *identityv1.GetGroupRequest) (*identityv1.Group, error) {
	ref, err := admitGroup(ctx, "GetGroup", in.GetOrgId(), "id", in.GetId())
	if err != nil {
		return nil, err
	}
	g, err := r.s.group(ctx, ref)
	if err != nil {
		return nil, err
	}
	return groupOnWire(g), nil
}

func (r *server) ListGroups(ctx context.Context, in *identityv1.ListGroupsRequest) (*identityv1.ListGroupsResponse, error) {
	at, err := auth.Admit(ctx, service+"ListGroups", in.GetOrgId(), "")
	if err != nil {
		return nil, err
	}
	list, next, err := r.s.groups(ctx, at.Org, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListGroupsResponse{NextPageToken: next}
	for _, g := range list {
		out.Groups = append(out.Groups, groupOnWire(g))
	}
	return out, nil
}

func (r *server) UpdateGroup(ctx context.Context, in *identityv1.UpdateGroupRequest) (*identityv1.Group, error) {
	ref, err := admitGroup(ctx, "UpdateGroup", in.GetOrgId(), "id", in.GetId())
	if err != nil {
		return nil, err
	}
	if in.Name == nil {
		g, err := r.s.group(ctx, ref)
		if err != nil {
			return nil, err
		}
		return groupOnWire(g), nil
	}
	g, err := renameGroupCommand.Call(ctx, r.s.opts.Commands, newGroup{Group: ref, Name: in.GetName()})
	if err != nil {
		return nil, err
	}
	return groupOnWire(&g), nil
}

func (r *server) DeleteGroup(ctx context.Context, in *identityv1.DeleteGroupRequest) (*emptypb.Empty, error) {
	ref, err := admitGroup(ctx, "DeleteGroup", in.GetOrgId(), "id", in.GetId())
	if err != nil {
		return nil, err
	}
	if _, err := deleteGroupCommand.Call(ctx, r.s.opts.Commands, ref); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (r *server) AddGroupMember(ctx context.Context, in *identityv1.AddGroupMemberRequest) (*emptypb.Empty, error) {
	return r.changeMember(ctx, "AddGroupMember", in, addMemberCommand)
}

func (r *server) RemoveGroupMember(ctx context.Context, in *identityv1.RemoveGroupMemberRequest) (*emptypb.Empty, error) {
	return r.changeMember(ctx, "RemoveGroupMember", in, removeMemberCommand)
}

// changeMember authorizes a call that adds a user to a group or removes a user from it, and calls the command do.
func (r *server) changeMember(ctx context.Context, method string, in interface {
	GetOrgId() string
	GetGroupId() string
	GetUserId() string
}, do *command[principal.Membership, none]) (*emptypb.Empty, error) {
	ref, err := admitGroup(ctx, method, in.GetOrgId(), "group_id", in.GetGroupId())
	if err != nil {
		return nil, err
	}
	m := principal.Membership{Group: ref, User: cloud.UserID(in.GetUserId()), Always: auth.CallerOf(ctx).Has(cloud.SystemAdmin, cloud.Tenant{})}
	if _, err := do.Call(ctx, r.s.opts.Commands, m); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (r *server) ListGroupMembers(ctx context.Context, in *identityv1.ListGroupMembersRequest) (*identityv1.ListGroupMembersResponse, error) {
	ref, err := admitGroup(ctx, "ListGroupMembers", in.GetOrgId(), "group_id", in.GetGroupId())
	if err != nil {
		return nil, err
	}
	ids, next, err := r.s.groupMembers(ctx, ref, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListGroupMembersResponse{NextPageToken: next}
	for _, id := range ids {
		out.UserIds = append(out.UserIds, string(*id))
	}
	return out, nil
}

func groupOnWire(g *principal.Group) *identityv1.Group {
	return &identityv1.Group{
		Id: string(g.ID), OrgId: string(g.Org), Name: g.Name, Bindings: bindingsOnWire(g.Bindings), CreatedAt: g.CreatedAt, CreatedBy: g.CreatedBy,
	}
}
