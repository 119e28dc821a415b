package node

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// fakeVMs implements VMController for tests. The desired state of every placed VM is on, or destroyed if its placement
// is Gone. Reports are stored in the field reports.
type fakeVMs struct {
	mu      sync.Mutex
	reports map[cloud.NodeID][]cloud.Observation
	fail    error
	// uses holds the checksums of the images that the VMs of each host use.
	uses map[cloud.NodeID][]string
	// changes makes Observed count each report as a changed record.
	changes bool
}

func (g *fakeVMs) Assigned(v *store.View, on cloud.NodeID, vms ...cloud.VMID) (out []Assignment, err error) {
	all, _, err := PlacedVMs.List(v, 0, string(on))
	for _, r := range all {
		id := cloud.VMID(r.Path[1])
		if len(vms) > 0 && !slices.Contains(vms, id) || r.Value.Project == "no record" {
			continue
		}
		state := &agentv1.AssignedVm{VmId: string(id), Generation: r.Value.Generation, Power: agentv1.Power_POWER_ON}
		if r.Value.Gone {
			state.Power = agentv1.Power_POWER_DESTROYED
		}
		out = append(out, Assignment{id, state})
	}
	return out, err
}

func (g *fakeVMs) Observed(_ context.Context, on cloud.NodeID, reports []cloud.Observation) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reports[on] = append(g.reports[on], slices.Clone(reports)...)
	if g.changes {
		return len(reports), g.fail
	}
	return 0, g.fail
}

func (g *fakeVMs) Describe(_ store.Reader, project cloud.ProjectID, id cloud.VMID) (string, error) {
	return string(project) + "/" + string(id), nil
}

func (g *fakeVMs) UsesImage(_ *store.View, on cloud.NodeID, sum string) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Contains(g.uses[on], sum), nil
}

type images map[string][]byte

type file struct{ *bytes.Reader }

func (file) Close() error { return nil }

func (i images) Open(sum string) (io.ReadSeekCloser, error) {
	b, ok := i[sum]
	if !ok {
		return nil, fault.New(fault.NotFound, "this member does not hold the image")
	}
	return file{bytes.NewReader(b)}, nil
}

// world holds two members that share one store. Member 1 leads at first. Each member serves agents on a loopback port.
type world struct {
	t          *testing.T
	records    *store.Store
	leadership *leadertest.Leadership
	authority  *mtls.Authority
	vms        *fakeVMs
	members    map[uint64]*Service
	addresses  map[uint64]string

	mu  sync.Mutex
	off time.Duration
	// frozen, if set, is the constant time that steady returns to measure heartbeats.
	frozen time.Time
	// wallOffset is how far the wall clock is set forward. It changes now, but not steady.
	wallOffset time.Duration
	// tick, if set, is called whenever a member reads its wall clock.
	tick func()
}

func (w *world) now() time.Time {
	w.mu.Lock()
	tick := w.tick
	at := time.Now().Add(w.off + w.wallOffset)
	w.mu.Unlock()
	if tick != nil {
		tick()
	}
	return at
}

func (w *world) steady() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.frozen.IsZero() {
		return w.frozen
	}
	return time.Now().Add(w.off)
}

func (w *world) setClock(d time.Duration) { w.mu.Lock(); defer w.mu.Unlock(); w.wallOffset = d }
func (w *world) pass(d time.Duration)     { w.mu.Lock(); defer w.mu.Unlock(); w.off += d }

func newWorld(t *testing.T) *world {
	seed := make([]byte, ed25519.SeedSize)
	rand.Read(seed)
	authority, err := mtls.NewAuthority("test", seed)
	require.NoError(t, err)
	w := &world{
		t: t, leadership: leadertest.NewLeadership(1), authority: authority,
		vms: &fakeVMs{reports: map[cloud.NodeID][]cloud.Observation{}, uses: map[cloud.NodeID][]string{}}, members: map[uint64]*Service{}, addresses: map[uint64]string{},
	}
	w.records = storetest.Memory(t, w.now)
	listeners := map[uint64]net.Listener{}
	for id := uint64(1); id <= 2; id++ {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		listeners[id], w.addresses[id] = l, l.Addr().String()
	}
	members := leadertest.NewMembers(2, w.leadership)
	for id, l := range listeners {
		log := slog.New(slog.DiscardHandler)
		s := New(Options{
			Store: w.records, Commands: members[id], Leadership: w.leadership, Self: id, Listeners: func() map[uint64]string { return w.addresses }, Authority: authority,
			Log: log, Now: w.now, Steady: w.steady,
		})
		s.Attach(w.vms, images{"sum": []byte("0123456789")})
		s.AttachNetworks(fakeNetworks{})
		w.members[id] = s
		own := w.certificate(mtls.Member, fmt.Sprint(id), time.Now(), time.Hour)
		shows := func() (*tls.Certificate, error) {
			c, err := own()
			return mtls.WithAuthority(c, authority.Certificate()), err
		}
		g, _ := rpc.New(rpc.Options{
			Credentials: s.Credentials(mtls.ServerOptional(shows, authority.Certificate(), mtls.OnlyKind(mtls.Node), RenewGrace)),
			Log:         log, Metrics: grpcprom.NewServerMetrics(), MaxMessage: MaxMessage, Certified: true, Open: []string{OpenMethod},
		})
		s.RegisterAgents(g)
		go g.Serve(l)
		t.Cleanup(g.Stop)
		guarding, end := context.WithCancel(context.Background())
		var work sync.WaitGroup
		work.Go(func() { s.Guard(guarding) })
		t.Cleanup(func() { end(); work.Wait() })
	}
	return w
}

func (w *world) certificate(kind mtls.Kind, name string, at time.Time, life time.Duration) mtls.Source {
	c, err := w.authority.IssueFor(kind, name, at, life)
	require.NoError(w.t, err)
	return func() (*tls.Certificate, error) { return c, nil }
}

// certificateFor issues a certificate for the given key to the host with this ID.
func (w *world) certificateFor(id cloud.NodeID, key ed25519.PrivateKey, at time.Time, life time.Duration) mtls.Source {
	leaf, err := w.authority.Issue(mtls.Node, string(id), key.Public(), at, life)
	require.NoError(w.t, err)
	return func() (*tls.Certificate, error) {
		return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}, nil
	}
}

// follow runs a member's Follow until the end of the test or a call of stop, and waits until it has read the records.
func (w *world) follow(id uint64) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.members[id].Follow(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	w.t.Cleanup(stop)
	s := w.members[id]
	require.Eventually(w.t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.termStart != 0 }, 10*time.Second, time.Millisecond)
	return stop
}

// agent is a connection to one member, with the ID of the host that it belongs to.
type agent struct {
	agentv1.AgentServiceClient
	vmv1.NodeServiceClient
	id cloud.NodeID
}

func (w *world) dial(member uint64, config *tls.Config) agent {
	conn, err := grpc.NewClient("passthrough:///"+w.addresses[member], grpc.WithTransportCredentials(credentials.NewTLS(config)))
	require.NoError(w.t, err)
	w.t.Cleanup(func() { conn.Close() })
	return agent{agentv1.NewAgentServiceClient(conn), vmv1.NewNodeServiceClient(conn), ""}
}

// with connects to a member with the client certificate own, or without a certificate if own is nil.
func (w *world) with(member uint64, own mtls.Source) agent {
	return w.dial(member, mtls.Client(own, w.authority.Certificate(), mtls.OnlyKind(mtls.Member)))
}

// host creates the record of test host n if it does not exist, and returns a connection with a valid certificate of
// that host.
func (w *world) host(member uint64, n int) agent {
	id := cloud.NodeID(fmt.Sprintf("00000000-0000-7000-a000-%012d", n))
	w.update(func(tx *store.Tx) error {
		if known, err := Nodes.Has(tx, string(id)); err != nil || known {
			return err
		}
		Nodes.Put(tx, &cloud.Node{ID: id, Name: fmt.Sprint("host-", n), Declared: cloud.NodeNotReady}, string(id))
		return nil
	})
	a := w.with(member, w.certificate(mtls.Node, string(id), time.Now(), time.Hour))
	a.id = id
	return a
}

func (w *world) update(f func(*store.Tx) error) {
	w.t.Helper()
	_, err := w.records.Update(w.t.Context(), f)
	require.NoError(w.t, err)
}

func (w *world) node(id cloud.NodeID) (n *cloud.Node) {
	w.t.Helper()
	require.NoError(w.t, w.records.Local(func(v *store.View) (err error) { n, err = Nodes.Get(v, string(id)); return err }))
	return n
}

func (w *world) place(on cloud.NodeID, vm cloud.VMID, p *Placed) {
	w.t.Helper()
	w.update(func(tx *store.Tx) error {
		if p == nil {
			PlacedVMs.Delete(tx, string(on), string(vm))
		} else {
			PlacedVMs.Put(tx, p, string(on), string(vm))
		}
		return nil
	})
}

func testVM(n int) cloud.VMID { return cloud.VMID(fmt.Sprintf("00000000-0000-7000-b000-%012d", n)) }

func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func request(t *testing.T, key any) []byte {
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(t, err)
	return csr
}

func newKey(t *testing.T) ed25519.PrivateKey {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	return key
}

// refused checks that err has the gRPC code and contains the text says.
func refused(t *testing.T, err error, code codes.Code, says string) {
	t.Helper()
	require.Equal(t, code, status.Code(err), "%v", err)
	require.ErrorContains(t, err, says)
}
