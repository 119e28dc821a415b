package restapi

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// fakeConsensus applies a proposal at once to the engines of all members that are not lagging.
type fakeConsensus struct {
	mu      sync.Mutex
	engines map[uint64]*mvcc.Engine
	lagging map[uint64]bool
	leader  uint64
	views   map[uint64]uint64 // by member: the leader that the member reports, if that is not the field leader
}

func (a *fakeConsensus) propose(ctx context.Context, self uint64, data []byte) (own command.Result, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return own, err
	}
	if a.leader == 0 {
		return own, consensus.ErrNoLeader
	}
	for id, e := range a.engines {
		if a.lagging[id] {
			continue
		}
		got, err := e.Apply([]command.Command{{Index: e.Applied().Index + 1, Term: 1, Data: data, WantSteps: id == self}})
		if err != nil {
			return own, err
		}
		if id == self {
			own = got[0]
		}
	}
	return own, nil
}

// memberView implements kv.Consensus for the member self.
type memberView struct {
	*fakeConsensus
	self uint64
}

func (s memberView) Propose(ctx context.Context, data []byte, _ bool) (command.Result, error) {
	return s.propose(ctx, s.self, data)
}

func (s memberView) ReadIndex(ctx context.Context) error {
	if leader, _ := s.Leader(); leader == 0 {
		return consensus.ErrNoLeader
	}
	return ctx.Err()
}

func (s memberView) Status(context.Context) (consensus.GroupStatus, error) {
	leader, term := s.Leader()
	out := consensus.GroupStatus{Role: "Follower", Leader: leader, Term: term}
	switch leader {
	case s.self:
		out.Role = "Leader"
	case 0:
		out.Role = "Candidate"
	}
	return out, nil
}

func (s memberView) Self() uint64 { return s.self }

func (s memberView) Leader() (uint64, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if leader, ok := s.views[s.self]; ok {
		return leader, 1
	}
	return s.leader, 1
}

func (s memberView) Changed() <-chan struct{} { return nil }

// fakeMembers implements Membership. last describes the last change; err is the error that the next change returns.
type fakeMembers struct {
	mu   sync.Mutex
	list []membership.Member
	err  error
	last string
}

func (m *fakeMembers) List(context.Context, bool) ([]membership.Member, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]membership.Member(nil), m.list...), nil
}

func (m *fakeMembers) record(format string, args ...any) error {
	m.last = fmt.Sprintf(format, args...)
	err := m.err
	m.err = nil
	return err
}

func (m *fakeMembers) Add(_ context.Context, q membership.AddRequest) (membership.Member, []membership.Member, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.record("add %d %q %q %v learner=%v", q.ID, q.RaftAddr, q.Name, q.ClientURLs, q.Learner); err != nil {
		return membership.Member{}, nil, err
	}
	if !strings.Contains(q.RaftAddr, "://") {
		q.RaftAddr = "http://" + q.RaftAddr
	}
	added := membership.Member{ID: q.ID, Name: q.Name, RaftAddr: q.RaftAddr}
	m.list = append(m.list, added)
	return added, m.list, nil
}

func (m *fakeMembers) RemoveOpen(_ context.Context, id uint64) ([]membership.Member, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.record("remove %d", id); err != nil {
		return nil, err
	}
	return m.list[1:], nil
}

func (m *fakeMembers) Transfer(_ context.Context, to uint64, groups ...uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.record("transfer of %v to %d", groups, to)
}

// fakeKeys is the Keyspace of one member; err is the error that its next call returns.
type fakeKeys struct {
	Keyspace
	mu        sync.Mutex
	err       error
	streamErr error // error of RangeStream after its first message
}

func (k *fakeKeys) next() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	err := k.err
	k.err = nil
	return err
}

func (k *fakeKeys) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if err := k.next(); err != nil {
		return nil, err
	}
	return k.Keyspace.Range(ctx, r)
}

func (k *fakeKeys) RangeStream(ctx context.Context, r *pb.RangeRequest, send func(*pb.RangeResponse) error) error {
	if err := k.next(); err != nil {
		return err
	}
	return k.Keyspace.RangeStream(ctx, r, func(part *pb.RangeResponse) error {
		if err := send(part); err != nil {
			return err
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.streamErr
	})
}

func (k *fakeKeys) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	if err := k.next(); err != nil {
		return nil, err
	}
	return k.Keyspace.Put(ctx, r)
}

func (k *fakeKeys) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	if err := k.next(); err != nil {
		return nil, err
	}
	return k.Keyspace.DeleteRange(ctx, r)
}

// testCluster holds members with REST servers. The member with ID id listens on 127.0.0.<id>; all have the same port.
type testCluster struct {
	t         *testing.T
	consensus *fakeConsensus
	members   *fakeMembers
	services  map[uint64]*kv.Service
	keys      map[uint64]*fakeKeys
	rest      map[uint64]*Server
	servers   map[uint64]*http.Server
	port      uint16
	log       *strings.Builder
	clock     time.Time
	// public makes the next requests look as if they arrived on an address other than loopback.
	public bool
}

func newTestCluster(t *testing.T, members int, open, serve bool) *testCluster {
	s := &testCluster{
		t: t, members: &fakeMembers{}, services: map[uint64]*kv.Service{}, keys: map[uint64]*fakeKeys{}, rest: map[uint64]*Server{},
		servers: map[uint64]*http.Server{}, clock: time.UnixMilli(1_800_000_000_000), log: &strings.Builder{},
		consensus: &fakeConsensus{engines: map[uint64]*mvcc.Engine{}, lagging: map[uint64]bool{}, leader: 1, views: map[uint64]uint64{}},
	}
	var locked sync.Mutex
	log := slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
		locked.Lock()
		defer locked.Unlock()
		return s.log.Write(p)
	}), nil))
	var listeners map[uint64]net.Listener
	if serve {
		listeners = s.listen(members)
	}
	for id := uint64(1); id <= uint64(members); id++ {
		engine, err := mvcc.Open(vfs.NewMem(), "kv", mvcc.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, engine.Close()) })
		s.consensus.engines[id] = engine
		s.services[id] = kv.New(kv.Options{
			Engine: engine, Consensus: memberView{s.consensus, id}, Leases: &kv.LeaseFeed{}, Tokens: users.NewTokens(make([]byte, 32), 0),
			Self: id, Cluster: 77, Election: time.Second, BcryptCost: 4, Log: log,
		})
		s.keys[id] = &fakeKeys{Keyspace: s.services[id]}
		s.members.list = append(s.members.list, membership.Member{ID: id, RaftAddr: fmt.Sprintf("http://127.0.0.%d:2380", id)})
		s.rest[id] = New(Options{
			Keys: s.keys[id], Members: s.members, Group: memberView{s.consensus, id}, GroupID: 2, Self: id, Cluster: 77,
			Key: []byte("the members' key"), Port: s.port, Open: open, Hosts: []string{"keys.example"}, Log: log,
			Metrics: rest.NewMetrics(prometheus.NewRegistry()), Now: func() time.Time { return s.clock },
		})
		if listeners != nil {
			s.serve(id, listeners[id])
		}
	}
	return s
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// listen returns a listener for each member, all with the same port, on the addresses of the members.
func (s *testCluster) listen(members int) map[uint64]net.Listener {
	for range 50 {
		all := map[uint64]net.Listener{}
		port := 0
		for id := 1; id <= members; id++ {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.%d:%d", id, port))
			if err != nil {
				break
			}
			all[uint64(id)], port = l, l.Addr().(*net.TCPAddr).Port
		}
		if len(all) == members {
			s.port = uint16(port)
			return all
		}
		for _, l := range all {
			l.Close()
		}
	}
	s.t.Fatal("no port is free on all of loopback's addresses")
	return nil
}

func (s *testCluster) serve(id uint64, l net.Listener) {
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.public {
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(10, 0, 0, byte(id)), Port: 8081}))
		}
		s.rest[id].ServeHTTP(w, r)
	}), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	s.servers[id] = server
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	s.t.Cleanup(func() {
		s.rest[id].Close()
		server.Close()
		<-done
	})
}

// response is the HTTP response to a request.
type response struct {
	status int
	header http.Header
	body   []byte
	err    error // error of reading the body
}

// send sends the text of an HTTP request to the member id over a new connection and returns the response.
func (s *testCluster) send(id uint64, text string) response {
	conn, err := net.Dial("tcp", net.JoinHostPort(fmt.Sprintf("127.0.0.%d", id), strconv.Itoa(int(s.port))))
	require.NoError(s.t, err)
	defer conn.Close()
	require.NoError(s.t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	_, err = io.WriteString(conn, text)
	require.NoError(s.t, err)
	method, _, _ := strings.Cut(text, " ")
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	require.NoError(s.t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return response{resp.StatusCode, resp.Header, body, err}
}

// payload checks the JSON envelope of a response and returns the data or the error in it.
func (a response) payload(t *testing.T) string {
	require.NoError(t, a.err)
	require.Equal(t, "application/json", a.header.Get("Content-Type"), "%s", a.body)
	var body struct {
		Data, Error json.RawMessage
		Meta        struct {
			RequestID string `json:"request_id"`
			Timestamp time.Time
		}
	}
	require.NoError(t, json.Unmarshal(a.body, &body), "%s", a.body)
	_, err := uuid.Parse(body.Meta.RequestID)
	require.NoError(t, err)
	require.False(t, body.Meta.Timestamp.IsZero())
	require.True(t, (body.Data == nil) != (body.Error == nil), "%s", a.body)
	if body.Data != nil {
		return string(body.Data)
	}
	return string(body.Error)
}
