package identity

import (
	"context"
	"slices"

	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

func (r *server) BindRole(ctx context.Context, in *identityv1.BindRoleRequest) (*identityv1.BindRoleResponse, error) {
	if in.GetGroupId() != "" {
		q, err := admitGroupGrant(ctx, "BindRole", in)
		if err == nil {
			_, err = bindGroupCommand.Call(ctx, r.s.opts.Commands, q)
		}
		return &identityv1.BindRoleResponse{}, err
	}
	grant, err := admitGrant(ctx, "BindRole", in.GetUserId(), in.GetBinding())
	if err != nil {
		return nil, err
	}
	pending, err := bindCommand.Call(ctx, r.s.opts.Commands, grant)
	if err != nil {
		return nil, err
	}
	return &identityv1.BindRoleResponse{Pending: pending}, nil
}

func (r *server) UnbindRole(ctx context.Context, in *identityv1.UnbindRoleRequest) (*emptypb.Empty, error) {
	if in.GetGroupId() != "" {
		q, err := admitGroupGrant(ctx, "UnbindRole", in)
		if err == nil {
			_, err = unbindGroupCommand.Call(ctx, r.s.opts.Commands, q)
		}
		return &emptypb.Empty{}, err
	}
	grant, err := admitGrant(ctx, "UnbindRole", in.GetUserId(), in.GetBinding())
	if err != nil {
		return nil, err
	}
	if _, err := unbindCommand.Call(ctx, r.s.opts.Commands, grant); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

// admitGrant authorizes a call that gives or removes a role, in the org or project of the role. It returns the
// arguments of the call as a Grant.
func admitGrant(ctx context.Context, method, user string, b *identityv1.Binding) (none principal.Grant, err error) {
	if _, err := auth.Admit(ctx, auth.Method(service+method), b.GetOrgId(), b.GetProjectId()); err != nil {
		if method != "UnbindRole" || !isOwnRole(auth.CallerOf(ctx), user, bindingFrom(b), err) {
			return none, err
		}
	}
	binding := bindingFrom(b)
	if err := cloud.CheckCallerID("user_id", user); err != nil {
		return none, err
	}
	if err := binding.Check(); err != nil {
		return none, err
	}
	caller := auth.CallerOf(ctx)
	return principal.Grant{
		User: cloud.UserID(user), Binding: binding, By: caller.Name(),
		Always: caller.Has(cloud.SystemAdmin, cloud.Tenant{}) || mutant.On(mutant.GrantUnasked),
	}, nil
}

// isOwnRole is called when UnbindRole was refused; the parameter refused is the error. It reports whether the caller c
// may remove the role b nevertheless, because it is the caller's own. This is so if c is authenticated, is the user
// that the call names, and has the role. Without the role, anybody could use up the budget of the role's org, to which
// the call is charged. The role must be within the scope of the caller's token.
func isOwnRole(c *cloud.Caller, user string, b cloud.Binding, refused error) bool {
	f, ok := fault.From(refused)
	if !ok || f.Kind != fault.PermissionDenied || f.Reason == auth.TokenScope {
		return false
	}
	if c == nil || c.Scope.Project != "" && b.Tenant() != c.Scope || c.Scope.Org != "" && b.Org != c.Scope.Org {
		return false
	}
	return c.Authenticated() && c.Proof != cloud.ProofDev && string(c.User) == user && slices.ContainsFunc(c.Bindings, b.Same)
}

func (r *server) ListBindings(ctx context.Context, in *identityv1.ListBindingsRequest) (*identityv1.ListBindingsResponse, error) {
	at, err := auth.Admit(ctx, service+"ListBindings", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	if at.Project != "" && at.Org == "" {
		return nil, fault.Invalid("org_id", "is required with project_id")
	}
	grants, next, err := r.s.grants(ctx, at, in.GetPageSize(), in.GetPageToken())
	return &identityv1.ListBindingsResponse{Grants: grants, NextPageToken: next}, err
}

// admitGroupGrant authorizes a call that gives a role to a group or removes it, in the org or project of the role. It
// returns the arguments of the call.
func admitGroupGrant(ctx context.Context, method string, in interface {
	GetUserId() string
	GetGroupId() string
	GetBinding() *identityv1.Binding
}) (none groupGrant, err error) {
	b := bindingFrom(in.GetBinding())
	if _, err := auth.Admit(ctx, auth.Method(service+method), string(b.Org), string(b.Project)); err != nil {
		return none, err
	}
	if in.GetUserId() != "" {
		return none, fault.Invalid("group_id", "give user_id or group_id, not both")
	}
	if err := cloud.CheckCallerID("group_id", in.GetGroupId()); err != nil {
		return none, err
	}
	if b.Org == "" {
		return none, fault.Invalid("binding.org_id", "is required: groups have roles in their org only")
	}
	return groupGrant{principal.GroupRef{Org: b.Org, ID: cloud.GroupID(in.GetGroupId())}, b}, b.Check()
}
