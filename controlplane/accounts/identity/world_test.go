package identity

import (
	"context"
	"log/slog"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/oidc"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
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

// login returns the context of a call by a user who logged in with a password and without a scope.
func (w *world) login(user string) context.Context {
	w.t.Helper()
	return w.as(w.first, w.token(w.first, tokenRequest{User: cloud.UserID(user), Password: secret}))
}

func errOf[A any](_ A, err error) error { return err }

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
