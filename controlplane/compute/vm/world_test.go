package vm

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// world is the VM controller of a member that leads, over records in memory, with hosts that are played by the test.
type world struct {
	t         testing.TB
	store     *store.Store
	quorum    *quorum
	nodes     *node.Service
	vms       *Service
	beats     vmv1.NodeServiceServer
	authority *mtls.Authority
	hosts     int

	mu sync.Mutex
	at time.Time
}

// quorum is the other members, which can be away.
type quorum struct {
	*store.Direct
	away atomic.Bool
}

func (q *quorum) ReadIndex(ctx context.Context) error {
	if q.away.Load() {
		return fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	return q.Direct.ReadIndex(ctx)
}

var (
	acme  = cloud.Tenant{Org: "acme", Project: "web"}
	other = cloud.Tenant{Org: "evil", Project: "lair"}
)

func newWorld(t testing.TB) *world {
	w := &world{t: t, at: time.UnixMilli(1_800_000_000_000)}
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	w.quorum = &quorum{Direct: store.NewDirect(engine)}
	w.store = store.New(store.Options{Engine: engine, Proposer: w.quorum, PageKey: make([]byte, 32), Now: w.now})
	w.update(func(tx *store.Tx) {
		for _, t := range []cloud.Tenant{acme, other} {
			_, err := tenant.CreateOrg(tx, t.Org, "")
			require.NoError(w.t, err)
			_, err = tenant.CreateProject(tx, t, "", tenant.Quota{})
			require.NoError(w.t, err)
		}
	})
	log := slog.New(slog.DiscardHandler)
	authority, err := mtls.NewAuthority("test", make([]byte, 32))
	require.NoError(t, err)
	w.authority = authority
	leadership := leadertest.NewLeadership(1)
	commands := leader.NewCommands(1, leadership, nil)
	w.nodes = node.New(node.Options{Store: w.store, Commands: commands, Leadership: leadership, Self: 1, Authority: authority, Log: log, Now: w.now})
	w.vms = New(Options{Store: w.store, Commands: commands, Nodes: w.nodes, Log: log})
	w.nodes.Attach(w.vms, nil)
	w.nodes.RegisterAgents(w)
	ctx, cancel := context.WithCancel(context.Background())
	var following sync.WaitGroup
	following.Go(func() { w.nodes.Follow(ctx) })
	following.Go(func() { w.vms.Follow(ctx) })
	t.Cleanup(func() { cancel(); following.Wait() })
	return w
}

func (w *world) now() time.Time       { w.mu.Lock(); defer w.mu.Unlock(); return w.at }
func (w *world) wait(d time.Duration) { w.mu.Lock(); defer w.mu.Unlock(); w.at = w.at.Add(d) }

// RegisterService implements grpc.ServiceRegistrar: it takes what agents would call.
func (w *world) RegisterService(_ *grpc.ServiceDesc, impl any) {
	if beats, ok := impl.(vmv1.NodeServiceServer); ok {
		w.beats = beats
	}
}

// update changes records behind the services' backs.
func (w *world) update(f func(tx *store.Tx)) {
	w.t.Helper()
	_, err := w.store.Update(w.t.Context(), func(tx *store.Tx) error { f(tx); return nil })
	require.NoError(w.t, err)
}

// host adds a host that is READY.
func (w *world) host(name string, has cloud.Capacity, change ...func(*cloud.Node)) cloud.NodeID {
	w.t.Helper()
	w.hosts++
	n := cloud.Node{
		ID: cloud.NodeID(fmt.Sprintf("00000000-0000-7000-a000-%012d", w.hosts)), Name: name, Declared: cloud.NodeReady, Capacity: has,
		Allocatable: has, Hypervisors: []cloud.Hypervisor{cloud.KVM}, Architecture: cloud.X8664, CPUModels: []string{"EPYC"},
	}
	for _, f := range change {
		f(&n)
	}
	w.update(func(tx *store.Tx) { node.Nodes.Put(tx, &n, string(n.ID)) })
	w.beat(n.ID)
	return n.ID
}

// beat is a heartbeat of a host, and waits until the leader has it among its fleet.
func (w *world) beat(id cloud.NodeID) {
	w.t.Helper()
	cert, err := w.authority.IssueFor(mtls.Node, string(id), w.now(), time.Hour)
	require.NoError(w.t, err)
	ctx := grpcpeer.NewContext(w.t.Context(), &grpcpeer.Peer{
		AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert.Leaf}}},
	})
	n := w.node(id)
	capacity := func(c cloud.Capacity) *vmv1.NodeCapacity {
		return &vmv1.NodeCapacity{Vcpus: c.VCPUs, MemoryMib: c.MemoryMiB, StorageGib: c.StorageGiB}
	}
	_, err = w.beats.HeartbeatNode(ctx, &vmv1.HeartbeatNodeRequest{
		NodeId: string(id), Name: n.Name, State: vmv1.NodeState(n.Declared), Capacity: capacity(n.Capacity), Allocatable: capacity(n.Allocatable),
		Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM}, Labels: n.Labels,
	})
	require.NoError(w.t, err)
	w.settled()
}

// settled waits until the leader's fleet is what the records say.
func (w *world) settled() {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		for _, c := range w.nodes.Fleet() {
			if n := w.node(c.Node.ID); n.Allocated != c.Node.Allocated || n.Cordoned != c.Node.Cordoned {
				return false
			}
		}
		return len(w.nodes.Fleet()) == w.hosts
	}, 10*time.Second, time.Millisecond)
}

func (w *world) node(id cloud.NodeID) (n *cloud.Node) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) (err error) {
		n, err = node.Nodes.Get(v, string(id))
		return err
	}))
	return n
}

func (w *world) allocated(id cloud.NodeID) cloud.Capacity { return w.node(id).Allocated }

// image adds an image that is AVAILABLE, of so many bytes.
func (w *world) image(n int, virtual uint64, change ...func(*cloud.Image)) cloud.ImageID {
	w.t.Helper()
	i := cloud.Image{
		ID: cloud.ImageID(fmt.Sprintf("00000000-0000-7000-8000-%012d", n)), Name: fmt.Sprintf("image-%d", n), Org: acme.Org,
		Visibility: cloud.Private, Format: cloud.FormatRaw, SizeBytes: virtual, VirtualSize: virtual,
		SHA256: fmt.Sprintf("%064d", n), Architecture: cloud.X8664, Status: cloud.ImageAvailable,
	}
	for _, f := range change {
		f(&i)
	}
	w.update(func(tx *store.Tx) { image.Images.Put(tx, &i, string(i.ID)) })
	return i.ID
}

// as is a call of a member of a tenant, with an idempotency key or none.
func (w *world) as(t cloud.Tenant, key string) context.Context {
	c := &cloud.Caller{
		User: "ada", Proof: cloud.ProofPassword, IdempotencyKey: key,
		Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: t.Org, Project: t.Project}},
	}
	return auth.With(w.t.Context(), c, auth.RPC)
}

// small is a VM with a blank disk, which takes 2 vCPUs, 512 MiB and 5 GiB.
func small(name string, change ...func(*Wanted)) Wanted {
	w := Wanted{Name: name, Spec: cloud.Spec{
		CPU: &cloud.CPU{VCPUs: 2}, Memory: &cloud.Memory{SizeMiB: 512}, Disks: []cloud.Disk{{ID: "a", Blank: true, SizeGiB: 5}},
	}}
	for _, f := range change {
		f(&w)
	}
	return w
}

var taken = cloud.Capacity{VCPUs: 2, MemoryMiB: 512, StorageGiB: 5}

func plenty() cloud.Capacity { return cloud.Capacity{VCPUs: 64, MemoryMiB: 64 << 10, StorageGiB: 1000} }

func (w *world) create(name string, change ...func(*Wanted)) *cloud.VM {
	w.t.Helper()
	made, err := w.vms.Create(w.as(acme, ""), acme, small(name, change...), [32]byte{})
	require.NoError(w.t, err)
	return &made.VM
}

func (w *world) get(id cloud.VMID) *cloud.VM {
	w.t.Helper()
	vm, err := w.vms.Get(w.t.Context(), acme, id)
	require.NoError(w.t, err)
	return vm
}

// seen is what a VM's host reports of it as it is wanted now.
func (w *world) seen(id cloud.VMID, level cloud.Observed, change ...func(*cloud.Observation)) *cloud.VM {
	w.t.Helper()
	vm := w.get(id)
	o := cloud.Observation{
		VM: id, Generation: vm.Generation, Observed: level, StartsDone: vm.Wish.Starts, RebootsDone: vm.Wish.Reboots, ResetsDone: vm.Wish.Resets,
	}
	for _, f := range change {
		f(&o)
	}
	_, err := w.vms.Observed(w.t.Context(), vm.Node, []cloud.Observation{o})
	require.NoError(w.t, err)
	return w.get(id)
}

// absent is the host's word that nothing of a deleted VM is left.
func (w *world) absent(on cloud.NodeID, id cloud.VMID, generation uint64) {
	w.t.Helper()
	_, err := w.vms.Observed(w.t.Context(), on, []cloud.Observation{{VM: id, Generation: generation, Observed: cloud.ObservedAbsent}})
	require.NoError(w.t, err)
}

func failed(why string) func(*cloud.Observation) {
	return func(o *cloud.Observation) { o.Exit, o.LastError = cloud.ExitFailed, why }
}

// in makes a VM in a state.
func (w *world) in(state cloud.State, name string) *cloud.VM {
	w.t.Helper()
	id := w.create(name).ID
	wish := func(a action, grace uint64) {
		_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerAsk{Tenant: acme, VM: id, Action: a, GraceMS: grace})
		require.NoError(w.t, err)
	}
	switch state {
	case cloud.Creating:
	case cloud.Failed:
		w.seen(id, cloud.ObservedBuildFailed, failed("the image is corrupt"))
	default:
		w.seen(id, cloud.ObservedBuilt)
		if state == cloud.Stopped {
			break
		}
		wish(start, 0)
		switch state {
		case cloud.Error:
			w.seen(id, cloud.ObservedEnded, failed("no memory"))
		case cloud.Running, cloud.Stopping:
			w.seen(id, cloud.ObservedRunning)
		}
		if state == cloud.Stopping {
			wish(stop, cloud.DefaultStop)
		}
	}
	vm := w.get(id)
	require.Equal(w.t, state, vm.State)
	return vm
}

func newID() cloud.VMID { return cloud.VMID(uuid.Must(uuid.NewV7()).String()) }
