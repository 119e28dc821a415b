package identity

import (
	"context"
	"strings"

	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// admitInvited authorizes a call about the caller's own invitations, and returns the caller's user ID. It refuses
// service accounts and, under --dev, callers who did not authenticate.
func admitInvited(ctx context.Context, method string) (cloud.UserID, error) {
	if err := admit(ctx, method); err != nil {
		return "", err
	}
	caller := auth.CallerOf(ctx)
	// Under --dev every caller can get a token in any name without a password.
	if caller.Proof == cloud.ProofDev || caller.Proof == cloud.ProofAppCred {
		return "", fault.New(fault.PermissionDenied, "invitations are for users who logged in: %s has none", caller.Name())
	}
	return caller.User, nil
}

func (r *server) ListInvitations(ctx context.Context, in *identityv1.ListInvitationsRequest) (*identityv1.ListInvitationsResponse, error) {
	user, err := admitInvited(ctx, "ListInvitations")
	if err != nil {
		return nil, err
	}
	list, next, err := principal.InvitationsTo(ctx, r.s.opts.Store, user, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListInvitationsResponse{NextPageToken: next}
	for _, org := range list {
		for _, i := range org.Open {
			out.Invitations = append(out.Invitations, &identityv1.Invitation{
				Binding: bindingOnWire(i.Binding), InvitedBy: i.By, InvitedAt: i.At, ExpiresAt: i.Expires,
			})
		}
	}
	return out, nil
}

func (r *server) AcceptInvitation(ctx context.Context, in *identityv1.AcceptInvitationRequest) (*emptypb.Empty, error) {
	user, err := admitInvited(ctx, "AcceptInvitation")
	if err != nil {
		return nil, err
	}
	return r.answer(ctx, user, in.GetBinding(), acceptCommand)
}

func (r *server) DeclineInvitation(ctx context.Context, in *identityv1.DeclineInvitationRequest) (*emptypb.Empty, error) {
	user, err := admitInvited(ctx, "DeclineInvitation")
	if err != nil {
		return nil, err
	}
	return r.answer(ctx, user, in.GetBinding(), declineCommand)
}

// answer calls the command do (acceptCommand or declineCommand) for the invitation of the user to the role b.
func (r *server) answer(ctx context.Context, user cloud.UserID, b *identityv1.Binding, do *command[answer, none]) (*emptypb.Empty, error) {
	// A token limited to a tenant may have been given to a program, so it must neither accept nor decline an invitation
	// for its holder.
	if at := auth.CallerOf(ctx).Scope; at != (cloud.Tenant{}) {
		return nil, fault.New(fault.PermissionDenied, "the token is limited to %s: log in without org_id and project_id to answer an invitation", at).
			WithReason(auth.TokenScope)
	}
	binding := bindingFrom(b)
	if err := binding.Check(); err != nil {
		return nil, err
	}
	if _, err := do.Call(ctx, r.s.opts.Commands, answer{user, binding}); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

// The pages of ListBindings contain first the roles of users, then those of groups, and then the open invitations.
// groupPage and openPage are the prefixes of the page tokens that continue with roles of groups and with invitations.
// Page tokens that continue with roles of users have no prefix.
const (
	groupPage = "groups."
	openPage  = "invited."
)

// grants returns a page of the roles within the tenant at: those of users, then those of groups, and then the open
// invitations.
func (s *Service) grants(ctx context.Context, at cloud.Tenant, size int32, page string) (grants []*identityv1.Grant, next string, err error) {
	if rest, ok := strings.CutPrefix(page, openPage); ok {
		list, next, err := principal.InvitationsOf(ctx, s.opts.Store, at, size, rest)
		if err != nil {
			return nil, "", err
		}
		for _, to := range list {
			for _, i := range to.Open {
				grants = append(grants, &identityv1.Grant{UserId: string(to.User), Binding: bindingOnWire(i.Binding), Pending: true, ExpiresAt: i.Expires})
			}
		}
		if next != "" {
			next = openPage + next
		}
		return grants, next, nil
	}
	if rest, ok := strings.CutPrefix(page, groupPage); ok {
		return s.groupGrants(ctx, at, size, rest)
	}
	list, next, err := s.bound(ctx, at, size, page)
	if err != nil {
		return nil, "", err
	}
	for _, u := range list {
		for _, b := range u.At(at) {
			g := &identityv1.Grant{UserId: string(u.ID), Binding: bindingOnWire(b)}
			if u.Account != nil {
				g.Username = u.Account.Username()
			}
			grants = append(grants, g)
		}
	}
	if next != "" {
		return grants, next, nil
	}
	// Append the first page of what follows to the last page of roles, so that a short list needs one call.
	more, next, err := s.grants(ctx, at, size, groupPage)
	return append(grants, more...), next, err
}

// groupGrants returns a page of the roles of groups within the tenant at. To the last page it appends the first page of
// invitations.
func (s *Service) groupGrants(ctx context.Context, at cloud.Tenant, size int32, page string) (grants []*identityv1.Grant, next string, err error) {
	list, next, err := principal.Groups(ctx, s.opts.Store, at.Org, func(g *principal.Group) bool { return len(g.At(at)) > 0 }, size, page)
	if err != nil {
		return nil, "", err
	}
	for _, g := range list {
		for _, b := range g.At(at) {
			grants = append(grants, &identityv1.Grant{GroupId: string(g.ID), Binding: bindingOnWire(b)})
		}
	}
	if next != "" {
		return grants, groupPage + next, nil
	}
	open, next, err := s.grants(ctx, at, size, openPage)
	return append(grants, open...), next, err
}

func bindingFrom(b *identityv1.Binding) cloud.Binding {
	return cloud.Binding{Role: cloud.Role(b.GetRole()), Org: cloud.OrgID(b.GetOrgId()), Project: cloud.ProjectID(b.GetProjectId())}
}

func bindingOnWire(b cloud.Binding) *identityv1.Binding {
	return &identityv1.Binding{Role: string(b.Role), OrgId: string(b.Org), ProjectId: string(b.Project)}
}
