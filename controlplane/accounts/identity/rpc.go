package identity

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/keyring"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Register registers the gRPC service identity.v1.IdentityService with g.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	identityv1.RegisterIdentityServiceServer(g, &server{s: s})
}

type server struct {
	identityv1.UnsafeIdentityServiceServer
	s *Service
}

const service = "/identity.v1.IdentityService/"

// admit authorizes a call of a method that is not about a tenant but about the entire cloud.
func admit(ctx context.Context, method string) error {
	_, err := auth.Admit(ctx, auth.Method(service+method), "", "")
	return err
}

// tokenRequestOf converts an IssueTokenRequest or ExchangeTokenRequest to a tokenRequest, and adds the ID of the call
// and the address of the client.
func tokenRequestOf(ctx context.Context, in interface {
	GetTtlSeconds() uint64
	GetOrgId() string
	GetProjectId() string
}) tokenRequest {
	q := tokenRequest{TTL: in.GetTtlSeconds(), Org: in.GetOrgId(), Project: in.GetProjectId(), RequestID: rpc.RequestID(ctx)}
	if p, ok := peer.FromContext(ctx); ok {
		q.Address = p.Addr.String()
	}
	return q
}

func (r *server) IssueToken(ctx context.Context, in *identityv1.IssueTokenRequest) (*identityv1.IssueTokenResponse, error) {
	q := tokenRequestOf(ctx, in)
	q.User, q.Password, q.Strict = cloud.UserID(in.GetUsername()), in.GetPassword(), true
	q, err := legacyRequest{in.GetPrincipalId(), in.GetPrincipalType(), in.GetScopeId()}.mergeInto(q)
	if err != nil {
		return nil, err
	}
	made, proven, err := r.s.token(ctx, q)
	if err != nil {
		return nil, err
	}
	if !proven {
		return nil, fault.New(fault.Unauthenticated, "wrong user or password")
	}
	return tokenOnWire(made), nil
}

func tokenOnWire(made issuedToken) *identityv1.IssueTokenResponse {
	return &identityv1.IssueTokenResponse{
		Token: made.text, ExpiresAt: made.expires.UnixMilli(), OrgId: string(made.scope.Org), ProjectId: string(made.scope.Project),
	}
}

func (r *server) ExchangeToken(ctx context.Context, in *identityv1.ExchangeTokenRequest) (*identityv1.IssueTokenResponse, error) {
	made, err := r.s.exchange(ctx, in.GetProvider(), in.GetIdToken(), in.GetNonce(), tokenRequestOf(ctx, in))
	if err != nil {
		return nil, err
	}
	return tokenOnWire(made), nil
}

func (r *server) ListLoginProviders(context.Context, *identityv1.ListLoginProvidersRequest) (*identityv1.ListLoginProvidersResponse, error) {
	out := &identityv1.ListLoginProvidersResponse{}
	for _, p := range r.s.providers.List() {
		out.Providers = append(out.Providers, &identityv1.LoginProvider{Name: p.Name, Issuer: p.Issuer, ClientId: p.ClientID, Scopes: p.Scopes})
	}
	return out, nil
}

func (r *server) VerifyToken(ctx context.Context, in *identityv1.VerifyTokenRequest) (*identityv1.VerifyTokenResponse, error) {
	caller, err := r.s.Verify(ctx, in.GetToken())
	if f, ok := fault.From(err); ok && f.Kind == fault.Unauthenticated {
		return &identityv1.VerifyTokenResponse{Reason: f.Message}, nil
	}
	if err != nil {
		return nil, err
	}
	who, err := r.s.holder(ctx, caller)
	if err != nil {
		return nil, err
	}
	return &identityv1.VerifyTokenResponse{Valid: true, Holder: who}, nil
}

func (r *server) WhoAmI(ctx context.Context, _ *identityv1.WhoAmIRequest) (*identityv1.WhoAmIResponse, error) {
	if err := admit(ctx, "WhoAmI"); err != nil {
		return nil, err
	}
	return r.s.holder(ctx, auth.CallerOf(ctx))
}

func (r *server) RevokeToken(ctx context.Context, in *identityv1.RevokeTokenRequest) (*emptypb.Empty, error) {
	if err := admit(ctx, "RevokeToken"); err != nil {
		return nil, err
	}
	if err := r.s.revokeToken(ctx, in.GetToken(), in.GetTokenId()); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (r *server) RevokeTokens(ctx context.Context, in *identityv1.RevokeTokensRequest) (*emptypb.Empty, error) {
	user := cloud.UserID(in.GetUserId())
	// Only operators learn whether a service account of another project exists.
	if c := auth.CallerOf(ctx); c != nil && (c.IsCloudAdmin() || c.Scope.Project != "") {
		var err error
		if user, err = r.s.principalID(ctx, in.GetUserId(), c.Scope); err != nil {
			return nil, err
		}
	}
	if err := r.admitOwnUser(ctx, "RevokeTokens", string(user), "may end only their own tokens"); err != nil {
		return nil, err
	}
	if _, err := revokeCommand.Call(ctx, r.s.opts.Commands, user); err != nil {
		return nil, err
	}
	r.s.revoked.Add(1)
	return &emptypb.Empty{}, nil
}

// admitOwnUser authorizes a call about a user. It accepts the user itself and system:admin.
func (r *server) admitOwnUser(ctx context.Context, method, user, says string) error {
	if err := admit(ctx, method); err != nil {
		return err
	}
	if err := cloud.CheckCallerID("user_id", user); err != nil {
		return err
	}
	caller := auth.CallerOf(ctx)
	// Under --dev any caller can get a token with any user name, even the administrator's. So the name in a token with
	// ProofDev does not show that the caller is that user.
	if own := string(caller.User) == user && caller.Proof != cloud.ProofDev; !own && !caller.IsCloudAdmin() {
		return fault.New(fault.PermissionDenied, "%s %s, and only when proven to be who they are", caller.Name(), says)
	}
	return nil
}

func (r *server) ListKeys(ctx context.Context, _ *identityv1.ListKeysRequest) (*identityv1.ListKeysResponse, error) {
	if err := admit(ctx, "ListKeys"); err != nil {
		return nil, err
	}
	ring, err := r.s.Keys(ctx)
	if err != nil {
		return nil, err
	}
	return keysOnWire(ring), nil
}

func (r *server) RotateKeys(ctx context.Context, in *identityv1.RotateKeysRequest) (*identityv1.ListKeysResponse, error) {
	if err := admit(ctx, "RotateKeys"); err != nil {
		return nil, err
	}
	ring, err := rotateKeysCommand.Call(ctx, r.s.opts.Commands, rotation{in.GetForce()})
	if err != nil {
		return nil, err
	}
	return keysOnWire(&ring), nil
}

func (r *server) RevokeKey(ctx context.Context, in *identityv1.RevokeKeyRequest) (*identityv1.ListKeysResponse, error) {
	if err := admit(ctx, "RevokeKey"); err != nil {
		return nil, err
	}
	if !keyring.Possible(in.GetKeyId()) {
		return nil, fault.Invalid("key_id", "is not a key's id")
	}
	ring, err := revokeKeyCommand.Call(ctx, r.s.opts.Commands, oldKey{in.GetKeyId()})
	if err != nil {
		return nil, err
	}
	return keysOnWire(&ring), nil
}

func keysOnWire(ring *keyring.Ring) *identityv1.ListKeysResponse {
	out := &identityv1.ListKeysResponse{}
	for _, k := range ring.Keys {
		out.Keys = append(out.Keys, &identityv1.Key{Id: k.ID, Use: string(k.Use), CreatedAt: k.CreatedAt, EndsAt: k.Ends})
	}
	return out
}

func (r *server) ListAuditRecords(ctx context.Context, in *identityv1.ListAuditRecordsRequest) (*identityv1.ListAuditRecordsResponse, error) {
	at, err := auth.Admit(ctx, service+"ListAuditRecords", in.GetOrgId(), "")
	if err != nil {
		return nil, err
	}
	who, err := r.s.principalID(ctx, in.GetPrincipal(), at)
	if err != nil {
		return nil, err
	}
	at.Project = cloud.ProjectID(in.GetProjectId())
	list, next, err := r.s.opts.Audit.List(ctx, audit.Query{
		Within: at, Principal: string(who), Method: in.GetMethod(), Outcome: in.GetOutcome(), Since: in.GetSince(), Until: in.GetUntil(),
		Size: in.GetPageSize(), Token: in.GetPageToken(),
	})
	if err != nil {
		return nil, err
	}
	usernames, err := r.s.usernames(func(yield func(string) bool) {
		for _, a := range list {
			if !yield(a.Principal) {
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListAuditRecordsResponse{NextPageToken: next}
	for _, a := range list {
		out.Records = append(out.Records, &identityv1.AuditRecord{
			PrincipalUsername: usernames[a.Principal], Id: a.ID, Time: a.At, Principal: a.Principal, Proof: string(a.Proof), OrgId: string(a.Tenant.Org), ProjectId: string(a.Tenant.Project),
			Method: a.Method, Target: a.Target, Outcome: a.Outcome, Message: a.Message, RequestId: a.RequestID, Address: a.Address, Suppressed: a.Suppressed,
		})
	}
	return out, nil
}
