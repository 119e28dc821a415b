// Package nodetest provides a test environment for services that need hosts: one member that leads, its records in
// memory, a manual clock and the node service. Tests call World's methods to send what the agents of the hosts would
// send.
package nodetest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// World is one member that leads, and its simulated hosts.
type World struct {
	T        testing.TB
	Clock    *storetest.Clock
	Store    *store.Store
	Quorum   *storetest.Quorum
	Commands *leader.Commands
	Nodes    *node.Service
	Log      *slog.Logger

	authority  *mtls.Authority
	heartbeats vmv1.NodeServiceServer
	hosts      int
	endTerm    func() // stops the goroutine that runs Nodes.Follow, and waits for it
}

// New returns a World without hosts. It creates the org and the project of each tenant in tenants. change, if not nil,
// may modify the options of the node service. Call Attach before adding hosts.
func New(t testing.TB, change func(*node.Options), tenants ...cloud.Tenant) *World {
	w := &World{T: t, Clock: storetest.NewClock(time.UnixMilli(1_800_000_000_000)), Log: slog.New(slog.DiscardHandler)}
	w.Store, w.Quorum = storetest.Open(t, w.Clock.Now)
	w.Update(func(tx *store.Tx) error {
		for _, t := range tenants {
			if _, err := tenant.CreateOrg(tx, t.Org, ""); err != nil {
				return err
			}
			if _, err := tenant.CreateProject(tx, t, "", tenant.Quota{}); err != nil {
				return err
			}
		}
		return nil
	})
	var err error
	w.authority, err = mtls.NewAuthority("test", make([]byte, 32))
	require.NoError(t, err)
	leadership := leadertest.NewLeadership(1)
	w.Commands = leader.NewCommands(1, leadership, nil)
	opts := node.Options{
		Store: w.Store, Commands: w.Commands, Leadership: leadership, Self: 1, Authority: w.authority, Log: w.Log, Now: w.Clock.Now,
		Listeners: func() map[uint64]string { return nil },
	}
	if change != nil {
		change(&opts)
	}
	w.Nodes = node.New(opts)
	w.Nodes.RegisterAgents(w)
	return w
}

// Attach sets the source of VM states of the node service and runs the service's Follow until the end of the test.
func (w *World) Attach(guests node.VMController) {
	w.Nodes.Attach(guests, nil)
	w.endTerm = w.Go(w.Nodes.Follow)
}

// NewTerm simulates the start of a leader term: the member has read the records of the hosts, but no host has sent a
// heartbeat to this leader yet.
func (w *World) NewTerm() {
	w.T.Helper()
	w.endTerm()
	w.endTerm = w.Go(w.Nodes.Follow)
	w.AwaitFleet()
}

// Go runs f in a goroutine. The function stop cancels f's context and waits for f. The end of the test also calls stop.
func (w *World) Go(f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { f(ctx) })
	stop = func() { cancel(); running.Wait() }
	w.T.Cleanup(stop)
	return stop
}

// RegisterService implements grpc.ServiceRegistrar. It stores the NodeService implementation, to which Heartbeat sends.
func (w *World) RegisterService(_ *grpc.ServiceDesc, impl any) {
	if heartbeats, ok := impl.(vmv1.NodeServiceServer); ok {
		w.heartbeats = heartbeats
	}
}

// Update runs f in one transaction on the records, and fails the test on an error.
func (w *World) Update(f func(tx *store.Tx) error) {
	w.T.Helper()
	_, err := w.Store.Update(w.T.Context(), f)
	require.NoError(w.T, err)
}

// AddHost adds a host with the given capacity and sends its first heartbeat, which makes it READY.
func (w *World) AddHost(name string, has cloud.Capacity, change ...func(*cloud.Node)) cloud.NodeID {
	w.T.Helper()
	id := w.AddSilentHost(name, has, change...)
	w.Heartbeat(id)
	return id
}

// AddSilentHost adds the record of a host that has sent no heartbeat, and waits until Fleet returns the host. change
// may modify the record.
func (w *World) AddSilentHost(name string, has cloud.Capacity, change ...func(*cloud.Node)) cloud.NodeID {
	w.T.Helper()
	w.hosts++
	n := cloud.Node{
		ID: cloud.NodeID(fmt.Sprintf("00000000-0000-7000-a000-%012d", w.hosts)), Name: name, Declared: cloud.NodeReady, Capacity: has,
		Allocatable: has, Hypervisors: []cloud.Hypervisor{cloud.KVM}, Architecture: cloud.X8664, CPUModels: []string{"EPYC"},
	}
	for _, f := range change {
		f(&n)
	}
	w.Update(func(tx *store.Tx) error { node.Nodes.Put(tx, &n, string(n.ID)); return nil })
	w.AwaitFleet()
	return n.ID
}

// Heartbeat sends a heartbeat of a host with the description in its record, and then calls AwaitFleet.
func (w *World) Heartbeat(id cloud.NodeID) {
	w.T.Helper()
	cert, err := w.authority.IssueFor(mtls.Node, string(id), w.Clock.Now(), time.Hour)
	require.NoError(w.T, err)
	ctx := grpcpeer.NewContext(w.T.Context(), &grpcpeer.Peer{
		AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert.Leaf}}},
	})
	n := w.Node(id)
	capacity := func(c cloud.Capacity) *vmv1.NodeCapacity {
		return &vmv1.NodeCapacity{Vcpus: c.VCPUs, MemoryMib: c.MemoryMiB, StorageGib: c.StorageGiB}
	}
	_, err = w.heartbeats.HeartbeatNode(ctx, &vmv1.HeartbeatNodeRequest{
		NodeId: string(id), Name: n.Name, State: vmv1.NodeState(n.Declared), Capacity: capacity(n.Capacity), Allocatable: capacity(n.Allocatable),
		Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM}, Labels: n.Labels,
	})
	require.NoError(w.T, err)
	w.AwaitFleet()
}

// AwaitFleet waits until Fleet shows all hosts with the allocated capacity, the cordon, the drain and the labels of their
// records.
func (w *World) AwaitFleet() {
	w.T.Helper()
	require.Eventually(w.T, func() bool {
		fleet := w.Nodes.Fleet()
		for _, c := range fleet {
			if n := w.Node(c.Node.ID); n.Allocated != c.Node.Allocated || n.Cordoned != c.Node.Cordoned || n.Draining() != c.Node.Draining() ||
				n.InMaintenance() != c.Node.InMaintenance() || !maps.Equal(n.Labels, c.Node.Labels) {
				return false
			}
		}
		return len(fleet) == w.hosts
	}, 10*time.Second, time.Millisecond)
}

// Node returns the record of the host with this ID.
func (w *World) Node(id cloud.NodeID) (n *cloud.Node) {
	w.T.Helper()
	require.NoError(w.T, w.Store.Local(func(v *store.View) (err error) {
		n, err = node.Nodes.Get(v, string(id))
		return err
	}))
	return n
}
