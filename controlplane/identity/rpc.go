package identity

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Register adds identity.v1.
func (s *Service) Register(g *grpc.Server) {
	identityv1.RegisterIdentityServiceServer(g, &server{s: s})
}

type server struct {
	identityv1.UnsafeIdentityServiceServer
	s *Service
}

func (r *server) IssueToken(ctx context.Context, in *identityv1.IssueTokenRequest) (*identityv1.IssueTokenResponse, error) {
	if err := cloud.CheckCallerID("username", in.GetUsername()); err != nil {
		return nil, err
	}
	var from string
	if p, ok := peer.FromContext(ctx); ok {
		from = p.Addr.String()
	}
	token, proven, err := r.s.token(ctx, tokenRequest{
		User: cloud.UserID(in.GetUsername()), Password: in.GetPassword(), Address: from, TTL: in.GetTtlSeconds(),
		Org: in.GetOrgId(), Project: in.GetProjectId(),
	})
	if err != nil {
		return nil, err
	}
	if !proven {
		return nil, fault.New(fault.Unauthenticated, "wrong user or password")
	}
	return &identityv1.IssueTokenResponse{Token: token.text, ExpiresAt: token.expires.UnixMilli()}, nil
}

const service = "/identity.v1.IdentityService/"

func (r *server) CreateUser(ctx context.Context, in *identityv1.CreateUserRequest) (*identityv1.User, error) {
	if _, err := auth.Admit(ctx, service+"CreateUser", "", ""); err != nil {
		return nil, err
	}
	u, err := r.s.createUser(ctx, newUser{cloud.UserID(in.GetId()), in.GetName()})
	if err != nil {
		return nil, err
	}
	return shown(&u), nil
}

func (r *server) GetUser(ctx context.Context, in *identityv1.GetUserRequest) (*identityv1.User, error) {
	if _, err := auth.Admit(ctx, service+"GetUser", "", ""); err != nil {
		return nil, err
	}
	u, err := r.s.get(ctx, in.GetId())
	if err != nil {
		return nil, err
	}
	return shown(u), nil
}

func (r *server) ListUsers(ctx context.Context, in *identityv1.ListUsersRequest) (*identityv1.ListUsersResponse, error) {
	if _, err := auth.Admit(ctx, service+"ListUsers", "", ""); err != nil {
		return nil, err
	}
	list, next, err := r.s.list(ctx, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListUsersResponse{NextPageToken: next}
	for _, u := range list {
		out.Users = append(out.Users, shown(u))
	}
	return out, nil
}

func (r *server) SetPassword(ctx context.Context, in *identityv1.SetPasswordRequest) (*emptypb.Empty, error) {
	if _, err := auth.Admit(ctx, service+"SetPassword", "", ""); err != nil {
		return nil, err
	}
	caller := auth.CallerOf(ctx)
	// Under --dev whoever asks holds a token in any name, the administrator's too: that is nobody's own.
	own := string(caller.User) == in.GetUserId() && caller.Proof != cloud.ProofDev
	if !own && !caller.Has(cloud.SystemAdmin, cloud.Tenant{}) {
		return nil, fault.New(fault.PermissionDenied, "%s may set only their own password, and only when proven by the one they have", caller.Name())
	}
	if err := cloud.CheckCallerID("user_id", in.GetUserId()); err != nil {
		return nil, err
	}
	if err := checkPassword(in.GetPassword()); err != nil {
		return nil, err
	}
	h, err := r.s.hashed(ctx, in.GetPassword())
	if err != nil {
		return nil, err
	}
	if _, err := r.s.setPassword(ctx, newPassword{cloud.UserID(in.GetUserId()), h}); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (r *server) BindRole(ctx context.Context, in *identityv1.BindRoleRequest) (*emptypb.Empty, error) {
	return r.rebind(ctx, service+"BindRole", in.GetUserId(), in.GetBinding(), false)
}

func (r *server) UnbindRole(ctx context.Context, in *identityv1.UnbindRoleRequest) (*emptypb.Empty, error) {
	return r.rebind(ctx, service+"UnbindRole", in.GetUserId(), in.GetBinding(), true)
}

func (r *server) rebind(ctx context.Context, method auth.Method, user string, b *identityv1.Binding, remove bool) (*emptypb.Empty, error) {
	if _, err := auth.Admit(ctx, method, "", ""); err != nil {
		return nil, err
	}
	binding := cloud.Binding{Role: cloud.Role(b.GetRole()), Org: cloud.OrgID(b.GetOrgId()), Project: cloud.ProjectID(b.GetProjectId())}
	if err := cloud.CheckCallerID("user_id", user); err != nil {
		return nil, err
	}
	if err := binding.Check(); err != nil {
		return nil, err
	}
	if _, err := r.s.bind(ctx, bindChange{cloud.UserID(user), binding, remove}); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func shown(u *User) *identityv1.User {
	out := &identityv1.User{Id: string(u.ID), Name: u.Name, Registered: u.Registered(), CreatedAt: u.CreatedAt}
	for _, b := range u.Bindings {
		out.Bindings = append(out.Bindings, &identityv1.Binding{Role: string(b.Role), OrgId: string(b.Org), ProjectId: string(b.Project)})
	}
	return out
}
