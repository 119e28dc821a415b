package transport

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// recordingMachine is a state machine that stores the proposals in the order in which they are applied.
type recordingMachine struct {
	mu      sync.Mutex
	grown   chan struct{}
	restore int // how often the state was replaced by a snapshot
	recordingState
}

type recordingState struct {
	Index, Term uint64
	Lines       []string
}

// large is the content of a checkpoint file that is sent in several chunks.
var large = bytes.Repeat([]byte("0123456789abcdef"), 3*chunk/16+1)

func (m *recordingMachine) Apply(entries []consensus.Entry) ([]any, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]any, len(entries))
	for i, e := range entries {
		m.Lines = append(m.Lines, string(e.Data))
		out[i] = fmt.Sprint(len(m.Lines))
	}
	last := entries[len(entries)-1]
	m.Index, m.Term = last.Index, last.Term
	m.notify()
	return out, nil
}

// lines returns the proposals without adjacent duplicates, and without entries that have no data, which are raft's own.
func (m *recordingMachine) lines() []string {
	return slices.Compact(slices.DeleteFunc(slices.Clone(m.Lines), func(line string) bool { return line == "" }))
}

func (m *recordingMachine) notify() { close(m.grown); m.grown = make(chan struct{}) }

func (m *recordingMachine) Applied() (uint64, uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Index, m.Term
}
func (m *recordingMachine) Flush() (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Index, nil
}

func (m *recordingMachine) Checkpoint(dir string) (uint64, uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	state, err := json.Marshal(m.recordingState)
	if err != nil {
		return 0, 0, err
	}
	for name, data := range map[string][]byte{"tape": state, "deep/er/large": large, "deep/empty": nil} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, data, 0o600)); err != nil {
			return 0, 0, err
		}
	}
	return m.Index, m.Term, nil
}

func (m *recordingMachine) Restore(dir string) error {
	if got, err := os.ReadFile(filepath.Join(dir, "deep/er/large")); err != nil || !bytes.Equal(got, large) {
		return fmt.Errorf("the received large file is wrong: %w", err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "deep/empty")); err != nil || len(got) > 0 {
		return fmt.Errorf("the received empty file is wrong: %w", err)
	}
	state, err := os.ReadFile(filepath.Join(dir, "tape"))
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.restore++
	defer m.notify()
	return json.Unmarshal(state, &m.recordingState)
}

// until waits until the machine has applied the given line.
func (m *recordingMachine) until(ctx context.Context, line string) error {
	for {
		m.mu.Lock()
		have, grown := slices.Contains(m.Lines, line), m.grown
		m.mu.Unlock()
		if have {
			return nil
		}
		select {
		case <-grown:
		case <-ctx.Done():
			return fmt.Errorf("no %s: %w", line, ctx.Err())
		}
	}
}

// testServer is one member of a testCluster, which listens on loopback.
type testServer struct {
	t                testing.TB
	id               uint64
	mesh             *Transport
	runner           *consensus.Runner
	commands         *leader.Commands
	recordingMachine *recordingMachine
	dir              string
	config           *tls.Config
	server           *rpc.Server
}

// testCluster is a set of members that have each other's addresses and a common certificate authority.
type testCluster struct {
	t          testing.TB
	hear       map[uint64]func(message.Envelope) bool // by member: receives its envelopes instead of consensus
	authority  *mtls.Authority
	addresses  map[uint64]string
	servers    map[uint64]*testServer
	leadership *leadertest.Leadership
}

func authority(t testing.TB, cluster string) *mtls.Authority {
	seed := make([]byte, ed25519.SeedSize)
	rand.Read(seed)
	a, err := mtls.NewAuthority(cluster, seed)
	require.NoError(t, err)
	return a
}

func issued(t testing.TB, a *mtls.Authority, kind mtls.Kind, name string, at time.Time) mtls.Source {
	c, err := a.IssueFor(kind, name, at, time.Hour)
	require.NoError(t, err)
	return func() (*tls.Certificate, error) { return c, nil }
}

// newTestCluster starts n members. Those in absent have an address but are not started.
func newTestCluster(t testing.TB, n uint64, absent ...uint64) *testCluster {
	return newTestClusterWith(t, nil, n, absent...)
}

// newTestClusterWith is newTestCluster, but each function in hear receives the envelopes (raft messages) of that member
// instead of consensus.
func newTestClusterWith(t testing.TB, hear map[uint64]func(message.Envelope) bool, n uint64, absent ...uint64) *testCluster {
	w := &testCluster{t: t, hear: hear, authority: authority(t, "test"), addresses: map[uint64]string{}, servers: map[uint64]*testServer{}, leadership: leadertest.NewLeadership(1)}
	listeners := map[uint64]net.Listener{}
	for id := uint64(1); id <= n; id++ {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		w.addresses[id] = l.Addr().String()
		if slices.Contains(absent, id) {
			require.NoError(t, l.Close())
			continue
		}
		listeners[id] = l
	}
	for id, l := range listeners {
		w.servers[id] = w.startServer(id, l)
	}
	return w
}

func (w *testCluster) startServer(id uint64, l net.Listener) *testServer {
	t := w.t
	s := &testServer{t: t, id: id, dir: t.TempDir(), recordingMachine: &recordingMachine{grown: make(chan struct{})}}
	own := issued(t, w.authority, mtls.Member, strconv.FormatUint(id, 10), time.Now())
	s.config = mtls.Server(own, w.authority.Certificate(), mtls.OnlyKind(mtls.Member))
	log := slog.New(slog.DiscardHandler)
	var err error
	s.mesh, err = New(Options{Self: id, Members: w.addresses, Certificate: own, Authority: w.authority, Log: log})
	require.NoError(t, err)
	host, err := consensus.Open(consensus.Options{
		ID: id, Members: slices.Sorted(maps.Keys(w.addresses)), Dir: s.dir, Transport: s.mesh, Log: log,
		Limits: consensus.Limits{TailEntries: 5},
	})
	require.NoError(t, err)
	_, err = host.AddGroup(consensus.GroupOptions{ID: 1, Name: "tape", Machine: s.recordingMachine})
	require.NoError(t, err)
	s.runner = consensus.Start(host, consensus.RunnerOptions{TickInterval: 10 * time.Millisecond})
	s.commands = leader.NewCommands(id, w.leadership, s.mesh)
	s.mesh.Attach(s.runner, s.commands, files(filepath.Join(s.dir, "images")))
	if hear := w.hear[id]; hear != nil {
		s.mesh.deliver = hear
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.mesh.Run(ctx) }()
	s.serve(l)
	t.Cleanup(func() {
		stopping, end := context.WithCancel(context.Background())
		end() // the leadership is not transferred
		s.runner.Stop(stopping)
		cancel()
		s.server.Stop()
		<-done
	})
	return s
}

func (s *testServer) serve(l net.Listener) {
	s.server, _ = rpc.New(rpc.Options{
		Credentials: s.mesh.Credentials(s.config), Log: slog.New(slog.DiscardHandler), Metrics: grpcprom.NewServerMetrics(),
		MaxMessage: maxMessage,
	})
	s.mesh.Register(s.server)
	go s.server.Serve(l)
}

// stopServing closes the incoming connections of the member and its listener.
func (s *testServer) stopServing() {
	s.server.Stop()
	s.mesh.closeIncoming()
}

// files implements Images with the files in a directory.
type files string

func (d files) Open(sum string) (io.ReadSeekCloser, error) {
	f, err := os.Open(filepath.Join(string(d), filepath.Base(sum)))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "this member does not hold the image")
	}
	return f, err
}

func (d files) StorePart(_ context.Context, sum string, r io.Reader) error {
	part, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(string(d), filepath.Base(sum)), part, 0o600)
}

func (s *testServer) snapshots() []string {
	entries, err := os.ReadDir(s.runner.SnapshotDir())
	require.NoError(s.t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func limited(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// propose proposes a line and returns when it is committed. It tries one member after the other until the leader
// accepts the line.
func (w *testCluster) propose(ctx context.Context, line string) {
	var id [16]byte
	rand.Read(id[:])
	for {
		for _, s := range w.servers {
			attempt, cancel := context.WithTimeout(ctx, time.Second)
			_, err := s.runner.Propose(attempt, 1, id, []byte(line))
			cancel()
			if err == nil {
				return
			}
			require.NoError(w.t, ctx.Err(), "propose %s: %v", line, err)
		}
	}
}

// logOf returns the status of the only raft group on a member.
func (w *testCluster) logOf(ctx context.Context, member uint64) consensus.GroupStatus {
	status, err := w.servers[member].runner.Status(ctx)
	require.NoError(w.t, err)
	return status.Groups[0]
}

// TestThreeMembersAgree replicates proposals over real connections between three members. One is isolated until the
// others' logs no longer contain what it missed, so that it must get a snapshot. In the end, all must have the same
// lines.
func TestThreeMembersAgree(t *testing.T) {
	w := newTestCluster(t, 3)
	ctx := limited(t)
	w.propose(ctx, "first")
	for _, s := range w.servers {
		require.NoError(t, s.recordingMachine.until(ctx, "first"))
	}
	third := w.servers[3]
	third.stopServing()
	missed := 0
	// Messages that were sent before the member was isolated may still arrive.
	for first := uint64(0); missed < 60 || first <= w.logOf(ctx, 3).Last+1; missed++ {
		w.propose(ctx, fmt.Sprint("missed ", missed))
		first = min(w.logOf(ctx, 1).First, w.logOf(ctx, 2).First)
	}
	l, err := net.Listen("tcp", w.addresses[3])
	require.NoError(t, err)
	third.serve(l)
	require.NoError(t, third.recordingMachine.until(ctx, fmt.Sprint("missed ", missed-1)))
	w.propose(ctx, "last")
	for _, s := range w.servers {
		require.NoError(t, s.recordingMachine.until(ctx, "last"))
	}
	third.recordingMachine.mu.Lock()
	require.Positive(t, third.recordingMachine.restore, "the member has installed a snapshot")
	third.recordingMachine.mu.Unlock()
	for id, s := range w.servers {
		stopping, cancel := context.WithTimeout(ctx, time.Second)
		require.ErrorIs(t, errors.Join(s.runner.Stop(stopping), s.runner.Err()), consensus.ErrStopped)
		cancel()
		for _, name := range s.snapshots() {
			require.NotContains(t, name, "in-", "member %d keeps no snapshot that it received", id)
		}
	}
	// A proposal that is repeated after a lost response is stored twice; lines removes the duplicates.
	want := w.servers[1].recordingMachine.lines()
	require.Len(t, want, 2+missed)
	for id, s := range w.servers {
		require.Equal(t, want, s.recordingMachine.lines(), id)
	}
}
