package jointoken

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	memberv1 "github.com/trivet-cloud/trivet/protos/member/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// world is the join token service of a cluster with one member, which serves BringKey at address.
type world struct {
	memberv1.UnsafeMemberServiceServer
	*Service
	t       *testing.T
	key     *clusterkey.Key
	audits  *audit.Service
	address string

	mu    sync.Mutex // guards the fields below
	now   time.Time
	calls int
	// lose makes the next call of BringKey return an error after the service has responded, as if the response were
	// lost.
	lose bool
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, key: clusterkey.Generate(), now: time.Now()}
	records := storetest.Memory(t, func() time.Time { w.mu.Lock(); defer w.mu.Unlock(); return w.now })
	commands := leadertest.Single()
	log := slog.New(slog.DiscardHandler)
	w.audits = audit.New(audit.Options{Store: records, Commands: commands, Log: log})
	w.Service = New(Options{Store: records, Commands: commands, Key: w.key, Log: log})
	authority, err := w.key.Authority()
	require.NoError(t, err)
	own, err := authority.IssueFor(mtls.Member, "1", time.Now(), time.Hour)
	require.NoError(t, err)
	shows := func() (*tls.Certificate, error) { return mtls.WithAuthority(own, authority.Certificate()), nil }
	g, _ := rpc.New(rpc.Options{
		Credentials: credentials.NewTLS(mtls.ServerOptional(shows, authority.Certificate(), mtls.OnlyKind(mtls.Node), 0)),
		Log:         log, Metrics: grpcprom.NewServerMetrics(), Certified: true, Open: []string{OpenMethod},
	})
	memberv1.RegisterMemberServiceServer(g, w)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w.address = listener.Addr().String()
	var serving sync.WaitGroup
	serving.Go(func() { g.Serve(listener) })
	t.Cleanup(func() { g.Stop(); serving.Wait() })
	return w
}

// BringKey calls the service, counts the calls, and returns an error instead of the response if lose is set.
func (w *world) BringKey(ctx context.Context, in *memberv1.BringKeyRequest) (*memberv1.BringKeyResponse, error) {
	out, err := (&server{s: w.Service}).BringKey(ctx, in)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls++
	if w.lose {
		w.lose = false
		return nil, fault.New(fault.Unavailable, "the wire is cut")
	}
	return out, err
}

func (w *world) pass(d time.Duration) { w.mu.Lock(); defer w.mu.Unlock(); w.now = w.now.Add(d) }

func (w *world) called() int { w.mu.Lock(); defer w.mu.Unlock(); return w.calls }

// token creates a join token, and returns it and the path of a file that contains it.
func (w *world) token() (file, text string) {
	text, _, err := w.NewToken(w.t.Context(), 0)
	require.NoError(w.t, err)
	return written(w.t, text), text
}

func written(t *testing.T, text string) string {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte(text+"\n"), 0o600))
	return file
}

// bring calls Bring as a joining process with the data directory dir and the token file token.
func bring(t *testing.T, dir, token string, members ...string) error {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return Bring(ctx, members, token, filepath.Join(dir, "cluster.key"), slog.New(slog.DiscardHandler))
}

// secondNewcomer calls Bring with one token for two data directories. It returns an error if the second gets the
// cluster key too.
func (w *world) secondNewcomer() error {
	file, _ := w.token()
	require.NoError(w.t, bring(w.t, w.t.TempDir(), file, w.address))
	dir := w.t.TempDir()
	err := bring(w.t, dir, file, w.address)
	if err == nil {
		return errors.New("a second process got the cluster key with the same token")
	}
	require.Equal(w.t, codes.Unauthenticated, status.Code(err), err)
	require.ErrorContains(w.t, err, "used by another")
	require.NoFileExists(w.t, filepath.Join(dir, "cluster.key"))
	return nil
}

// TestBring checks that a joining process gets the cluster key with its token, that its key for the request is deleted,
// and that another process cannot use the token.
func TestBring(t *testing.T) {
	w := newWorld(t)
	file, text := w.token()
	dir := t.TempDir()
	require.NoError(t, bring(t, dir, file, w.address))
	key, err := clusterkey.Load(filepath.Join(dir, "cluster.key"))
	require.NoError(t, err)
	require.Equal(t, w.key.Encode(), key.Encode())
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "the directory has only the cluster key")
	info, err := left[0].Info()
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), info.Mode())
	w.pass(time.Second) // audit records are ordered by time, so the two uses need different times
	require.NoError(t, w.secondNewcomer())

	// Each use of a token has an audit record with the token's ID as principal and the client's address.
	kept, _, err := w.audits.List(t.Context(), audit.Query{Method: "BringKey"})
	require.NoError(t, err)
	require.Len(t, kept, 2)
	require.Equal(t, "member-token/"+strings.Split(text, ".")[0], kept[1].Principal)
	require.Equal(t, "127.0.0.1", kept[1].Address)
	require.NotEmpty(t, kept[1].RequestID)
}

// TestLostResponse checks that a joining process whose response was lost gets the cluster key when it repeats the
// request with the same public key, also after a restart.
func TestLostResponse(t *testing.T) {
	w := newWorld(t)
	file, _ := w.token()
	dir := t.TempDir()
	w.mu.Lock()
	w.lose = true
	w.mu.Unlock()
	require.NoError(t, bring(t, dir, file, w.address), "Bring repeats a request whose response was lost")
	require.Equal(t, 2, w.called())

	file, text := w.token()
	dir = t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	w.mu.Lock()
	w.lose = true
	w.mu.Unlock()
	died := make(chan error, 1)
	gone := filepath.Join(dir, "cluster.key")
	go func() { died <- Bring(ctx, []string{w.address}, file, gone, slog.New(cancels{cancel})) }()
	require.ErrorIs(t, <-died, context.Canceled)
	require.NoFileExists(t, gone)
	info, err := os.Stat(filepath.Join(dir, proofFile))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), info.Mode())
	other := bring(t, t.TempDir(), written(t, text), w.address)
	require.Equal(t, codes.Unauthenticated, status.Code(other), other)
	require.NoError(t, bring(t, dir, file, w.address))
	require.FileExists(t, gone)
	require.NoFileExists(t, filepath.Join(dir, proofFile))
}

// cancels is a slog.Handler that calls cancel at the first log record. Bring logs when it begins to wait.
type cancels struct{ cancel func() }

func (c cancels) Enabled(context.Context, slog.Level) bool      { return true }
func (c cancels) Handle(_ context.Context, r slog.Record) error { c.cancel(); return nil }
func (c cancels) WithAttrs([]slog.Attr) slog.Handler            { return c }
func (c cancels) WithGroup(string) slog.Handler                 { return c }

// TestRefusedRequestsKeepTheToken checks that refused requests return no cluster key and do not use up the token.
func TestRefusedRequestsKeepTheToken(t *testing.T) {
	w := newWorld(t)
	good, text := w.token()
	parts := strings.Split(text, ".")
	for what, token := range map[string]string{
		"wrong secret": parts[0] + ".AAAA." + parts[2], "unknown id": "0011." + parts[1] + "." + parts[2], "path as id": "x/" + parts[0] + "." + parts[1] + "." + parts[2],
	} {
		err := bring(t, t.TempDir(), written(t, token), w.address)
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%s: %v", what, err)
	}
	for _, token := range []string{"", "hello", parts[0] + "." + parts[1], parts[0] + ".." + parts[2], strings.Repeat("x", 600) + text} {
		require.ErrorContains(t, bring(t, t.TempDir(), written(t, token), w.address), "trivet cluster token")
	}
	require.ErrorIs(t, bring(t, t.TempDir(), filepath.Join(t.TempDir(), "none"), w.address), fs.ErrNotExist)
	asked := &server{s: w.Service}
	for says, q := range map[string]*memberv1.BringKeyRequest{
		"upgrade the older":         {Protocol: 2, Token: text},
		"not a certificate request": {Protocol: 1, Token: text, Csr: []byte("garbage")},
		"at most":                   {Protocol: 1, Token: text, Csr: make([]byte, mtls.MaxRequest+1)},
		"unknown, expired or used":  {Protocol: 1, Token: strings.Repeat("x", 600) + ".y.z"},
	} {
		_, err := asked.BringKey(t.Context(), q)
		require.ErrorContains(t, err, says)
	}
	require.NoError(t, bring(t, t.TempDir(), good, w.address))

	late, _ := w.token()
	w.pass(time.Hour)
	err := bring(t, t.TempDir(), late, w.address)
	require.Equal(t, codes.Unauthenticated, status.Code(err), err)
	require.NoError(t, w.Expire(t.Context()))
	require.NoError(t, w.opts.Store.Local(func(v *store.View) error {
		left, _, err := invitations.List(v, 0)
		require.Empty(t, left)
		return err
	}))
}

// TestWrongPin checks that a server whose certificate does not match the token's pin receives no request, and that
// Bring returns an error if no other server is known.
func TestWrongPin(t *testing.T) {
	w, other := newWorld(t), newWorld(t)
	file, _ := w.token()
	dir := t.TempDir()
	require.ErrorContains(t, bring(t, dir, file, other.address), "another certificate authority")
	require.Zero(t, other.called())
	require.NoError(t, bring(t, dir, file, other.address, w.address))
	require.Zero(t, other.called())
}

func TestTokens(t *testing.T) {
	w := newWorld(t)
	for ttl, want := range map[time.Duration]time.Duration{0: time.Hour, time.Minute: time.Minute, 24 * time.Hour: 24 * time.Hour} {
		_, expires, err := w.NewToken(t.Context(), ttl)
		require.NoError(t, err)
		require.WithinDuration(t, w.now.Add(want), time.UnixMilli(expires), time.Minute)
	}
	for _, ttl := range []time.Duration{-1, 25 * time.Hour} {
		_, _, err := w.NewToken(t.Context(), ttl)
		require.True(t, fault.Is(err, fault.InvalidArgument))
	}
	for range maxTokens - 3 {
		w.token()
	}
	_, _, err := w.NewToken(t.Context(), 0)
	require.True(t, fault.Is(err, fault.ResourceExhausted))

	// The stored records contain no secret.
	w.pass(25 * time.Hour)
	require.NoError(t, w.Expire(t.Context()))
	_, text := w.token()
	require.NoError(t, w.opts.Store.Local(func(v *store.View) error {
		all, _, err := invitations.List(v, 0)
		require.Len(t, all, 1)
		require.False(t, bytes.Contains(all[0].Value.Secret[:], []byte(strings.Split(text, ".")[1])))
		return err
	}))
}
