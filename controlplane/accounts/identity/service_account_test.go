package identity

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestServiceAccounts creates service accounts and checks that each has its roles in its own project only, until it is
// deleted or expires.
func TestServiceAccounts(t *testing.T) {
	w := newWorld(t)
	w.user("ada", cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"})
	w.user("bob", cloud.Binding{Role: cloud.ProjectMember, Org: "acme", Project: "web"})
	w.user("eve", cloud.Binding{Role: cloud.ProjectAdmin, Org: "evil", Project: "lair"})
	r := &server{s: w.first}
	make := func(ctx context.Context, name string, expires cloud.Time, roles ...string) (*identityv1.CreateServiceAccountResponse, error) {
		return r.CreateServiceAccount(ctx, &identityv1.CreateServiceAccountRequest{Name: name, Roles: roles, ExpiresAt: expires})
	}
	ada, bob, eve := w.login("ada"), w.login("bob"), w.login("eve")
	made, err := make(ada, "deploy", w.at.Add(time.Hour).UnixMilli(), "project:viewer")
	require.NoError(t, err)
	id := cloud.UserID(made.GetAccount().GetId())
	for name, c := range map[string]struct {
		err  error
		says string
	}{
		"by a member":              {errOf(make(bob, "x", 0, "project:viewer")), "may not CreateServiceAccount"},
		"twice":                    {errOf(make(ada, "deploy", 0, "project:viewer")), "has a service account called deploy"},
		"with a role of an org":    {errOf(make(ada, "x", 0, "org:admin")), "not a role in a project"},
		"with a role of the cloud": {errOf(make(ada, "x", 0, "system:admin")), "not a role in a project"},
		"with none":                {errOf(make(ada, "x", 0)), "needs a role"},
		"that is over":             {errOf(make(ada, "x", 1, "project:viewer")), "over already"},
		"by a name that is none":   {errOf(make(ada, "X Y", 0, "project:viewer")), "name"},
		"in another's project": {func() error {
			_, err := r.CreateServiceAccount(eve, &identityv1.CreateServiceAccountRequest{OrgId: "acme", ProjectId: "web", Name: "x", Roles: []string{"project:viewer"}})
			return err
		}(), "no project web"},
		"deleted from elsewhere": {func() error {
			_, err := r.DeleteServiceAccount(eve, &identityv1.DeleteServiceAccountRequest{Id: string(id)})
			return err
		}(), "no service account"},
		"given a password": {func() error {
			_, err := r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: string(id), Password: secret})
			return err
		}(), "is a service account"},
		"given a role": {w.bind(string(id), cloud.Binding{Role: cloud.SystemAdmin}), "is a service account"},
	} {
		t.Run(name, func(t *testing.T) { require.ErrorContains(t, c.err, c.says) })
	}

	text := w.token(w.first, tokenRequest{User: id, Password: made.GetSecret(), Org: "evil", Project: "lair"})
	caller, err := w.first.Verify(t.Context(), text)
	require.NoError(t, err)
	require.Equal(t, cloud.ProofAppCred, caller.Proof)
	require.Equal(t, cloud.Tenant{Org: "acme", Project: "web"}, caller.Scope, "whatever scope is asked for")
	ctx := w.as(w.first, text)
	_, err = auth.Admit(ctx, "/vmcontroller.v1.VmService/GetVm", "", "")
	require.NoError(t, err)
	_, err = auth.Admit(ctx, "/vmcontroller.v1.VmService/CreateVm", "", "")
	require.ErrorContains(t, err, "may not CreateVm")
	_, proven, err := w.first.token(t.Context(), tokenRequest{User: id, Password: made.GetSecret() + "x"})
	require.NoError(t, err)
	require.False(t, proven)
	_, proven, err = w.first.token(t.Context(), tokenRequest{User: id, Password: made.GetSecret(), Kind: token.User})
	require.NoError(t, err)
	require.False(t, proven, "it is no user")

	long := w.token(w.first, tokenRequest{User: id, Password: made.GetSecret(), TTL: token.MaxTTL})
	require.NoError(t, errOf(w.first.Verify(t.Context(), long)))
	w.wait(time.Hour)
	require.ErrorContains(t, errOf(w.first.Verify(t.Context(), long)), "no longer valid", "a token of an account ends with the account")
	_, proven, err = w.first.token(t.Context(), tokenRequest{User: id, Password: made.GetSecret()})
	require.NoError(t, err)
	require.False(t, proven, "its time is over")
	other, err := make(w.login("ada"), "other", 0, "project:member")
	require.NoError(t, err)
	list, err := r.ListServiceAccounts(w.login("ada"), &identityv1.ListServiceAccountsRequest{})
	require.NoError(t, err)
	require.Len(t, list.GetAccounts(), 2)
	text = w.token(w.first, tokenRequest{User: cloud.UserID(other.GetAccount().GetId()), Password: other.GetSecret()})
	_, err = r.DeleteServiceAccount(w.login("ada"), &identityv1.DeleteServiceAccountRequest{Id: other.GetAccount().GetId()})
	require.NoError(t, err)
	_, err = w.first.Verify(t.Context(), text)
	require.ErrorContains(t, err, "no longer valid")
}

// TestServiceAccountCannotGrantAccess checks that a service account with the role project:admin is refused every call
// that gives access beyond the life of the account, or that removes access of others. A user with that role may make
// these calls.
func TestServiceAccountCannotGrantAccess(t *testing.T) {
	w := newWorld(t)
	admin := cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"}
	w.user("ada", admin)
	r := &server{s: w.first}
	made, err := r.CreateServiceAccount(w.login("ada"), &identityv1.CreateServiceAccountRequest{Name: "ci", Roles: []string{"project:admin"}})
	require.NoError(t, err)
	id := made.GetAccount().GetId()
	account := w.as(w.first, w.token(w.first, tokenRequest{User: cloud.UserID(id), Password: made.GetSecret()}))
	_, err = auth.Admit(account, createVM, "", "")
	require.NoError(t, err, "the account may work in its project")
	viewer := oneOnWire(cloud.Binding{Role: cloud.ProjectViewer, Org: "acme", Project: "web"})
	for name, call := range map[string]func(ctx context.Context) error{
		"give a role": func(ctx context.Context) error {
			return errOf(r.BindRole(ctx, &identityv1.BindRoleRequest{UserId: "ada", Binding: viewer}))
		},
		"give itself a role": func(ctx context.Context) error {
			return errOf(r.BindRole(ctx, &identityv1.BindRoleRequest{UserId: id, Binding: viewer}))
		},
		"create an account": func(ctx context.Context) error {
			return errOf(r.CreateServiceAccount(ctx, &identityv1.CreateServiceAccountRequest{Name: "more", Roles: []string{"project:viewer"}}))
		},
		"change an account": func(ctx context.Context) error {
			return errOf(r.UpdateServiceAccount(ctx, &identityv1.UpdateServiceAccountRequest{Id: id, Roles: []string{"project:viewer"}}))
		},
		"set a user's password": func(ctx context.Context) error {
			return errOf(r.SetPassword(ctx, &identityv1.SetPasswordRequest{UserId: "ada", Password: "another one", CurrentPassword: secret}))
		},
		"set a password of its own": func(ctx context.Context) error {
			return errOf(r.SetPassword(ctx, &identityv1.SetPasswordRequest{UserId: id, Password: "another one", CurrentPassword: made.GetSecret()}))
		},
		"revoke a user's tokens": func(ctx context.Context) error {
			return errOf(r.RevokeTokens(ctx, &identityv1.RevokeTokensRequest{UserId: "ada"}))
		},
	} {
		err := call(account)
		require.True(t, fault.Is(err, fault.PermissionDenied), "%s: %v", name, err)
	}
	require.NoError(t, w.grant(w.login("ada"), "ada", cloud.Binding{Role: cloud.ProjectViewer, Org: "acme", Project: "web"}), "the user may")
	w.user("mallory", evil)
	err = errOf(r.RevokeTokens(w.login("mallory"), &identityv1.RevokeTokensRequest{UserId: id}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "the administrator of another org revokes the account's tokens: %v", err)
}

// TestAccountSecretIsShownOnce repeats a CreateServiceAccount request with the same idempotency key. The second
// response must be AlreadyExists without the secret, because the stored records contain no response with a secret.
func TestAccountSecretIsShownOnce(t *testing.T) {
	w := newWorld(t)
	w.user("ada", cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"})
	ada := w.login("ada")
	auth.CallerOf(ada).IdempotencyKey = "one key"
	ask := &identityv1.CreateServiceAccountRequest{Name: "ci", Roles: []string{"project:viewer"}}
	made, err := (&server{s: w.first}).CreateServiceAccount(ada, ask)
	require.NoError(t, err)
	require.NotEmpty(t, made.GetSecret())
	again, err := (&server{s: w.first}).CreateServiceAccount(ada, ask)
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	require.Empty(t, again.GetSecret())
}
