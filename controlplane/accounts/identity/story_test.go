package identity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// login returns the context of a call by a user who logged in with a password and without a scope.
func (w *world) login(user string) context.Context {
	w.t.Helper()
	return w.as(w.first, w.token(w.first, tokenRequest{User: cloud.UserID(user), Password: secret}))
}

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

func errOf[A any](_ A, err error) error { return err }

// TestRevocationAppliesOnEveryMember revokes a user's token in each possible way on one member. Both members must then
// refuse the token. Tokens of other users must stay valid, except after their signing key was revoked.
func TestRevocationAppliesOnEveryMember(t *testing.T) {
	w := newWorld(t)
	other := w.member(0, false)
	r := &server{s: w.first}
	w.user("ada", member)
	w.user("bob", member)
	for name, end := range map[string]func(ctx context.Context, text string) error{
		"revoked by its holder": func(ctx context.Context, text string) error {
			return errOf(r.RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: text}))
		},
		"revoked by its id": func(ctx context.Context, _ string) error {
			return errOf(r.RevokeToken(w.admin(), &identityv1.RevokeTokenRequest{TokenId: auth.CallerOf(ctx).TokenID}))
		},
		"all revoked by themselves": func(ctx context.Context, _ string) error {
			return errOf(r.RevokeTokens(ctx, &identityv1.RevokeTokensRequest{UserId: "ada"}))
		},
		"disabled": func(context.Context, string) error {
			return errors.Join(errOf(r.DisableUser(w.admin(), &identityv1.DisableUserRequest{UserId: "ada"})),
				errOf(r.EnableUser(w.admin(), &identityv1.EnableUserRequest{UserId: "ada"})))
		},
		"the key revoked": func(context.Context, string) error {
			ring, err := r.ListKeys(w.admin(), &identityv1.ListKeysRequest{})
			if err != nil {
				return err
			}
			return errOf(r.RevokeKey(w.admin(), &identityv1.RevokeKeyRequest{KeyId: ring.GetKeys()[0].GetId()}))
		},
		"deleted and made again": func(context.Context, string) error {
			if err := errOf(r.DeleteUser(w.admin(), &identityv1.DeleteUserRequest{UserId: "ada"})); err != nil {
				return err
			}
			w.user("ada", member)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
			theirs := w.token(w.first, tokenRequest{User: "bob", Password: secret})
			ctx := w.as(other, text)
			require.NoError(t, end(ctx, text))
			for _, s := range []*Service{w.first, other} {
				_, err := s.Verify(t.Context(), text)
				require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
				if name != "the key revoked" {
					_, err = s.Verify(t.Context(), theirs)
					require.NoError(t, err)
				}
			}
			again := w.token(other, tokenRequest{User: "ada", Password: secret})
			_, err := w.first.Verify(t.Context(), again)
			require.NoError(t, err, "a new one is good")
		})
	}
	bob := w.login("bob")
	err := errOf(r.RevokeToken(bob, &identityv1.RevokeTokenRequest{TokenId: auth.CallerOf(w.login("ada")).TokenID}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	err = errOf(r.RevokeTokens(bob, &identityv1.RevokeTokensRequest{UserId: "ada"}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	require.NoError(t, errOf(r.RevokeToken(bob, &identityv1.RevokeTokenRequest{Token: "garbage"})), "what is worth nothing is over already")
}

// TestDenialsExpire checks that Tend removes the record of a revoked token only after the token has expired on every
// member, that is, token.Leeway after its expiry.
func TestDenialsExpire(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret, TTL: 60})
	require.NoError(t, errOf((&server{s: w.first}).RevokeToken(w.as(w.first, text), &identityv1.RevokeTokenRequest{Token: text})))
	kept := func() (n int) {
		require.NoError(t, w.first.Tend(t.Context()))
		require.NoError(t, w.first.opts.Store.Local(func(v *store.View) error {
			all, _, err := denials.List(v, 0)
			n = len(all)
			return err
		}))
		return n
	}
	w.wait(60*time.Second + token.Leeway - time.Second)
	require.Equal(t, 1, kept())
	w.wait(2 * time.Second)
	require.Equal(t, 0, kept())
}

// partitionedProposer is a Proposer of a member that a test can isolate: while off is set, linearizable reads wait
// until their context ends.
type partitionedProposer struct {
	*store.Direct
	off atomic.Bool
}

func (c *partitionedProposer) ReadIndex(ctx context.Context) error {
	if c.off.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	return c.Direct.ReadIndex(ctx)
}

// TestIsolatedMemberAcceptsNoTokens checks that a member without a connection to the other members accepts tokens for
// staleness (900 ms), and then returns Unavailable.
func TestIsolatedMemberAcceptsNoTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // so that the timeout of Verify takes no real time
		w := newWorld(t)
		w.user("ada", member)
		wire := &partitionedProposer{Direct: w.direct}
		now := func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.at }
		far := w.member(0, false)
		far.opts.Store = store.New(store.Options{Engine: w.engine, Proposer: wire, PageKey: make([]byte, 32), Now: now})
		text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
		verify := func() error { return errOf(far.Verify(t.Context(), text)) }
		require.NoError(t, verify())
		wire.off.Store(true)
		w.wait(staleness)
		require.NoError(t, verify())
		w.wait(time.Millisecond)
		err := verify()
		require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
		require.ErrorContains(t, err, "does not reach the others")
		require.Less(t, staleness, time.Second)
		wire.off.Store(false)
		require.NoError(t, verify())
	})
}

// TestDisabledUserGetsNoToken checks that a disabled user gets no token for the correct password, until the user is
// enabled again.
func TestDisabledUserGetsNoToken(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	w.user("ada", member)
	login := func() error {
		return errOf(r.IssueToken(t.Context(), &identityv1.IssueTokenRequest{Username: "ada", Password: secret}))
	}
	require.NoError(t, login())
	require.NoError(t, errOf(r.DisableUser(w.admin(), &identityv1.DisableUserRequest{UserId: "ada"})))
	require.True(t, fault.Is(login(), fault.Unauthenticated), "a disabled user got a token")
	require.NoError(t, errOf(r.EnableUser(w.admin(), &identityv1.EnableUserRequest{UserId: "ada"})))
	require.NoError(t, login())
}

// TestWrongClockIsReported checks that a member whose clock differs by more than MaxSkew from the others issues and
// verifies no tokens, and that its error says by how much the clock is wrong.
func TestWrongClockIsReported(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
	for _, ahead := range []time.Duration{0, time.Minute, -time.Minute, MaxSkew} {
		w.skew = ahead
		require.NoError(t, errOf(w.first.Verify(t.Context(), text)))
	}
	for ahead, says := range map[time.Duration]string{10 * time.Minute: "10m0s ahead of the others'", -10 * time.Minute: "10m0s behind the others'"} {
		w.skew = ahead
		for _, err := range []error{errOf(w.first.Verify(t.Context(), text)), func() error {
			_, _, err := w.first.token(t.Context(), tokenRequest{User: "ada", Password: secret})
			return err
		}()} {
			require.True(t, fault.Is(err, fault.Unavailable), "a member with a wrong clock verified or issued a token: %v", err)
			require.ErrorContains(t, err, says)
		}
	}
	w.skew = 0
	early := w.member(10*time.Minute, false)
	early.opts.Skew = nil // as if no other member had reported its time yet
	ahead := w.token(early, tokenRequest{User: "ada", Password: secret})
	err := errOf(w.first.Verify(t.Context(), ahead))
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	require.ErrorContains(t, err, "the clock of this member or of the one that made it is wrong")
	near := w.token(w.member(time.Minute, false), tokenRequest{User: "ada", Password: secret})
	require.NoError(t, errOf(w.first.Verify(t.Context(), near)))
}

// rawResponse starts an HTTP server with the REST endpoints of s, among them OpenID discovery. It returns the server's
// URL, which becomes the issuer of s.
func (w *world) rawResponse(t *testing.T, s *Service) string {
	r := rest.New(rest.Options{Service: fault.Identity, Name: "identity", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry())})
	s.Routes(r, false)
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	s.opts.Issuer = server.URL
	return server.URL
}

// TestExternalVerifierDuringRotation verifies tokens with an OpenID client library that is configured only with the URL
// of the discovery document. While the signing keys are rotated under load, neither the library nor another member may
// refuse a valid token.
func TestExternalVerifierDuringRotation(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	other := w.member(0, false)
	issuer := w.rawResponse(t, w.first)
	provider, err := oidc.NewProvider(t.Context(), issuer)
	require.NoError(t, err)
	foreign := provider.Verifier(&oidc.Config{ClientID: token.Audience, Now: func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.at }})

	text := w.token(w.first, tokenRequest{User: "ada", Password: secret})
	id, err := foreign.Verify(t.Context(), text)
	require.NoError(t, err)
	require.Equal(t, "ada", id.Subject)
	var claims struct{ Kind, Scope, Proof string }
	require.NoError(t, id.Claims(&claims))
	require.Equal(t, struct{ Kind, Scope, Proof string }{"user", "system", "password"}, claims)
	_, err = foreign.Verify(t.Context(), text[:len(text)-4]+"AAAA")
	require.Error(t, err)
	host := w.hostToken(cloud.Tenant{})
	_, err = foreign.Verify(t.Context(), host)
	require.Error(t, err, "the administrator's own tokens are for this cluster only")

	rotate := func() string {
		w.wait(5 * time.Minute)
		out, err := (&server{s: w.first}).RotateKeys(w.admin(), &identityv1.RotateKeysRequest{})
		require.NoError(t, err)
		return out.GetKeys()[0].GetId()
	}
	ada, err := w.first.user(t.Context(), "ada")
	require.NoError(t, err)
	proven := token.Claims{
		Claims: jwt.Claims{Subject: "ada"}, Kind: token.User, Scope: "system", Proof: cloud.ProofPassword, Epoch: ada.Epoch,
	}
	done := make(chan struct{})
	var checks atomic.Int64
	var load sync.WaitGroup
	for range 4 {
		load.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				// Sign directly instead of logging in, because the hashing of passwords would take most of the test's
				// time.
				fresh, err := w.first.issue(t.Context(), proven, time.Hour)
				if !checkNo(t, err) || !checkNo(t, errOf(other.Verify(t.Context(), fresh.text))) ||
					!checkNo(t, errOf(foreign.Verify(t.Context(), fresh.text))) {
					return
				}
				checks.Add(1)
			}
		})
	}
	for range 5 {
		before := checks.Load()
		rotate()
		for checks.Load() < before+20 && !t.Failed() {
			time.Sleep(time.Millisecond)
		}
	}
	close(done)
	load.Wait()
	require.NoError(t, errOf(other.Verify(t.Context(), w.token(w.first, tokenRequest{User: "ada", Password: secret}))))
	err = errOf((&server{s: w.first}).RotateKeys(w.admin(), &identityv1.RotateKeysRequest{}))
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
}

func checkNo(t *testing.T, err error) bool {
	if err != nil {
		t.Errorf("a good token was refused: %v", err)
	}
	return err == nil
}

// TestAudit checks that successful and refused calls are listed in the audit, that no record contains a password or
// token, and that an org's administrator can list only the records of the org.
func TestAudit(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { w.first.opts.Audit.Run(ctx) })
	w.user("ada", cloud.Binding{Role: cloud.OrgAdmin, Org: "acme"})
	_, proven, err := w.first.token(t.Context(), tokenRequest{User: "ada", Password: "guess guess", Address: "192.0.2.1:1"})
	require.NoError(t, err)
	require.False(t, proven)
	text := w.token(w.first, tokenRequest{User: "ada", Password: secret, Address: "192.0.2.1:1"})
	ada := w.as(w.first, text)
	auth.CallerOf(ada).RequestID = "11111111-1111-4111-8111-111111111111"
	r := &server{s: w.first}
	require.NoError(t, errOf(r.CreateProject(ada, &identityv1.CreateProjectRequest{Id: "web", OrgId: "acme"})))
	for range 3 {
		err := errOf(r.CreateUser(ada, &identityv1.CreateUserRequest{Id: "x"}))
		f, ok := fault.From(err)
		require.True(t, ok)
		auth.ReportFailure(w.first.opts.Audit, auth.CallerOf(ada), service+"CreateUser", f, "", "")
	}
	cancel()
	work.Wait()
	list := func(q *identityv1.ListAuditRecordsRequest) (out []*identityv1.AuditRecord) {
		for {
			q.PageSize = 2
			page, err := r.ListAuditRecords(w.admin(), q)
			require.NoError(t, err)
			out = append(out, page.GetRecords()...)
			if q.PageToken = page.GetNextPageToken(); q.PageToken == "" {
				return out
			}
		}
	}
	all := list(&identityv1.ListAuditRecordsRequest{})
	counts := map[string]int{}
	for i, a := range all {
		counts[fmt.Sprintf("%s %s %s", a.GetPrincipal(), a.GetMethod()[len(service):], a.GetOutcome())]++
		require.NotContains(t, a.String(), secret)
		require.NotContains(t, a.String(), "guess")
		require.NotContains(t, a.String(), text)
		if i > 0 {
			require.LessOrEqual(t, a.GetTime(), all[i-1].GetTime(), "newest first")
		}
	}
	require.Equal(t, map[string]int{
		"admin CreateUser OK": 1, "admin SetPassword OK": 1, "admin CreateOrg OK": 1, "admin BindRole OK": 1,
		" IssueToken UNAUTHENTICATED": 1, "ada IssueToken OK": 1, "ada CreateProject OK": 1, "ada CreateUser PERMISSION_DENIED": 1,
	}, counts)
	refused := list(&identityv1.ListAuditRecordsRequest{Outcome: audit.Refused, Principal: "ada"})
	require.Len(t, refused, 1)
	require.EqualValues(t, 2, refused[0].GetSuppressed(), "like ones are one record")
	made := list(&identityv1.ListAuditRecordsRequest{Method: "CreateProject"})
	require.Equal(t, "11111111-1111-4111-8111-111111111111", made[0].GetRequestId())
	require.Equal(t, []string{"acme", ""}, []string{made[0].GetOrgId(), made[0].GetProjectId()})
	w.wait(time.Hour)
	require.Empty(t, list(&identityv1.ListAuditRecordsRequest{Since: w.at.UnixMilli()}))
	require.Len(t, list(&identityv1.ListAuditRecordsRequest{Until: w.at.UnixMilli()}), len(all))

	own, err := r.ListAuditRecords(ada, &identityv1.ListAuditRecordsRequest{OrgId: "acme"})
	require.NoError(t, err)
	for _, a := range own.GetRecords() {
		require.Equal(t, "acme", a.GetOrgId())
	}
	require.NotEmpty(t, own.GetRecords())
	lair := cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: "lair"}
	w.user("eve", lair)
	require.NotEmpty(t, list(&identityv1.ListAuditRecordsRequest{OrgId: "evil", ProjectId: "lair"}), "system:admin sees records of the project")
	for _, at := range []cloud.Tenant{{}, {Org: "evil"}, {Org: "evil", Project: "lair"}, {Project: "lair"}, {Project: "web"}} {
		err := errOf(r.ListAuditRecords(ada, &identityv1.ListAuditRecordsRequest{OrgId: string(at.Org), ProjectId: string(at.Project)}))
		require.True(t, fault.Is(err, fault.PermissionDenied), "the administrator of acme reads the audit of %q: %v", at, err)
	}
	foreign, err := r.ListAuditRecords(ada, &identityv1.ListAuditRecordsRequest{OrgId: "acme", ProjectId: "lair"})
	require.NoError(t, err)
	require.Empty(t, foreign.GetRecords(), "another org's project under the name of the own org")
	w.wait(91 * 24 * time.Hour)
	require.NoError(t, w.first.opts.Audit.Prune(t.Context()))
	require.Empty(t, list(&identityv1.ListAuditRecordsRequest{}))
}

// TestRolesGrantPermissions gives roles, sets quotas and deletes projects as an administrator of an org, of a project
// and of another org. Each may act only within their own org or project, and may give no role above their own.
func TestRolesGrantPermissions(t *testing.T) {
	w := newWorld(t)
	w.user("root", cloud.Binding{Role: cloud.OrgAdmin, Org: "acme"})
	w.user("pam", cloud.Binding{Role: cloud.ProjectAdmin, Org: "acme", Project: "web"})
	w.user("bob")
	w.user("eve", cloud.Binding{Role: cloud.OrgAdmin, Org: "evil"})
	r := &server{s: w.first}
	bind := func(who string, b cloud.Binding) error {
		return errOf(r.BindRole(w.login(who), &identityv1.BindRoleRequest{UserId: "bob", Binding: oneOnWire(b)}))
	}
	in := func(role cloud.Role, org cloud.OrgID, project cloud.ProjectID) cloud.Binding {
		return cloud.Binding{Role: role, Org: org, Project: project}
	}
	for _, c := range []struct {
		who  string
		b    cloud.Binding
		kind fault.Kind
		ok   bool
	}{
		{"pam", in(cloud.ProjectMember, "acme", "web"), 0, true},
		{"pam", in(cloud.ProjectMember, "acme", "other"), fault.PermissionDenied, false},
		{"pam", in(cloud.OrgAdmin, "acme", ""), fault.PermissionDenied, false},
		{"pam", in(cloud.SystemAdmin, "", ""), fault.PermissionDenied, false},
		{"root", in(cloud.OrgAdmin, "acme", ""), 0, true},
		{"root", in(cloud.ProjectAdmin, "acme", "web"), 0, true},
		{"root", in(cloud.ProjectAdmin, "acme", "nowhere"), fault.NotFound, false},
		{"root", in(cloud.SystemAdmin, "", ""), fault.PermissionDenied, false},
		{"root", in(cloud.BillingAdmin, "", ""), fault.PermissionDenied, false},
		{"root", in(cloud.OrgAdmin, "evil", ""), fault.PermissionDenied, false},
		{"eve", in(cloud.ProjectAdmin, "acme", "web"), fault.PermissionDenied, false},
		{"eve", in(cloud.ProjectAdmin, "evil", "web"), fault.NotFound, false},
		{"eve", in(cloud.OrgAdmin, "evil", "web"), fault.InvalidArgument, false},
		{"eve", in(cloud.OrgAdmin, "acme", "web"), fault.PermissionDenied, false},
		{"eve", in(cloud.OrgAdmin, "", "web"), fault.PermissionDenied, false},
		{"eve", in(cloud.SystemAdmin, "evil", ""), fault.InvalidArgument, false},
		{"eve", in(cloud.SystemAdmin, "acme", "web"), fault.PermissionDenied, false},
		{"eve", in(cloud.BillingAdmin, "evil", ""), fault.InvalidArgument, false},
		{"pam", in(cloud.BillingAdmin, "", ""), fault.PermissionDenied, false},
		{"pam", in(cloud.OrgAdmin, "acme", "web"), fault.InvalidArgument, false},
		{"bob", in(cloud.ProjectAdmin, "evil", "lair"), fault.PermissionDenied, false},
	} {
		err := bind(c.who, c.b)
		require.Equal(t, c.ok, err == nil, "%s %v: %v", c.who, c.b, err)
		require.True(t, c.ok || fault.Is(err, c.kind), "%s %v: %v", c.who, c.b, err)
	}
	scoped := w.as(w.first, w.token(w.first, tokenRequest{User: "root", Password: secret, Org: "acme", Project: "web"}))
	err := errOf(r.CreateProject(scoped, &identityv1.CreateProjectRequest{Id: "more", OrgId: "acme"}))
	require.ErrorContains(t, err, "limited to acme/web", "a token of a project reaches no further")

	require.True(t, fault.Is(errOf(r.GetProject(w.login("eve"), &identityv1.GetProjectRequest{Id: "web"})), fault.NotFound))
	require.True(t, fault.Is(errOf(r.GetOrg(w.login("eve"), &identityv1.GetOrgRequest{Id: "acme"})), fault.NotFound))
	seen, err := r.ListProjects(w.login("pam"), &identityv1.ListProjectsRequest{})
	require.NoError(t, err)
	require.Len(t, seen.GetProjects(), 1)
	orgs, err := r.ListOrgs(w.login("eve"), &identityv1.ListOrgsRequest{})
	require.NoError(t, err)
	require.Len(t, orgs.GetOrgs(), 1)
	grants, err := r.ListBindings(w.login("root"), &identityv1.ListBindingsRequest{OrgId: "acme"})
	require.NoError(t, err)
	require.Len(t, grants.GetGrants(), 5)

	err = errOf(r.SetQuota(w.login("root"), &identityv1.SetQuotaRequest{OrgId: "acme", ProjectId: "web"}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	two := uint64(2)
	got, err := r.SetQuota(w.admin(), &identityv1.SetQuotaRequest{ProjectId: "web", Quota: &identityv1.Quota{Vms: &two}})
	require.NoError(t, err)
	require.EqualValues(t, 2, got.GetQuota().GetVms())
	require.Nil(t, got.GetQuota().Vcpus)
	require.Equal(t, "acme", got.GetOrgId())
	require.True(t, fault.Is(errOf(r.SetQuota(w.admin(), &identityv1.SetQuotaRequest{OrgId: "evil", ProjectId: "web"})), fault.NotFound))

	w.first.opts.Holds = []func(store.Reader, cloud.Tenant) error{func(_ store.Reader, t cloud.Tenant) error {
		if t.Project == "" {
			return nil
		}
		return fault.New(fault.FailedPrecondition, "project web has a wallet: close it first")
	}}
	remove := func(who string, org string) error {
		return errOf(r.DeleteProject(w.login(who), &identityv1.DeleteProjectRequest{Id: "web", OrgId: org}))
	}
	require.True(t, fault.Is(remove("pam", "acme"), fault.PermissionDenied))
	require.True(t, fault.Is(remove("eve", "evil"), fault.NotFound))
	require.ErrorContains(t, remove("root", "acme"), "close it first")
	w.first.opts.Holds = nil
	require.NoError(t, remove("root", "acme"))
	_, err = auth.Admit(w.login("pam"), "/vmcontroller.v1.VmService/CreateVm", "", "")
	require.ErrorContains(t, err, "no role in any project", "a role goes with what it is for")
}

// TestRegistrationIsRateLimited sends 40 unauthenticated requests to register a name, with a burst of 20 allowed.
// Exactly the first 20 must succeed.
func TestRegistrationIsRateLimited(t *testing.T) {
	w := newWorld(t)
	handler := rest.New(rest.Options{Service: fault.Identity, Name: "identity", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry())})
	w.first.Routes(handler, false)
	w.first.names.limit.SetBurst(20)
	w.first.names.limit.SetLimit(0)
	codes := map[int]int{}
	for i := range 40 {
		q := httptest.NewRequest(http.MethodPost, "http://127.0.0.1/api/v1/users", strings.NewReader(fmt.Sprintf(`{"id":"n%d","name":"x"}`, i)))
		q.Header.Set("Content-Type", "application/json")
		q.RemoteAddr = "127.0.0.1:1"
		q = q.WithContext(context.WithValue(q.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8083}))
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, q)
		codes[a.Code]++
	}
	require.Equal(t, map[int]int{201: 20, 500: 20}, codes)
}

// TestUsersManageThemselves checks that users can set their own password only with the current one, and can give up
// roles that others gave them, but not remove roles of other users.
func TestUsersManageThemselves(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member)
	w.user("eve", cloud.Binding{Role: cloud.ProjectAdmin, Org: "evil", Project: "lair"})
	r := &server{s: w.first}
	set := func(ctx context.Context, user, current string) error {
		return errOf(r.SetPassword(ctx, &identityv1.SetPasswordRequest{UserId: user, Password: "another one", CurrentPassword: current}))
	}
	for _, current := range []string{"", "guess guess"} {
		err := set(w.login("ada"), "ada", current)
		require.True(t, fault.Is(err, fault.PermissionDenied), "a token alone is not enough: %v", err)
	}
	require.NoError(t, set(w.login("ada"), "ada", secret))
	require.NoError(t, errOf(r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: "ada", Password: secret})))
	scoped := w.as(w.first, w.hostToken(tenant.Default))
	require.True(t, fault.Is(set(scoped, "ada", ""), fault.PermissionDenied), "an administrator's token of a project rules that project")

	lair := cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: "lair"}
	require.NoError(t, errOf(r.BindRole(w.login("eve"), &identityv1.BindRoleRequest{UserId: "ada", Binding: oneOnWire(lair)})))
	require.NoError(t, errOf(r.AcceptInvitation(w.login("ada"), &identityv1.AcceptInvitationRequest{Binding: oneOnWire(lair)})))
	at, err := auth.Admit(w.login("ada"), "/vmcontroller.v1.VmService/GetVm", "evil", "lair")
	require.NoError(t, err)
	require.Equal(t, cloud.Tenant{Org: "evil", Project: "lair"}, at)
	require.NoError(t, errOf(r.UnbindRole(w.login("ada"), &identityv1.UnbindRoleRequest{UserId: "ada", Binding: oneOnWire(lair)})))
	_, err = auth.Admit(w.login("ada"), "/vmcontroller.v1.VmService/GetVm", "evil", "lair")
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	err = errOf(r.UnbindRole(w.login("ada"), &identityv1.UnbindRoleRequest{UserId: "eve", Binding: oneOnWire(cloud.Binding{Role: cloud.ProjectAdmin, Org: "evil", Project: "lair"})}))
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
}

// TestRegisteredNamesAreNotTaken checks that an administrator can create a user whose name was registered over REST,
// and that the user has the administrator's values. It returns AlreadyExists if the name has a credential, is disabled,
// or was created by an administrator.
func TestRegisteredNamesAreNotTaken(t *testing.T) {
	w := newWorld(t)
	r := &server{s: w.first}
	register := func(id cloud.UserID) {
		require.NoError(t, errOf(createUserCommand.Call(t.Context(), w.first.opts.Commands, newName{ID: id, Name: "Squatter", Open: true})))
	}
	create := func(id string) (*identityv1.User, error) {
		return r.CreateUser(w.admin(), &identityv1.CreateUserRequest{Id: id, Name: "Ada Lovelace"})
	}
	register("ada")
	w.wait(time.Hour)
	u, err := create("ada")
	require.NoError(t, err)
	require.Equal(t, []any{"Ada Lovelace", w.at.UnixMilli(), false}, []any{u.GetName(), u.GetCreatedAt(), u.GetRegistered()})
	_, err = create("ada")
	require.True(t, fault.Is(err, fault.AlreadyExists), "an administrator made it: %v", err)
	require.True(t, fault.Is(errOf(createUserCommand.Call(t.Context(), w.first.opts.Commands, newName{ID: "ada", Open: true})), fault.AlreadyExists))

	for id, give := range map[string]func(id string) error{
		"with-password": func(id string) error {
			return errOf(r.SetPassword(w.admin(), &identityv1.SetPasswordRequest{UserId: id, Password: secret}))
		},
		"disabled": func(id string) error {
			return errOf(r.DisableUser(w.admin(), &identityv1.DisableUserRequest{UserId: id}))
		},
	} {
		register(cloud.UserID(id))
		require.NoError(t, give(id))
		_, err = create(id)
		require.True(t, fault.Is(err, fault.AlreadyExists), "%s: %v", id, err)
	}
	require.True(t, fault.Is(errOf(create("admin")), fault.AlreadyExists))
	require.NoError(t, w.first.opts.Store.Local(func(v *store.View) error {
		count, err := openNames.Get(v, "all")
		require.EqualValues(t, 2, *count, "the name that was created anew makes room for another")
		return err
	}))
}

// TestRegisteredNamesAreCounted checks that openNames counts the names that unauthenticated callers registered, and
// that deleting such a name decrements it.
func TestRegisteredNamesAreCounted(t *testing.T) {
	w := newWorld(t)
	count := func() (n uint64) {
		require.NoError(t, w.first.opts.Store.Local(func(v *store.View) error {
			c, err := openNames.Get(v, "all")
			if c != nil {
				n = *c
			}
			return err
		}))
		return n
	}
	for _, name := range []cloud.UserID{"a", "b"} {
		require.NoError(t, errOf(createUserCommand.Call(t.Context(), w.first.opts.Commands, newName{ID: name, Open: true})))
	}
	w.user("ada")
	require.EqualValues(t, 2, count())
	for _, name := range []string{"a", "ada"} {
		require.NoError(t, errOf((&server{s: w.first}).DeleteUser(w.admin(), &identityv1.DeleteUserRequest{UserId: name})))
	}
	require.EqualValues(t, 1, count())
}
