package identity

import (
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestTokenNeedsACorrectPassword requests tokens with correct, wrong and missing passwords, and for names that do not
// exist. Only a correct password may give an authenticated token. For an unauthenticated token, WhoAmI must report only
// the claimed name.
func TestTokenNeedsACorrectPassword(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	_, err := createUserCommand.Call(t.Context(), w.first.opts.Commands, newName{ID: "bare"})
	require.NoError(t, err)
	long := make([]byte, password.Max+1)
	for _, c := range []struct {
		name, user, password string
		proof                cloud.Proof
	}{
		{"the correct password", "ada", secret, cloud.ProofPassword},
		{"a wrong password", "ada", secret + "r", cloud.ProofNone},
		{"no password", "ada", "", cloud.ProofNone},
		{"a password that is too long", "ada", string(long), cloud.ProofNone},
		{"a user that does not exist", "nobody", secret, cloud.ProofNone},
		{"a user without a credential", "bare", "", cloud.ProofNone},
		{"the administrator, who has no password", "admin", "", cloud.ProofNone},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := w.token(w.first, tokenRequest{User: cloud.UserID(c.user), Password: c.password, Address: c.name})
			caller, err := w.first.Verify(t.Context(), text)
			require.NoError(t, err)
			require.Equal(t, c.proof, caller.Proof)
			require.EqualValues(t, c.user, caller.User)
			if c.proof == cloud.ProofNone {
				require.Empty(t, caller.Bindings, "an unauthenticated token must have no roles")
				shown, err := (&server{s: w.first}).VerifyToken(t.Context(), &identityv1.VerifyTokenRequest{Token: text})
				require.NoError(t, err)
				require.Equal(t, c.user, shown.GetHolder().GetPrincipalName(), "the response must contain the claimed name, not the display name of the user")
				require.Equal(t, string(cloud.ProofNone), shown.GetHolder().GetProof())
				require.Empty(t, shown.GetHolder().GetBindings())
			}
			_, err = (&server{s: w.first}).IssueToken(t.Context(), &identityv1.IssueTokenRequest{Username: c.user, Password: c.password})
			require.Equal(t, c.proof == cloud.ProofNone, fault.Is(err, fault.Unauthenticated), "gRPC must issue no unauthenticated token: %v", err)
		})
	}
	succeeded, failed := w.first.Logins()
	require.EqualValues(t, 2, succeeded)
	require.EqualValues(t, 6, failed, "a call without a password must not count as an attempt")
}

// TestNewPasswordRevokesTokens checks that a new password invalidates all earlier tokens of the user on every member,
// even if the members' clocks differ, or if the issuing member had not applied the change yet.
func TestNewPasswordRevokesTokens(t *testing.T) {
	w := newWorld(t)
	ahead, behind := w.member(30*time.Second, false), w.member(-30*time.Second, false)
	w.user("ada", member)
	q := tokenRequest{User: "ada", Password: secret}
	var old []string
	for _, s := range []*Service{w.first, ahead, behind} {
		old = append(old, w.token(s, q))
	}
	stale, err := w.first.authenticate(t.Context(), tokenRequest{User: "ada", Password: secret})
	require.NoError(t, err)
	for _, text := range old {
		for _, s := range []*Service{w.first, ahead, behind} {
			_, err := s.Verify(t.Context(), text)
			require.NoError(t, err)
		}
	}

	ada := w.as(w.first, old[0])
	_, err = (&server{s: w.first}).SetPassword(ada, &identityv1.SetPasswordRequest{UserId: "ada", Password: "another one", CurrentPassword: secret})
	require.NoError(t, err, "users can change their own password")
	late, err := w.first.issue(t.Context(), token.Claims{Claims: jwt.Claims{Subject: "ada"}, Kind: token.User, Scope: "system", Proof: cloud.ProofPassword, Epoch: stale.Epoch}, time.Hour)
	require.NoError(t, err)
	for _, text := range append(old, late.text) {
		for _, s := range []*Service{w.first, ahead, behind} {
			_, err := s.Verify(t.Context(), text)
			require.True(t, fault.Is(err, fault.Unauthenticated), "a token from before the new password was accepted: %v", err)
			require.ErrorContains(t, err, "no longer valid")
		}
	}
	for _, s := range []*Service{ahead, behind} {
		caller, err := s.Verify(t.Context(), w.token(s, tokenRequest{User: "ada", Password: "another one"}))
		require.NoError(t, err)
		require.Equal(t, cloud.ProofPassword, caller.Proof)
	}
}

// TestRemovedRoleAffectsIssuedTokens checks that a removed role gives no access with tokens that were issued before,
// because roles are read from the records.
func TestRemovedRoleAffectsIssuedTokens(t *testing.T) {
	w := newWorld(t)
	other := w.member(0, false)
	w.user("ada", member)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
	may := func() error {
		_, err := auth.Admit(w.as(other, text), "/vmcontroller.v1.VmService/CreateVm", "", "")
		return err
	}
	require.NoError(t, may())
	_, err := (&server{s: w.first}).UnbindRole(w.admin(), &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(member)})
	require.NoError(t, err)
	require.True(t, fault.Is(may(), fault.PermissionDenied))
}

// TestProjectBelongsToOneOrg checks that a token or call that names a project with another org than its own is refused,
// even for an org:admin of that other org and for system:admin.
func TestProjectBelongsToOneOrg(t *testing.T) {
	w := newWorld(t)
	w.user("eve", cloud.Binding{Role: cloud.OrgAdmin, Org: "evil"}, cloud.Binding{Role: cloud.ProjectAdmin, Org: "evil", Project: "lair"})
	err := w.bind("eve", cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: "default"})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)

	scoped := func(org, project string) string {
		return w.token(w.first, tokenRequest{User: "eve", Password: secret, Org: org, Project: project})
	}
	for name, c := range map[string]struct {
		token  string
		tenant cloud.Tenant
		says   string
	}{
		"her project and its org":                     {scoped("evil", "lair"), cloud.Tenant{Org: "evil", Project: "lair"}, ""},
		"her project, no org":                         {scoped("", "lair"), cloud.Tenant{Org: "evil", Project: "lair"}, ""},
		"another org's project, her org":              {scoped("evil", "default"), cloud.Tenant{}, "no project default"},
		"another org's project and that org":          {scoped("default", "default"), cloud.Tenant{}, "no project default"},
		"her project, another org":                    {scoped("default", "lair"), cloud.Tenant{}, "no project lair"},
		"a project that does not exist, her org":      {scoped("evil", "nowhere"), cloud.Tenant{}, "no project nowhere"},
		"a project that does not exist, no org":       {scoped("", "nowhere"), cloud.Tenant{}, "no project nowhere"},
		"the administrator with a wrong org":          {w.hostToken(cloud.Tenant{Org: "evil", Project: "default"}), cloud.Tenant{}, "no project default"},
		"the administrator with a project and no org": {w.hostToken(cloud.Tenant{Project: "default"}), tenant.Default, ""},
	} {
		t.Run(name, func(t *testing.T) {
			tenant, err := auth.Admit(w.as(w.first, c.token), "/vmcontroller.v1.VmService/CreateVm", "", "")
			require.Equal(t, c.tenant, tenant)
			if c.says != "" {
				require.True(t, fault.Is(err, fault.NotFound), "%v", err)
				require.ErrorContains(t, err, c.says)
				return
			}
			require.NoError(t, err)
		})
	}
	for _, id := range []string{"*", "../lair", "lair/../default", "default/default", "%2e%2e"} {
		for _, q := range []tokenRequest{{Project: id}, {Org: id}, {Org: "evil", Project: id}, {Org: id, Project: "lair"}} {
			q.User, q.Password = "eve", secret
			_, _, err := w.first.token(t.Context(), q)
			require.True(t, fault.Is(err, fault.InvalidArgument), "%v: %v", q, err)
		}
	}
}

// TestDev checks that under --dev an unauthenticated caller has the rights of project:admin in the default project
// only, and not those of the administrator whose name the caller uses.
func TestDev(t *testing.T) {
	w := newWorld(t)
	w.user("ada", cloud.Binding{Role: cloud.ProjectMember, Org: "acme", Project: "web"})
	dev := w.member(0, true)
	ctx := w.as(dev, w.token(dev, tokenRequest{User: "admin"}))
	at, err := auth.Admit(ctx, "/vmcontroller.v1.VmService/CreateVm", "", "")
	require.NoError(t, err)
	require.Equal(t, tenant.Default, at)
	_, err = auth.Admit(ctx, "/credit.v1.CreditService/CreateWallet", "default", "default")
	require.NoError(t, err, "with --dev every caller may create a wallet")
	_, err = auth.Admit(ctx, "/identity.v1.IdentityService/CreateUser", "", "")
	require.True(t, fault.Is(err, fault.PermissionDenied))
	_, err = (&server{s: dev}).SetPassword(ctx, &identityv1.SetPasswordRequest{UserId: "admin", Password: "mine from now on"})
	require.True(t, fault.Is(err, fault.PermissionDenied), "a caller without a token must not become the administrator: %v", err)
	_, err = auth.Admit(w.as(dev, w.token(dev, tokenRequest{User: "x", Project: "web"})), "/vmcontroller.v1.VmService/GetVm", "", "")
	require.True(t, fault.Is(err, fault.NotFound))

	_, err = auth.Admit(w.as(w.first, w.token(dev, tokenRequest{User: "admin"})), "/vmcontroller.v1.VmService/GetVm", "", "")
	require.ErrorContains(t, err, "is unauthenticated", "without --dev the same token must give no access")
}

// TestInvalidUserCalls checks the errors of calls about users with invalid arguments or without permission.
func TestInvalidUserCalls(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	r := &server{s: w.first}
	_, err := r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "bare"})
	require.NoError(t, err)
	ada := w.as(w.first, w.token(w.first, tokenRequest{User: "ada", Password: secret}))
	for _, c := range []struct {
		name string
		call func() error
		kind fault.Kind
		says string
	}{
		{"a user ID that is taken", func() error {
			_, err := r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "ada"})
			return err
		}, fault.AlreadyExists, "ada"},
		{"a user ID that is a path", func() error {
			_, err := r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "a/b"})
			return err
		}, fault.InvalidArgument, "id"},
		{"a name of two lines", func() error {
			_, err := r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: "x", Name: "a\nb"})
			return err
		}, fault.InvalidArgument, "printable"},
		{"no user ID", func() error { _, err := r.GetUser(w.admin(), &identityv1.GetUserRequest{}); return err }, fault.InvalidArgument, "id"},
		{"a user that does not exist", func() error {
			_, err := r.GetUser(w.admin(), &identityv1.GetUserRequest{Id: "nobody"})
			return err
		}, fault.NotFound, "nobody"},
		{"a password that is too short", func() error {
			_, err := r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: "ada", Password: "1234567"})
			return err
		}, fault.InvalidArgument, "8 to 256"},
		{"a password for a user that does not exist", func() error {
			_, err := r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: "nobody", Password: secret})
			return err
		}, fault.NotFound, "nobody"},
		{"a password for another user", func() error {
			_, err := r.SetPassword(ada, &identityv1.SetPasswordRequest{UserId: "admin", Password: secret})
			return err
		}, fault.PermissionDenied, "their own"},
		{"a role for a user without a credential", func() error { return w.bind("bare", member) }, fault.FailedPrecondition, "no credential"},
		{"an unknown role", func() error { return w.bind("ada", cloud.Binding{Role: "root"}) }, fault.InvalidArgument, "binding.role"},
		{"a project role without a project", func() error { return w.bind("ada", cloud.Binding{Role: cloud.ProjectMember}) }, fault.InvalidArgument, "binding.org_id"},
		{"removal of the administrator's own role", func() error {
			_, err := r.UnbindRole(w.admin(), &identityv1.UnbindRoleRequest{UserId: "admin", Binding: oneOnWire(cloud.Binding{Role: cloud.SystemAdmin})})
			return err
		}, fault.FailedPrecondition, "nobody else could give it back"},
		{"a role given by a project member", func() error {
			_, err := r.BindRole(ada, &identityv1.BindRoleRequest{UserId: "ada", Binding: oneOnWire(cloud.Binding{Role: cloud.SystemAdmin})})
			return err
		}, fault.PermissionDenied, "system:admin"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.call()
			require.True(t, fault.Is(err, c.kind), "%v", err)
			require.ErrorContains(t, err, c.says)
		})
	}
	page, err := r.ListUsers(w.admin(), &identityv1.ListUsersRequest{PageSize: 2})
	require.NoError(t, err)
	require.Len(t, page.GetUsers(), 2)
	rest, err := r.ListUsers(w.admin(), &identityv1.ListUsersRequest{PageSize: 2, PageToken: page.GetNextPageToken()})
	require.NoError(t, err)
	require.Equal(t, "bare", rest.GetUsers()[0].GetId())
	require.False(t, rest.GetUsers()[0].GetRegistered())
}
