package billing

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// alone is the leadership of the only member.
type alone struct{}

func (alone) Leader() (uint64, uint64) { return 1, 1 }
func (alone) Changed() <-chan struct{} { return nil }

// errLost is how a proposal fails of which nobody knows what became.
var errLost = errors.New("the answer was lost")

// quorum agrees on everything, counts what it agreed on, and can lose questions and answers.
type quorum struct {
	*store.Direct
	agreed atomic.Int64
	// lose is asked before and after each proposal; nil loses none.
	lose func(after bool) bool
}

func (q *quorum) Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error) {
	if q.lose != nil && q.lose(false) {
		return command.Result{}, errLost
	}
	result, err := q.Direct.Propose(ctx, id, data)
	if err == nil && !result.Conflict {
		q.agreed.Add(1)
	}
	if q.lose != nil && q.lose(true) {
		return command.Result{}, errLost
	}
	return result, err
}

// world is a member that leads, with VMs, wallets and billing over records in memory, and a host played by the test. Its
// clock stands still until it is moved.
type world struct {
	t       testing.TB
	store   *store.Store
	quorum  *quorum
	credits *credit.Service
	vms     *vm.Service
	bills   *Service
	beats   vmv1.NodeServiceServer
	host    cloud.NodeID

	mu sync.Mutex
	at time.Time
}

var (
	acme = cloud.Tenant{Org: "acme", Project: "web"}
	evil = cloud.Tenant{Org: "evil", Project: "lair"}
	// prices make an hour of small 10 × 2 + 4 × 1/2 + 1 × 5 = 27, and 5 when it is off.
	prices = Prices{VCPUHour: 10, MemoryGiBHour: 4, DiskGiBHour: 1}
	on     = Rules{Enabled: true, Prices: prices}
	strict = Rules{Enabled: true, Prices: prices, OnEmpty: Stop}
)

const (
	running = 27
	off     = 5
)

// hour is one, in the middle of which things happen.
const hour = time.Hour

func newWorld(t testing.TB, rules Rules) *world {
	w := &world{t: t, at: time.UnixMilli(1_800_000_000_000), host: "00000000-0000-7000-a000-000000000001"}
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	w.quorum = &quorum{Direct: store.NewDirect(engine)}
	w.store = store.New(store.Options{Engine: engine, Proposer: w.quorum, PageKey: make([]byte, 32), Now: w.now})
	w.update(func(tx *store.Tx) error {
		for _, t := range []cloud.Tenant{acme, evil} {
			if _, err := tenant.CreateOrg(tx, t.Org, ""); err != nil {
				return err
			}
			if _, err := tenant.CreateProject(tx, t, "", tenant.Quota{}); err != nil {
				return err
			}
		}
		return nil
	})
	log := slog.New(slog.DiscardHandler)
	authority, err := mtls.NewAuthority("test", make([]byte, 32))
	require.NoError(t, err)
	commands := leader.NewCommands(1, alone{}, nil)
	began := w.at
	nodes := node.New(node.Options{
		Store: w.store, Commands: commands, Leadership: alone{}, Self: 1, Authority: authority, Log: log,
		Now: func() time.Time { return began }, // the host is never late
	})
	w.credits = credit.New(credit.Options{Store: w.store, Commands: commands, Log: log, Project: lookUp})
	w.bills = w.member(rules)
	o := vm.Options{Store: w.store, Commands: commands, Nodes: nodes, Log: log}
	if rules.Enabled {
		o.Billing = w.bills
	}
	w.vms = vm.New(o)
	w.bills.Attach(w.vms)
	nodes.Attach(w.vms, nil)
	nodes.RegisterAgents(w)
	ctx, cancel := context.WithCancel(context.Background())
	var following sync.WaitGroup
	following.Go(func() { nodes.Follow(ctx) })
	t.Cleanup(func() { cancel(); following.Wait() })
	w.addHost(nodes, authority)
	return w
}

// lookUp looks up projects for wallets, as package controlplane does.
func lookUp(r store.Reader, id cloud.ProjectID) (credit.Project, error) {
	p, err := tenant.Projects.Get(r, string(id))
	if err != nil || p == nil {
		return credit.Project{}, err
	}
	return credit.Project{Exists: p.DeletedAt == 0, Org: p.Org, Incarnation: p.Incarnation}, nil
}

// member is the billing of another member, with other rules if it likes.
func (w *world) member(rules Rules) *Service {
	s := New(Options{Store: w.store, Credits: w.credits, Log: slog.New(slog.DiscardHandler), Rules: rules})
	if w.vms != nil {
		s.Attach(w.vms)
	}
	return s
}

func (w *world) now() time.Time       { w.mu.Lock(); defer w.mu.Unlock(); return w.at }
func (w *world) wait(d time.Duration) { w.mu.Lock(); defer w.mu.Unlock(); w.at = w.at.Add(d) }

// RegisterService implements grpc.ServiceRegistrar: it takes what agents would call.
func (w *world) RegisterService(_ *grpc.ServiceDesc, impl any) {
	if beats, ok := impl.(vmv1.NodeServiceServer); ok {
		w.beats = beats
	}
}

func (w *world) addHost(nodes *node.Service, authority *mtls.Authority) {
	plenty := cloud.Capacity{VCPUs: 1 << 20, MemoryMiB: 1 << 30, StorageGiB: 1 << 30}
	n := cloud.Node{
		ID: w.host, Name: "h1", Declared: cloud.NodeReady, Capacity: plenty, Allocatable: plenty,
		Hypervisors: []cloud.Hypervisor{cloud.KVM}, Architecture: cloud.X8664,
	}
	w.update(func(tx *store.Tx) error { node.Nodes.Put(tx, &n, string(n.ID)); return nil })
	cert, err := authority.IssueFor(mtls.Node, string(n.ID), w.now(), time.Hour)
	require.NoError(w.t, err)
	ctx := grpcpeer.NewContext(w.t.Context(), &grpcpeer.Peer{
		AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert.Leaf}}},
	})
	has := &vmv1.NodeCapacity{Vcpus: plenty.VCPUs, MemoryMib: plenty.MemoryMiB, StorageGib: plenty.StorageGiB}
	_, err = w.beats.HeartbeatNode(ctx, &vmv1.HeartbeatNodeRequest{
		NodeId: string(n.ID), Name: n.Name, State: vmv1.NodeState_NODE_STATE_READY, Capacity: has, Allocatable: has,
		Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM},
	})
	require.NoError(w.t, err)
	require.Eventually(w.t, func() bool { return len(nodes.Fleet()) == 1 }, 10*time.Second, time.Millisecond)
}

func (w *world) update(f func(tx *store.Tx) error) {
	w.t.Helper()
	_, err := w.store.Update(w.t.Context(), f)
	require.NoError(w.t, err)
}

// as is a call of the tenant's.
func (w *world) as(t cloud.Tenant) context.Context {
	return auth.With(w.t.Context(), &cloud.Caller{
		User: "ada", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: t.Org, Project: t.Project}},
	}, auth.RPC)
}

// order carries out a command on the tenant's wallet.
func (w *world) order(c ledger.Command) {
	w.t.Helper()
	_, err := w.credits.Give(w.as(acme), credit.Order{Tenant: acme, Command: c})
	require.NoError(w.t, err)
}

func (w *world) fund(amount int64)  { w.order(ledger.Command{Op: ledger.DoCreate, Amount: amount}) }
func (w *world) topUp(amount int64) { w.order(ledger.Command{Op: ledger.DoTopUp, Amount: amount}) }

// small takes 2 vCPUs, 512 MiB and a disk of 5 GiB.
func small(name string) vm.Wanted {
	return vm.Wanted{Name: name, Spec: cloud.Spec{
		CPU: &cloud.CPU{VCPUs: 2}, Memory: &cloud.Memory{SizeMiB: 512}, Disks: []cloud.Disk{{ID: "a", Blank: true, SizeGiB: 5}},
	}}
}

func (w *world) tryCreate(name string) (cloud.VMID, error) {
	made, err := w.vms.Create(w.as(acme), acme, small(name), [32]byte{})
	return made.VM.ID, err
}

func (w *world) create(name string) cloud.VMID {
	w.t.Helper()
	id, err := w.tryCreate(name)
	require.NoError(w.t, err)
	return id
}

func (w *world) get(id cloud.VMID) (m *cloud.VM) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) (err error) {
		m, err = vm.VMs.Get(v, string(acme.Project), string(id))
		return err
	}))
	return m
}

// seen is what the host reports of a VM as it is wanted now.
func (w *world) seen(id cloud.VMID, level cloud.Observed, change ...func(*cloud.Observation)) {
	w.t.Helper()
	m := w.get(id)
	o := cloud.Observation{
		VM: id, Generation: m.Generation, Observed: level, StartsDone: m.Wish.Starts, RebootsDone: m.Wish.Reboots, ResetsDone: m.Wish.Resets,
	}
	for _, f := range change {
		f(&o)
	}
	_, err := w.vms.Observed(w.t.Context(), w.host, []cloud.Observation{o})
	require.NoError(w.t, err)
}

// tell has a power call made, and the host do as it is told once the wish is recorded.
func (w *world) tell(id cloud.VMID, wished func(*cloud.VM) bool, call func() error, then cloud.Observed) error {
	w.t.Helper()
	ended := make(chan error, 1)
	ctx, stop := context.WithCancel(w.t.Context())
	defer stop()
	var refused error
	go func() {
		err := call()
		if err != nil {
			stop() // refused: no wish to wait for
		}
		ended <- err
	}()
	_, err := store.Await(ctx, w.store, vm.VMs, func(m *cloud.VM) (bool, error) { return m == nil || wished(m), nil }, string(acme.Project), string(id))
	if err != nil {
		refused = <-ended
		require.Error(w.t, refused)
		return refused
	}
	if w.get(id) != nil {
		w.seen(id, then)
	}
	return <-ended
}

func (w *world) start(id cloud.VMID) error {
	w.t.Helper()
	return w.tell(id, func(m *cloud.VM) bool { return m.Wish.On }, func() error {
		_, err := w.vms.Start(w.as(acme), acme, id, [32]byte{})
		return err
	}, cloud.ObservedRunning)
}

func (w *world) stop(id cloud.VMID) {
	w.t.Helper()
	require.NoError(w.t, w.tell(id, func(m *cloud.VM) bool { return !m.Wish.On }, func() error {
		_, err := w.vms.Stop(w.as(acme), acme, id, 30*time.Second, [32]byte{})
		return err
	}, cloud.ObservedEnded))
}

// delete removes a VM and has the host forget it.
func (w *world) delete(id cloud.VMID) error {
	w.t.Helper()
	m := w.get(id)
	_, err := w.vms.Delete(w.as(acme), acme, id, false, [32]byte{})
	if err != nil {
		return err
	}
	_, err = w.vms.Observed(w.t.Context(), w.host, []cloud.Observation{{VM: id, Generation: m.Generation + 1, Observed: cloud.ObservedAbsent}})
	return err
}

// run makes a VM that runs.
func (w *world) run(name string) cloud.VMID {
	w.t.Helper()
	id := w.create(name)
	w.seen(id, cloud.ObservedBuilt)
	require.NoError(w.t, w.start(id))
	require.Equal(w.t, cloud.Running, w.get(id).State)
	return id
}

// bill is a run of the leader's task.
func (w *world) bill() { w.t.Helper(); require.NoError(w.t, w.bills.Run(w.t.Context())) }

func (w *world) wallet() *ledger.Wallet {
	w.t.Helper()
	found, err := w.credits.Wallet(w.t.Context(), acme)
	require.NoError(w.t, err)
	return found
}

// figures are the wallet's: consumed, reserved and available.
func (w *world) figures() [3]int64 {
	w.t.Helper()
	f := w.wallet()
	return [3]int64{f.Consumed(), f.Reserved(), f.Available()}
}

// transactions are all of the wallet's.
func (w *world) transactions(t testing.TB) []*ledger.Transaction {
	var all []*ledger.Transaction
	for token := ""; ; {
		page, next, err := w.credits.Transactions(t.Context(), acme, credit.Which{}, 1000, token)
		require.NoError(t, err)
		all = append(all, page...)
		if token = next; token == "" {
			return all
		}
	}
}

// owes are the unpaid bills, and their sum.
func (w *world) owes() (bills []Bill, sum int64) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) error {
		rows, _, err := owed.List(v, 0, string(acme.Project))
		for _, r := range rows {
			bills = append(bills, *r.Value)
			sum += r.Value.Total()
		}
		return err
	}))
	return bills, sum
}

// clean is nil when the ledger adds up, and no transaction stands in it twice.
func (w *world) clean() error {
	err := w.credits.Audit(w.t.Context(), func(f credit.Finding) error {
		if f.Problem != "" {
			return fmt.Errorf("%s: %s", f.Project, f.Problem)
		}
		return nil
	})
	seen := map[string]bool{}
	for _, tx := range w.transactions(w.t) {
		if seen[tx.ID] {
			err = errors.Join(err, fmt.Errorf("transaction %s stands twice: %s", tx.ID, tx.Description))
		}
		seen[tx.ID] = true
	}
	return err
}
