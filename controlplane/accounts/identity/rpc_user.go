package identity

import (
	"context"

	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (r *server) CreateUser(ctx context.Context, in *identityv1.CreateUserRequest) (*identityv1.User, error) {
	if err := admit(ctx, "CreateUser"); err != nil {
		return nil, err
	}
	return userResponse(createUserCommand.Call(ctx, r.s.opts.Commands, newName{ID: cloud.UserID(in.GetId()), Name: in.GetName(), Home: cloud.OrgID(in.GetOrgId())}))
}

func (r *server) GetUser(ctx context.Context, in *identityv1.GetUserRequest) (*identityv1.User, error) {
	if err := admit(ctx, "GetUser"); err != nil {
		return nil, err
	}
	id, err := r.s.principalID(ctx, in.GetId(), cloud.Tenant{})
	if err != nil {
		return nil, err
	}
	if err := cloud.CheckCallerID("id", string(id)); err != nil {
		return nil, err
	}
	u, err := r.s.user(ctx, id)
	if err != nil {
		return nil, err
	}
	return onWire(u), nil
}

func (r *server) ListUsers(ctx context.Context, in *identityv1.ListUsersRequest) (*identityv1.ListUsersResponse, error) {
	if err := admit(ctx, "ListUsers"); err != nil {
		return nil, err
	}
	list, next, err := r.s.users(ctx, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListUsersResponse{NextPageToken: next}
	for _, u := range list {
		out.Users = append(out.Users, onWire(u))
	}
	return out, nil
}

func (r *server) UpdateUser(ctx context.Context, in *identityv1.UpdateUserRequest) (*identityv1.User, error) {
	if err := admit(ctx, "UpdateUser"); err != nil {
		return nil, err
	}
	id := cloud.UserID(in.GetUserId())
	if in.Name != nil {
		return userResponse(renameUserCommand.Call(ctx, r.s.opts.Commands, newDisplayName[cloud.UserID]{id, in.GetName()}))
	}
	if err := cloud.CheckCallerID("user_id", string(id)); err != nil {
		return nil, err
	}
	u, err := r.s.user(ctx, id)
	if err != nil {
		return nil, err
	}
	return onWire(u), nil
}

func (r *server) DisableUser(ctx context.Context, in *identityv1.DisableUserRequest) (*identityv1.User, error) {
	if err := admit(ctx, "DisableUser"); err != nil {
		return nil, err
	}
	return userResponse(setDisabledCommand.Call(ctx, r.s.opts.Commands, newState{cloud.UserID(in.GetUserId()), true}))
}

func (r *server) EnableUser(ctx context.Context, in *identityv1.EnableUserRequest) (*identityv1.User, error) {
	if err := admit(ctx, "EnableUser"); err != nil {
		return nil, err
	}
	return userResponse(setDisabledCommand.Call(ctx, r.s.opts.Commands, newState{cloud.UserID(in.GetUserId()), false}))
}

func (r *server) DeleteUser(ctx context.Context, in *identityv1.DeleteUserRequest) (*emptypb.Empty, error) {
	if err := admit(ctx, "DeleteUser"); err != nil {
		return nil, err
	}
	if _, err := deleteUserCommand.Call(ctx, r.s.opts.Commands, cloud.UserID(in.GetUserId())); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (r *server) SetPassword(ctx context.Context, in *identityv1.SetPasswordRequest) (*emptypb.Empty, error) {
	if err := r.admitOwnUser(ctx, "SetPassword", in.GetUserId(), "may set only their own password"); err != nil {
		return nil, err
	}
	if err := password.Check(in.GetPassword()); err != nil {
		return nil, err
	}
	if caller := auth.CallerOf(ctx); !caller.IsCloudAdmin() {
		q := tokenRequest{User: caller.User, Password: in.GetCurrentPassword(), Kind: token.User, Address: caller.Address}
		if u, err := r.s.authenticate(ctx, q); err != nil {
			return nil, err
		} else if u == nil {
			return nil, fault.New(fault.PermissionDenied, "current_password is not your password; without one, ask an administrator")
		}
	}
	h, err := r.s.passwords.Hash(ctx, cloud.UserID(in.GetUserId()), in.GetPassword())
	if err != nil {
		return nil, err
	}
	if _, err := setPasswordCommand.Call(ctx, r.s.opts.Commands, newPassword{cloud.UserID(in.GetUserId()), h}); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (r *server) identity(in *identityv1.Identity) (principal.Identity, error) {
	if !r.s.providers.Has(in.GetProvider()) {
		return principal.Identity{}, fault.Invalid("identity.provider", "there is no login provider %q", in.GetProvider())
	}
	return principal.Identity{Provider: in.GetProvider(), Subject: in.GetSubject(), Issuer: r.s.providers.Issuer(in.GetProvider())}, nil
}

func (r *server) LinkIdentity(ctx context.Context, in *identityv1.LinkIdentityRequest) (*identityv1.User, error) {
	if err := admit(ctx, "LinkIdentity"); err != nil {
		return nil, err
	}
	i, err := r.identity(in.GetIdentity())
	if err != nil {
		return nil, err
	}
	return userResponse(linkCommand.Call(ctx, r.s.opts.Commands, newIdentity{cloud.UserID(in.GetUserId()), i}))
}

func (r *server) UnlinkIdentity(ctx context.Context, in *identityv1.UnlinkIdentityRequest) (*identityv1.User, error) {
	if err := admit(ctx, "UnlinkIdentity"); err != nil {
		return nil, err
	}
	i := principal.Identity{Provider: in.GetIdentity().GetProvider(), Subject: in.GetIdentity().GetSubject()}
	if i.Provider == "" || i.Subject == "" {
		return nil, fault.Invalid("identity", "provider and subject are required")
	}
	return userResponse(unlinkCommand.Call(ctx, r.s.opts.Commands, newIdentity{cloud.UserID(in.GetUserId()), i}))
}

func (r *server) CreateServiceAccount(ctx context.Context, in *identityv1.CreateServiceAccountRequest) (*identityv1.CreateServiceAccountResponse, error) {
	at, err := auth.Admit(ctx, service+"CreateServiceAccount", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	n := principal.NewAccount{Tenant: at, Name: in.GetName(), Expires: in.GetExpiresAt(), By: auth.CallerOf(ctx).Name()}
	for _, role := range in.GetRoles() {
		n.Roles = append(n.Roles, cloud.Role(role))
	}
	if err := n.Check(r.s.now().UnixMilli()); err != nil {
		return nil, err
	}
	secret := principal.NewSecret(r.s.opts.Key)
	n.ID, n.Sealed = secret.ID, secret.Sealed
	u, err := createAccountCommand.Call(ctx, r.s.opts.Commands, n)
	if err != nil {
		return nil, err
	}
	return &identityv1.CreateServiceAccountResponse{Account: accountOnWire(&u), Secret: secret.Text}, nil
}

func (r *server) ListServiceAccounts(ctx context.Context, in *identityv1.ListServiceAccountsRequest) (*identityv1.ListServiceAccountsResponse, error) {
	at, err := auth.Admit(ctx, service+"ListServiceAccounts", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	list, next, err := r.s.accounts(ctx, at, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &identityv1.ListServiceAccountsResponse{NextPageToken: next}
	for _, u := range list {
		out.Accounts = append(out.Accounts, accountOnWire(u))
	}
	return out, nil
}

func (r *server) GetServiceAccount(ctx context.Context, in *identityv1.GetServiceAccountRequest) (*identityv1.ServiceAccount, error) {
	at, id, err := r.admitAccount(ctx, "GetServiceAccount", in)
	if err != nil {
		return nil, err
	}
	u, err := r.s.account(ctx, at, id)
	if err != nil {
		return nil, err
	}
	return accountOnWire(u), nil
}

// admitAccount authorizes a call about a service account of a project. It returns the project and the ID of the account,
// which the request may name by its username.
func (r *server) admitAccount(ctx context.Context, method string, in interface {
	GetOrgId() string
	GetProjectId() string
	GetId() string
}) (at cloud.Tenant, id cloud.UserID, err error) {
	if at, err = auth.Admit(ctx, auth.Method(service+method), in.GetOrgId(), in.GetProjectId()); err != nil {
		return at, "", err
	}
	if id, err = r.s.principalID(ctx, in.GetId(), at); err != nil {
		return at, "", err
	}
	return at, id, cloud.CheckCallerID("id", string(id))
}

func (r *server) UpdateServiceAccount(ctx context.Context, in *identityv1.UpdateServiceAccountRequest) (*identityv1.UpdateServiceAccountResponse, error) {
	at, id, err := r.admitAccount(ctx, "UpdateServiceAccount", in)
	if err != nil {
		return nil, err
	}
	change := principal.AccountChange{Tenant: at, ID: id, Expires: in.ExpiresAt}
	for _, role := range in.GetRoles() {
		change.Roles = append(change.Roles, cloud.Role(role))
	}
	if err := change.Check(r.s.now().UnixMilli()); err != nil {
		return nil, err
	}
	var secret principal.Secret
	if in.GetNewSecret() {
		secret = principal.NewSecretFor(r.s.opts.Key, id)
		change.Sealed = secret.Sealed
	}
	u, err := updateAccountCommand.Call(ctx, r.s.opts.Commands, change)
	if err != nil {
		return nil, err
	}
	return &identityv1.UpdateServiceAccountResponse{Account: accountOnWire(&u), Secret: secret.Text}, nil
}

func (r *server) DeleteServiceAccount(ctx context.Context, in *identityv1.DeleteServiceAccountRequest) (*emptypb.Empty, error) {
	at, err := auth.Admit(ctx, service+"DeleteServiceAccount", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	if err := cloud.CheckCallerID("id", in.GetId()); err != nil {
		return nil, err
	}
	if _, err := deleteAccountCommand.Call(ctx, r.s.opts.Commands, oldAccount{at, cloud.UserID(in.GetId())}); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func accountOnWire(u *principal.User) *identityv1.ServiceAccount {
	a := u.Account
	out := &identityv1.ServiceAccount{
		Id: string(u.ID), Name: a.Name, OrgId: string(a.Tenant.Org), ProjectId: string(a.Tenant.Project), CreatedAt: u.CreatedAt,
		CreatedBy: a.CreatedBy, ExpiresAt: a.Expires, Username: a.Username(),
	}
	for _, b := range u.Bindings {
		out.Roles = append(out.Roles, string(b.Role))
	}
	return out
}

func userResponse(u principal.User, err error) (*identityv1.User, error) {
	if err != nil {
		return nil, err
	}
	return onWire(&u), nil
}

func onWire(u *principal.User) *identityv1.User {
	out := &identityv1.User{
		Id: string(u.ID), Name: u.Name, Registered: u.Registered(), CreatedAt: u.CreatedAt, Kind: string(u.Kind()), Disabled: u.Disabled,
		HasPassword: u.Password != nil, Bindings: bindingsOnWire(u.Bindings), OrgId: string(u.HomeOrg()),
	}
	for _, g := range u.Groups {
		out.Groups = append(out.Groups, &identityv1.GroupRef{OrgId: string(g.Org), GroupId: string(g.ID)})
	}
	for _, i := range u.Identities {
		out.Identities = append(out.Identities, &identityv1.Identity{Provider: i.Provider, Subject: i.Subject})
	}
	return out
}

func bindingsOnWire(list []cloud.Binding) (out []*identityv1.Binding) {
	for _, b := range list {
		out = append(out, bindingOnWire(b))
	}
	return out
}
