package identity

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/oidc"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const secret = "correct horse"

// world is a cluster with records in memory, which its members share. Each member has its own clock.
type world struct {
	t      testing.TB
	engine *mvcc.Engine
	direct *store.Direct
	key    *clusterkey.Key
	// first is a member whose clock shows at.
	first *Service
	// providers are the OpenID providers of members that are created later. skew is how far ahead Options.Skew reports
	// each member's clock.
	providers []oidc.Provider
	skew      time.Duration

	mu sync.Mutex
	at time.Time
}

func newWorld(t testing.TB) *world {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{KeyIndex: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	w := &world{t: t, engine: engine, direct: store.NewDirect(engine), key: clusterkey.Generate(), at: time.UnixMilli(1_800_000_000_500)}
	w.first = w.member(0, false)
	require.NoError(t, w.first.Bootstrap(t.Context()))
	return w
}

func (w *world) member(ahead time.Duration, dev bool) *Service {
	now := func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.at.Add(ahead) }
	records := store.New(store.Options{Engine: w.engine, Proposer: w.direct, PageKey: make([]byte, 32), Now: now, Stamp: audit.Stamp})
	commands, log := leadertest.Single(), slog.New(slog.DiscardHandler)
	s := New(Options{
		Store: records, Commands: commands, Key: w.key, Log: log, Dev: dev, Issuer: "https://cloud.example",
		Audit:     audit.New(audit.Options{Store: records, Commands: commands, Log: log}),
		Providers: w.providers, Skew: func() (time.Duration, bool) { return w.skew, true },
	})
	s.passwords = password.NewHasher(64) // with 64 cores there is no pause after a hash
	return s
}

func (w *world) wait(d time.Duration) { w.mu.Lock(); defer w.mu.Unlock(); w.at = w.at.Add(d) }

// as returns the context of a call to member s by the holder of a token.
func (w *world) as(s *Service, token string) context.Context {
	w.t.Helper()
	caller, err := s.Verify(w.t.Context(), token)
	require.NoError(w.t, err)
	return auth.With(auth.WithProjects(w.t.Context(), s), caller, auth.RPC)
}

// admin returns the context of a call by the administrator with a token that is not limited to a project.
func (w *world) admin() context.Context { return w.as(w.first, w.hostToken(cloud.Tenant{})) }

func (w *world) hostToken(scope cloud.Tenant) string {
	text, err := HostToken(w.key, scope, w.at, time.Hour)
	require.NoError(w.t, err)
	return text
}

// user creates a user with a password and roles.
func (w *world) user(name string, roles ...cloud.Binding) {
	w.t.Helper()
	r := &server{s: w.first}
	_, err := r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: name, Name: "Mx " + name})
	require.NoError(w.t, err)
	_, err = r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: name, Password: secret})
	require.NoError(w.t, err)
	for _, b := range roles {
		w.place(b)
		require.NoError(w.t, w.bind(name, b))
	}
}

// place creates the org and the project of a role unless they exist.
func (w *world) place(b cloud.Binding) {
	r := &server{s: w.first}
	if b.Org != "" {
		if _, err := r.CreateOrg(w.admin(), &identityv1.CreateOrgRequest{Id: string(b.Org)}); !fault.Is(err, fault.AlreadyExists) {
			require.NoError(w.t, err)
		}
	}
	if b.Project != "" {
		_, err := r.CreateProject(w.admin(), &identityv1.CreateProjectRequest{Id: string(b.Project), OrgId: string(b.Org)})
		if !fault.Is(err, fault.AlreadyExists) {
			require.NoError(w.t, err)
		}
	}
}

func (w *world) bind(name string, b cloud.Binding) error {
	_, err := (&server{s: w.first}).BindRole(w.admin(), &identityv1.BindRoleRequest{UserId: name, Binding: oneOnWire(b)})
	return err
}

func oneOnWire(b cloud.Binding) *identityv1.Binding {
	return &identityv1.Binding{Role: string(b.Role), OrgId: string(b.Org), ProjectId: string(b.Project)}
}

// token requests a token from a member and returns it.
func (w *world) token(s *Service, ask tokenRequest) string {
	w.t.Helper()
	out, _, err := s.token(w.t.Context(), ask)
	require.NoError(w.t, err)
	return out.text
}

var member = cloud.Binding{Role: cloud.ProjectMember, Org: "default", Project: "default"}

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
	require.ErrorContains(t, err, "proved nothing", "without --dev the same token must give no access")
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
