package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// More secrets: tokens that the fake issues to users other than demo, and the credential of a service account.
const (
	issuedToken = "eyJpc3N1ZWQ.t0ken.sig"
	// unprovenToken is an unauthenticated token, such as the REST API issues without a password.
	unprovenToken = "eyJ1bnByb3Zlbg.t0ken.sig"
	oidcToken     = "eyJvaWRj.t0ken.sig"
	saSecret      = "service-s3cret"
	newPassword   = "another horse"
)

// fakeIdentity serves those methods of identity.v1 that the commands use, from data in memory. It adds the requests to
// the cloud's list of calls.
type fakeIdentity struct {
	identityv1.UnimplementedIdentityServiceServer
	cloud *fakeCloud

	mu        sync.Mutex
	orgs      []*identityv1.Org
	projects  []*identityv1.Project
	quotas    map[string]*identityv1.Quota
	users     []*identityv1.User
	passwords map[string]string
	accounts  []*identityv1.ServiceAccount
	keys      []*identityv1.Key
	records   []*identityv1.AuditRecord
	providers []*identityv1.LoginProvider
	groups    []*identityv1.Group
	members   map[string][]string // of each group
	// invited holds the invitations that the fake returns to every caller.
	invited []*identityv1.Invitation
	// ended maps each revoked token to its user.
	ended map[string]string
	// vouched is the last request of ExchangeToken.
	vouched *identityv1.ExchangeTokenRequest
	// revoking, if not nil, is called when RevokeToken begins.
	revoking func()
}

func newIdentity(c *fakeCloud) *fakeIdentity {
	f := &fakeIdentity{
		cloud: c, members: map[string][]string{}, quotas: map[string]*identityv1.Quota{}, passwords: map[string]string{"demo": password}, ended: map[string]string{},
		users: []*identityv1.User{{Id: "demo", Name: "Demo", Registered: true, HasPassword: true}},
		keys:  []*identityv1.Key{{Id: "k2", Use: "staged", CreatedAt: now.UnixMilli()}, {Id: "k1", Use: "primary", CreatedAt: now.UnixMilli()}},
	}
	for n := range 300 {
		outcome, message := "OK", ""
		if n%100 == 7 {
			outcome, message = "PERMISSION_DENIED", "ada may not"
		}
		f.records = append(f.records, &identityv1.AuditRecord{
			Id: fmt.Sprintf("r%03d", n), Time: now.Add(-time.Duration(n) * time.Minute).UnixMilli(), Principal: "ada", OrgId: "acme", ProjectId: "web",
			Method: "/vm.v1.VmService/CreateVm", Target: "name=web", Outcome: outcome, Message: message, RequestId: fmt.Sprint("q", n), Address: "10.0.0.9",
			Suppressed: uint64(n / 207 * 5),
		})
	}
	for n, call := range [][2]string{
		{"/vmcontroller.v1.VmService/DeleteVm", "object=shop-1 org_id=acme project_id=shop vm_id=" + id(1)},
		{"/vmcontroller.v1.VmService/StartVm", "org_id=acme project_id=shop vm_id=" + id(1)},
		{"/identity.v1.IdentityService/BindRole", "binding.org_id=acme binding.role=org:admin user_id=ada"},
		{"/identity.v1.IdentityService/CreateOrg", "id=acme name=The Shop"},
		{"/vmcontroller.v1.VmService/DeleteVm", "DELETE /api/v1/vms/" + id(1)},
		{"/credit.v1.CreditService/TopUpWallet", "org_id=acme project_id=shop"},
	} {
		f.records = append(f.records, &identityv1.AuditRecord{
			Id: fmt.Sprint("s", n), Time: now.Add(-20 * time.Hour).UnixMilli(), Principal: "ada", Method: call[0], Target: call[1], Outcome: "OK",
		})
	}
	return f
}

// tokens maps each token that the fake accepts to its user.
var tokens = map[string]string{tenantToken: "demo", adminToken: "admin", issuedToken: "ci", oidcToken: "ada", unprovenToken: "root", orgAdminToken: "olga"}

func (f *fakeIdentity) note(format string, args ...any) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+fmt.Sprintf(format, args...))
}

func find[T interface{ GetId() string }](all []T, kind, id string) (T, error) {
	for _, o := range all {
		if o.GetId() == id {
			return o, nil
		}
	}
	var none T
	return none, failed(codes.NotFound, "", "no %s %s", kind, id)
}

// remove removes the element with an ID from all. It returns an error, as find does, if there is none.
func remove[T interface{ GetId() string }](all *[]T, kind, id string) (*emptypb.Empty, error) {
	if _, err := find(*all, kind, id); err != nil {
		return nil, err
	}
	*all = slices.DeleteFunc(*all, func(o T) bool { return o.GetId() == id })
	return &emptypb.Empty{}, nil
}

func (f *fakeIdentity) IssueToken(_ context.Context, in *identityv1.IssueTokenRequest) (*identityv1.IssueTokenResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if want := f.passwords[in.GetUsername()]; want == "" || in.GetPassword() != want {
		return nil, failed(codes.Unauthenticated, "", "wrong user or password")
	}
	for token, user := range tokens {
		if user == in.GetUsername() {
			delete(f.ended, token)
			ttl := cmp.Or(time.Duration(in.GetTtlSeconds())*time.Second, time.Hour)
			out := &identityv1.IssueTokenResponse{Token: token, ExpiresAt: now.Add(ttl).UnixMilli(), OrgId: in.GetOrgId(), ProjectId: in.GetProjectId()}
			if in.GetProjectId() == "none" {
				return nil, refused("NO_ROLE_IN_SCOPE", "%s has no role in project none", user)
			}
			if p, err := find(f.projects, "project", in.GetProjectId()); err == nil {
				out.OrgId = p.GetOrgId()
			}
			return out, nil
		}
	}
	return nil, failed(codes.Internal, "", "the fake has no token for %s", in.GetUsername())
}

func (f *fakeIdentity) ListLoginProviders(context.Context, *identityv1.ListLoginProvidersRequest) (*identityv1.ListLoginProvidersResponse, error) {
	return &identityv1.ListLoginProvidersResponse{Providers: f.providers}, nil
}

func (f *fakeIdentity) ExchangeToken(_ context.Context, in *identityv1.ExchangeTokenRequest) (*identityv1.IssueTokenResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.vouched = in
	return &identityv1.IssueTokenResponse{Token: oidcToken, ExpiresAt: now.Add(time.Hour).UnixMilli()}, nil
}

func (f *fakeIdentity) holder(token string) *identityv1.WhoAmIResponse {
	me := &identityv1.WhoAmIResponse{
		PrincipalId: tokens[token], PrincipalName: strings.ToUpper(tokens[token]), Kind: "User", Proof: "password", OrgId: "default", ProjectId: "default",
		ExpiresAt: now.Add(time.Hour).UnixMilli(), TokenId: "jti-" + tokens[token],
		Bindings: []*identityv1.Binding{{Role: "project:member", OrgId: "default", ProjectId: "default"}},
	}
	if token == adminToken {
		me.OrgId, me.ProjectId, me.Proof, me.Bindings = "", "", "hostkey", []*identityv1.Binding{{Role: "system:admin"}}
	}
	if token == unprovenToken {
		me.Proof, me.Bindings = "none", nil
	}
	if token == orgAdminToken {
		u, _ := find(f.users, "user", "olga")
		me.OrgId, me.ProjectId, me.Bindings = "", "", u.GetBindings()
	}
	return me
}

// admitUnscoped returns the error of the control plane for a call that names no org, or no project, by olga, whose token
// has no scope and whose roles are all for whole orgs.
func (f *fakeIdentity) admitUnscoped(method string, req any) error {
	var org, project string
	if in, ok := req.(interface{ GetOrgId() string }); ok {
		org = in.GetOrgId()
	}
	t, inProject := req.(tenanted)
	if inProject {
		project = t.GetProjectId()
	}
	switch {
	case slices.Contains([]string{"WhoAmI", "ListProjects", "GetProject", "GetOrg", "GetUser"}, method):
	case slices.Contains([]string{"ListBindings", "ListAuditRecords", "ListGroups", "CreateProject", "CreateGroup", "AddGroupMember"}, method):
		if org == "" {
			return refused("TENANT_REQUIRED", "olga may not %s in the whole cloud: name the org with org_id", method)
		}
	case inProject && project == "":
		return refused("TENANT_REQUIRED", "olga has no role in any project: set project_id")
	}
	return nil
}

func (f *fakeIdentity) VerifyToken(_ context.Context, in *identityv1.VerifyTokenRequest) (*identityv1.VerifyTokenResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch token := in.GetToken(); {
	case tokens[token] == "":
		return &identityv1.VerifyTokenResponse{Reason: "the token is not valid"}, nil
	case f.ended[token] != "":
		return &identityv1.VerifyTokenResponse{Reason: "it is revoked"}, nil
	default:
		return &identityv1.VerifyTokenResponse{Valid: true, Holder: f.holder(token)}, nil
	}
}

func (f *fakeIdentity) WhoAmI(ctx context.Context, _ *identityv1.WhoAmIRequest) (*identityv1.WhoAmIResponse, error) {
	return f.holder(bearer(ctx)), nil
}

func (f *fakeIdentity) RevokeToken(ctx context.Context, in *identityv1.RevokeTokenRequest) (*emptypb.Empty, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.revoking != nil {
		f.revoking()
	}
	for token, who := range tokens {
		if token == in.GetToken() || "jti-"+who == in.GetTokenId() {
			f.ended[token] = who
			f.note("ended the token of %s, said by %s", who, tokens[bearer(ctx)])
			return &emptypb.Empty{}, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no token %s", in.GetTokenId())
}

func (f *fakeIdentity) RevokeTokens(_ context.Context, in *identityv1.RevokeTokensRequest) (*emptypb.Empty, error) {
	f.note("ended all tokens of %s", in.GetUserId())
	return &emptypb.Empty{}, nil
}

func (f *fakeIdentity) CreateUser(_ context.Context, in *identityv1.CreateUserRequest) (*identityv1.User, error) {
	if _, err := find(f.users, "user", in.GetId()); err == nil {
		return nil, failed(codes.AlreadyExists, "", "there is a user %s", in.GetId())
	}
	u := &identityv1.User{Id: in.GetId(), Name: cmp.Or(in.GetName(), in.GetId()), CreatedAt: now.UnixMilli()}
	f.users = append(f.users, u)
	return u, nil
}

func (f *fakeIdentity) GetUser(_ context.Context, in *identityv1.GetUserRequest) (*identityv1.User, error) {
	return find(f.users, "user", in.GetId())
}

func (f *fakeIdentity) ListUsers(context.Context, *identityv1.ListUsersRequest) (*identityv1.ListUsersResponse, error) {
	return &identityv1.ListUsersResponse{Users: f.users}, nil
}

func (f *fakeIdentity) user(id string, change func(*identityv1.User)) (*identityv1.User, error) {
	u, err := find(f.users, "user", id)
	if err == nil {
		change(u)
		u.Registered = u.HasPassword || len(u.Identities) > 0
	}
	return u, err
}

func (f *fakeIdentity) DisableUser(_ context.Context, in *identityv1.DisableUserRequest) (*identityv1.User, error) {
	return f.user(in.GetUserId(), func(u *identityv1.User) { u.Disabled = true })
}

func (f *fakeIdentity) EnableUser(_ context.Context, in *identityv1.EnableUserRequest) (*identityv1.User, error) {
	return f.user(in.GetUserId(), func(u *identityv1.User) { u.Disabled = false })
}

func (f *fakeIdentity) DeleteUser(_ context.Context, in *identityv1.DeleteUserRequest) (*emptypb.Empty, error) {
	return remove(&f.users, "user", in.GetUserId())
}

func (f *fakeIdentity) SetPassword(_ context.Context, in *identityv1.SetPasswordRequest) (*emptypb.Empty, error) {
	if len(in.GetPassword()) < 8 {
		return nil, failed(codes.InvalidArgument, "password", "password: must be 8 to 256 bytes")
	}
	if in.GetUserId() == "demo" && in.GetCurrentPassword() != f.passwords["demo"] {
		return nil, failed(codes.PermissionDenied, "", "current_password is not your password; without one, ask an administrator")
	}
	_, err := f.user(in.GetUserId(), func(u *identityv1.User) { u.HasPassword = true })
	f.passwords[in.GetUserId()] = in.GetPassword()
	return &emptypb.Empty{}, err
}

func (f *fakeIdentity) LinkIdentity(_ context.Context, in *identityv1.LinkIdentityRequest) (*identityv1.User, error) {
	return f.user(in.GetUserId(), func(u *identityv1.User) { u.Identities = append(u.Identities, in.GetIdentity()) })
}

func (f *fakeIdentity) UnlinkIdentity(_ context.Context, in *identityv1.UnlinkIdentityRequest) (*identityv1.User, error) {
	return f.user(in.GetUserId(), func(u *identityv1.User) {
		u.Identities = slices.DeleteFunc(u.Identities, func(i *identityv1.Identity) bool { return proto.Equal(i, in.GetIdentity()) })
	})
}

func (f *fakeIdentity) BindRole(_ context.Context, in *identityv1.BindRoleRequest) (*identityv1.BindRoleResponse, error) {
	if in.GetGroupId() != "" {
		g, err := find(f.groups, "group", in.GetGroupId())
		if err == nil {
			g.Bindings = append(g.Bindings, in.GetBinding())
		}
		return &identityv1.BindRoleResponse{}, err
	}
	if in.GetUserId() == "bob" { // bob belongs to another org, so he must accept the role first
		f.invited = append(f.invited, &identityv1.Invitation{Binding: in.GetBinding(), InvitedBy: "demo", ExpiresAt: now.Add(720 * time.Hour).UnixMilli()})
		return &identityv1.BindRoleResponse{Pending: true}, nil
	}
	u, err := find(f.users, "user", in.GetUserId())
	if err == nil && !u.GetRegistered() {
		err = failed(codes.FailedPrecondition, "", "%s has no credential", u.GetId())
	}
	if err == nil {
		u.Bindings = append(u.Bindings, in.GetBinding())
	}
	return &identityv1.BindRoleResponse{}, err
}

func (f *fakeIdentity) ListInvitations(context.Context, *identityv1.ListInvitationsRequest) (*identityv1.ListInvitationsResponse, error) {
	return &identityv1.ListInvitationsResponse{Invitations: f.invited}, nil
}

func (f *fakeIdentity) AcceptInvitation(_ context.Context, in *identityv1.AcceptInvitationRequest) (*emptypb.Empty, error) {
	return f.answer(in.GetBinding(), "accepted")
}

func (f *fakeIdentity) DeclineInvitation(_ context.Context, in *identityv1.DeclineInvitationRequest) (*emptypb.Empty, error) {
	return f.answer(in.GetBinding(), "declined")
}

func (f *fakeIdentity) answer(b *identityv1.Binding, how string) (*emptypb.Empty, error) {
	f.note("%s %s in %s/%s", how, b.GetRole(), b.GetOrgId(), b.GetProjectId())
	f.invited = slices.DeleteFunc(f.invited, func(i *identityv1.Invitation) bool { return proto.Equal(i.GetBinding(), b) })
	return &emptypb.Empty{}, nil
}

func (f *fakeIdentity) UnbindRole(_ context.Context, in *identityv1.UnbindRoleRequest) (*emptypb.Empty, error) {
	_, err := f.user(in.GetUserId(), func(u *identityv1.User) {
		u.Bindings = slices.DeleteFunc(u.Bindings, func(b *identityv1.Binding) bool { return proto.Equal(b, in.GetBinding()) })
	})
	return &emptypb.Empty{}, err
}

func (f *fakeIdentity) ListBindings(_ context.Context, in *identityv1.ListBindingsRequest) (*identityv1.ListBindingsResponse, error) {
	f.note("of %s/%s", in.GetOrgId(), in.GetProjectId())
	resp := &identityv1.ListBindingsResponse{}
	for _, u := range f.users {
		for _, b := range u.GetBindings() {
			if in.GetOrgId() == "" || b.GetOrgId() == in.GetOrgId() {
				resp.Grants = append(resp.Grants, &identityv1.Grant{UserId: u.GetId(), Binding: b})
			}
		}
	}
	for _, g := range f.groups {
		for _, b := range g.GetBindings() {
			resp.Grants = append(resp.Grants, &identityv1.Grant{GroupId: g.GetId(), Binding: b})
		}
	}
	for _, i := range f.invited {
		resp.Grants = append(resp.Grants, &identityv1.Grant{UserId: "bob", Binding: i.GetBinding(), Pending: true, ExpiresAt: i.GetExpiresAt()})
	}
	return resp, nil
}

func (f *fakeIdentity) CreateServiceAccount(_ context.Context, in *identityv1.CreateServiceAccountRequest) (*identityv1.CreateServiceAccountResponse, error) {
	a := &identityv1.ServiceAccount{
		Id: fmt.Sprint("sa-", len(f.accounts)+1), Name: in.GetName(), OrgId: cmp.Or(in.GetOrgId(), "default"), ProjectId: cmp.Or(in.GetProjectId(), "default"),
		Roles: in.GetRoles(), CreatedAt: now.UnixMilli(), CreatedBy: "demo", ExpiresAt: in.GetExpiresAt(),
	}
	a.Username = a.GetName() + "@" + a.GetOrgId() + "/" + a.GetProjectId()
	f.accounts = append(f.accounts, a)
	return &identityv1.CreateServiceAccountResponse{Account: a, Secret: saSecret}, nil
}

func (f *fakeIdentity) ListServiceAccounts(context.Context, *identityv1.ListServiceAccountsRequest) (*identityv1.ListServiceAccountsResponse, error) {
	return &identityv1.ListServiceAccountsResponse{Accounts: f.accounts}, nil
}

func (f *fakeIdentity) DeleteServiceAccount(_ context.Context, in *identityv1.DeleteServiceAccountRequest) (*emptypb.Empty, error) {
	return remove(&f.accounts, "service account", in.GetId())
}

func (f *fakeIdentity) CreateOrg(_ context.Context, in *identityv1.CreateOrgRequest) (*identityv1.Org, error) {
	if strings.ContainsRune(in.GetId(), ' ') {
		return nil, failed(codes.InvalidArgument, "id", "must be 1 to 63 of A-Z a-z 0-9 . _ @ -")
	}
	o := &identityv1.Org{Id: in.GetId(), Name: cmp.Or(in.GetName(), in.GetId()), CreatedAt: now.UnixMilli()}
	f.orgs = append(f.orgs, o)
	return o, nil
}

func (f *fakeIdentity) GetOrg(_ context.Context, in *identityv1.GetOrgRequest) (*identityv1.Org, error) {
	return find(f.orgs, "org", in.GetId())
}

func (f *fakeIdentity) ListOrgs(context.Context, *identityv1.ListOrgsRequest) (*identityv1.ListOrgsResponse, error) {
	return &identityv1.ListOrgsResponse{Orgs: f.orgs}, nil
}

func (f *fakeIdentity) DeleteOrg(_ context.Context, in *identityv1.DeleteOrgRequest) (*emptypb.Empty, error) {
	if slices.ContainsFunc(f.projects, func(p *identityv1.Project) bool { return p.GetOrgId() == in.GetId() }) {
		return nil, failed(codes.FailedPrecondition, "", "org %s has projects", in.GetId())
	}
	return remove(&f.orgs, "org", in.GetId())
}

func (f *fakeIdentity) CreateProject(_ context.Context, in *identityv1.CreateProjectRequest) (*identityv1.Project, error) {
	p := &identityv1.Project{Id: in.GetId(), OrgId: in.GetOrgId(), Name: cmp.Or(in.GetName(), in.GetId()), CreatedAt: now.UnixMilli()}
	f.projects = append(f.projects, p)
	f.quotas[p.GetId()] = in.GetQuota()
	return p, nil
}

func (f *fakeIdentity) GetProject(_ context.Context, in *identityv1.GetProjectRequest) (*identityv1.Project, error) {
	p, err := find(f.projects, "project", in.GetId())
	// Scripts use these projects without creating them.
	if org := map[string]string{"default": "default", "shop": "acme"}[in.GetId()]; err != nil && org != "" {
		return &identityv1.Project{Id: in.GetId(), OrgId: org}, nil
	}
	return p, err
}

func (f *fakeIdentity) ListProjects(_ context.Context, in *identityv1.ListProjectsRequest) (*identityv1.ListProjectsResponse, error) {
	resp := &identityv1.ListProjectsResponse{}
	for _, p := range f.projects {
		if in.GetOrgId() == "" || p.GetOrgId() == in.GetOrgId() {
			resp.Projects = append(resp.Projects, p)
		}
	}
	return resp, nil
}

func (f *fakeIdentity) DeleteProject(_ context.Context, in *identityv1.DeleteProjectRequest) (*emptypb.Empty, error) {
	if p, err := find(f.projects, "project", in.GetId()); err == nil && p.GetOrgId() != in.GetOrgId() {
		return nil, failed(codes.InvalidArgument, "org_id", "org_id: is not the project's")
	}
	return remove(&f.projects, "project", in.GetId())
}

func (f *fakeIdentity) GetQuota(_ context.Context, in *identityv1.GetQuotaRequest) (*identityv1.QuotaStatus, error) {
	q := &identityv1.QuotaStatus{
		OrgId: in.GetOrgId(), ProjectId: in.GetProjectId(), Quota: f.quotas[in.GetProjectId()],
		Used: &identityv1.Usage{Vcpus: 3, MemoryMib: 2560, StorageGib: 40, Vms: 2},
	}
	if in.GetOrgId() != "" && in.GetProjectId() == "" {
		q.Quota, q.Used.Projects = f.quotas["org "+in.GetOrgId()], new(uint64(2))
	}
	if org := f.quotas["org "+in.GetOrgId()]; org != nil && in.GetProjectId() != "" {
		q.Org = &identityv1.QuotaStatus{OrgId: in.GetOrgId(), Quota: org, Used: &identityv1.Usage{Vcpus: 7, MemoryMib: 4096}}
	}
	return q, nil
}

func (f *fakeIdentity) GetDefaultQuota(context.Context, *identityv1.GetDefaultQuotaRequest) (*identityv1.DefaultQuota, error) {
	return &identityv1.DefaultQuota{Quota: f.quotas["default"]}, nil
}

func (f *fakeIdentity) SetDefaultQuota(_ context.Context, in *identityv1.SetDefaultQuotaRequest) (*identityv1.DefaultQuota, error) {
	f.quotas["default"] = in.GetQuota()
	return &identityv1.DefaultQuota{Quota: in.GetQuota()}, nil
}

func (f *fakeIdentity) SetQuota(ctx context.Context, in *identityv1.SetQuotaRequest) (*identityv1.QuotaStatus, error) {
	key := in.GetProjectId()
	if key == "" {
		key = "org " + in.GetOrgId()
	}
	f.quotas[key] = in.GetQuota()
	return f.GetQuota(ctx, &identityv1.GetQuotaRequest{OrgId: in.GetOrgId(), ProjectId: in.GetProjectId()})
}

func (f *fakeIdentity) ListKeys(context.Context, *identityv1.ListKeysRequest) (*identityv1.ListKeysResponse, error) {
	return &identityv1.ListKeysResponse{Keys: f.keys}, nil
}

func (f *fakeIdentity) RotateKeys(_ context.Context, in *identityv1.RotateKeysRequest) (*identityv1.ListKeysResponse, error) {
	if !in.GetForce() {
		return nil, failed(codes.FailedPrecondition, "", "k2 is staged since 5m, others may not know it before 1h")
	}
	f.keys[0].Use, f.keys[1].Use, f.keys[1].EndsAt = "primary", "secondary", now.Add(720*time.Hour).UnixMilli()
	return &identityv1.ListKeysResponse{Keys: f.keys}, nil
}

func (f *fakeIdentity) RevokeKey(_ context.Context, in *identityv1.RevokeKeyRequest) (*identityv1.ListKeysResponse, error) {
	_, err := remove(&f.keys, "key", in.GetKeyId())
	return &identityv1.ListKeysResponse{Keys: f.keys}, err
}

func (f *fakeIdentity) ListAuditRecords(_ context.Context, in *identityv1.ListAuditRecordsRequest) (*identityv1.ListAuditRecordsResponse, error) {
	f.note("audit org=%s user=%s method=%s outcome=%s since=%s until=%s page=%s", in.GetOrgId(), in.GetPrincipal(), in.GetMethod(), in.GetOutcome(),
		stamp(in.GetSince()), stamp(in.GetUntil()), in.GetPageToken())
	var kept []*identityv1.AuditRecord
	for _, r := range f.records {
		if r.GetTime() >= in.GetSince() && (in.GetUntil() == 0 || r.GetTime() < in.GetUntil()) && (in.GetOutcome() == "" || (in.GetOutcome() == "OK") == (r.GetOutcome() == "OK")) {
			kept = append(kept, r)
		}
	}
	// A page has three records, or fewer.
	from, _ := strconv.Atoi(in.GetPageToken())
	if to := from + min(3, int(in.GetPageSize())); to < len(kept) {
		return &identityv1.ListAuditRecordsResponse{Records: kept[from:to], NextPageToken: strconv.Itoa(to)}, nil
	}
	return &identityv1.ListAuditRecordsResponse{Records: kept[from:]}, nil
}

func stamp(ms int64) string {
	if ms == 0 {
		return "-"
	}
	return time.UnixMilli(ms).UTC().Format(time.RFC3339)
}
