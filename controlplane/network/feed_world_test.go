package network

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// patience is how long tests wait for a condition.
const patience = 20 * time.Second

// feedWorld is a world with a Feed and the agents of hosts.
type feedWorld struct {
	*world
	feed   *Feed
	agents map[cloud.NodeID]*fakeAgent
	// foreign has the ports of the project evil. All others belong to acme.
	foreign map[cloud.PortID]bool
	// externals are the external networks of hosts that connect.
	externals []string
	// instances has the instances of the hosts that encrypt.
	instances map[cloud.NodeID]string
	// stop ends the term in which the member leads.
	stop func()
}

func newFeedWorld(t testing.TB) *feedWorld {
	w := &feedWorld{world: newWorld(t), agents: map[cloud.NodeID]*fakeAgent{}, foreign: map[cloud.PortID]bool{}, instances: map[cloud.NodeID]string{}}
	w.feed = NewFeed(FeedOptions{Store: w.store, Key: []byte("the secret of the cluster for keys"), Listeners: func() map[uint64]string {
		return map[uint64]string{1: "198.51.100.1:7443", 2: "member.example.org:7443"}
	}})
	w.feed.protectedInterval = 0
	w.lead()
	t.Cleanup(func() { w.stop() })
	return w
}

// lead begins a term.
func (w *feedWorld) lead() {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { w.feed.Follow(ctx) })
	w.stop = func() { cancel(); running.Wait() }
}

// bind binds a port to a host, as the service of VMs does.
func (w *feedWorld) bind(id cloud.PortID, node cloud.NodeID) {
	w.t.Helper()
	w.change(id, func(p *cloud.Port) {
		p.Node, p.Status, p.StatusReason = node, cloud.NetworkPending, ""
		p.BindingGeneration++
		if node == "" {
			p.Status = cloud.NetworkDown
		}
	})
}

func (w *feedWorld) change(id cloud.PortID, change func(*cloud.Port)) {
	w.t.Helper()
	owner := acme
	if w.foreign[id] {
		owner = evil
	}
	w.update(func(tx *store.Tx) error {
		p, err := find(tx, ports, kindPort, owner, string(id))
		if err != nil {
			return err
		}
		before := p.Node
		change(p)
		ports.Put(tx, p, string(owner.Project), string(id))
		if p.Node == before {
			return nil
		}
		return moveFloating(tx, p)
	})
}

// marker is a table that the Feed watches but does not send.
var marker = store.NewTable[struct{}]("net-marker")

// follow waits until the Feed has read every change, and returns the revision.
func (w *feedWorld) follow() int64 {
	w.t.Helper()
	revision, err := w.store.Update(w.t.Context(), func(tx *store.Tx) error { marker.Put(tx, &struct{}{}, "m"); return nil })
	require.NoError(w.t, err)
	require.Eventually(w.t, func() bool {
		w.feed.mu.Lock()
		defer w.feed.mu.Unlock()
		return w.feed.index != nil && w.feed.index.revision >= revision
	}, patience, time.Millisecond, "the feed does not follow the changes")
	return revision
}

// settle waits until each connected agent has received every change, and returns the revision.
func (w *feedWorld) settle() int64 {
	w.t.Helper()
	revision := w.follow()
	w.feed.mu.Lock()
	for _, s := range w.feed.sessions {
		s.mark(hostChange{confirm: true})
	}
	w.feed.mu.Unlock()
	for _, a := range w.agents {
		a.receive(revision)
	}
	return revision
}

// fakeAgent is the agent of a host. It applies messages as agent.proto specifies.
type fakeAgent struct {
	grpc.ServerStream
	t         testing.TB
	ctx       context.Context
	requests  chan *agentv1.SyncNetworksRequest
	responses chan *agentv1.SyncNetworksResponse
	// receives counts the calls of Recv.
	receives atomic.Int64
	// charged is the number of records that acknowledgments have changed.
	charged atomic.Int64
	// ended receives the error with which the stream ends.
	ended chan error

	// state has each record by the ID.
	state map[string]proto.Message
	// encryption has the keys that the host has received last.
	encryption *agentv1.HostEncryption
	// log has the records of the messages since the test last took it.
	log []*agentv1.SyncNetworksResponse
	// revision is that of the last complete message.
	revision int64
}

// connect opens a stream of a host, and waits until the Feed has accepted or refused it.
func (w *feedWorld) connect(node cloud.NodeID, vtep string) *fakeAgent {
	ctx, cancel := context.WithCancel(context.Background())
	a := &fakeAgent{
		t: w.t, ctx: ctx, requests: make(chan *agentv1.SyncNetworksRequest), responses: make(chan *agentv1.SyncNetworksResponse),
		ended: make(chan error, 1), state: map[string]proto.Message{},
	}
	w.t.Cleanup(cancel)
	charge := func(_ context.Context, n int) error { a.charged.Add(int64(n)); return nil }
	first := &agentv1.SyncNetworksRequest{Protocol: 1, Host: &agentv1.HostNetwork{
		Vtep: vtep, UnderlayMtu: 1537, ExternalNetworks: w.externals, Encrypt: w.instances[node] != "", Instance: w.instances[node],
	}}
	former := w.session(node)
	go func() {
		err := w.feed.Sync(node, 7, first, a, charge)
		cancel()
		a.ended <- err
	}()
	require.Eventually(w.t, func() bool { return w.session(node) != former || a.ctx.Err() != nil }, patience, time.Millisecond)
	w.agents[node] = a
	return a
}

func (w *feedWorld) session(node cloud.NodeID) *feedSession {
	w.feed.mu.Lock()
	defer w.feed.mu.Unlock()
	return w.feed.sessions[node]
}

func (a *fakeAgent) Context() context.Context { return a.ctx }

func (a *fakeAgent) Send(m *agentv1.SyncNetworksResponse) error {
	select {
	case a.responses <- m:
		return nil
	case <-a.ctx.Done():
		return a.ctx.Err()
	}
}

func (a *fakeAgent) Recv() (*agentv1.SyncNetworksRequest, error) {
	a.receives.Add(1)
	select {
	case r, ok := <-a.requests:
		if !ok {
			return nil, io.EOF
		}
		return r, nil
	case <-a.ctx.Done():
		return nil, a.ctx.Err()
	}
}

// receive applies messages up to a complete one with at least the given revision.
func (a *fakeAgent) receive(revision int64) {
	a.t.Helper()
	for {
		select {
		case m := <-a.responses:
			a.apply(m)
			if m.GetComplete() && m.GetRevision() >= revision {
				return
			}
		case err := <-a.ended:
			a.t.Fatalf("the stream has ended: %v", err)
		case <-time.After(patience):
			a.t.Fatalf("no message of revision %d came", revision)
		}
	}
}

// end waits for the end of the stream.
func (a *fakeAgent) end() error {
	for {
		select {
		case <-a.responses:
		case err := <-a.ended:
			return err
		case <-time.After(patience):
			a.t.Fatal("the stream does not end")
		}
	}
}

// acknowledge sends an acknowledgment and waits until it has been processed.
func (a *fakeAgent) acknowledge(revision int64, failures ...*agentv1.VpcFailure) {
	a.t.Helper()
	a.request(&agentv1.SyncNetworksRequest{AppliedRevision: revision, Failures: failures})
}

// request sends a request and waits until it has been processed.
func (a *fakeAgent) request(r *agentv1.SyncNetworksRequest) {
	a.t.Helper()
	// The first Recv call waits for a request before it is counted here.
	require.Eventually(a.t, func() bool { return a.receives.Load() > 0 }, patience, time.Millisecond)
	before := a.receives.Load()
	select {
	case a.requests <- r:
	case <-time.After(patience):
		a.t.Fatal("the request is not received")
	}
	require.Eventually(a.t, func() bool { return a.receives.Load() > before || a.ctx.Err() != nil }, patience, time.Millisecond)
}

func (a *fakeAgent) apply(m *agentv1.SyncNetworksResponse) {
	a.log = append(a.log, m)
	require.Equal(a.t, uint64(7), m.GetTerm())
	require.LessOrEqual(a.t, len(m.GetPorts()), maxMessagePorts)
	require.Less(a.t, proto.Size(m), maxMessageBytes*2)
	for _, id := range m.GetDeleted() {
		delete(a.state, id)
		for other, r := range a.state {
			if p, ok := r.(*networkv1.Peering); vpcOf(r) == id || ok && p.GetPeerVpcId() == id {
				delete(a.state, other)
			}
		}
	}
	for _, r := range recordsOf(m) {
		a.state[idOf(r)] = r
	}
	if m.GetEncryption() != nil {
		a.encryption = m.GetEncryption()
	}
	projects := map[string]bool{}
	for _, r := range a.state {
		if v, ok := r.(*agentv1.HostVpc); ok {
			projects[v.GetVpc().GetProjectId()] = true
		}
	}
	for id, r := range a.state {
		if len(m.GetDeleted()) == 0 {
			break
		}
		if g, ok := r.(*networkv1.SecurityGroup); ok && !projects[g.GetProjectId()] {
			delete(a.state, id)
		}
		if f, ok := r.(*networkv1.FloatingIp); ok && a.state[f.GetPortId()] == nil {
			delete(a.state, id) // its VPC is no longer needed
		}
	}
	if m.GetComplete() {
		require.GreaterOrEqual(a.t, m.GetRevision(), a.revision, "revisions of a stream grow")
		a.revision = m.GetRevision()
	}
}

// recordsOf returns all records in a message.
func recordsOf(m *agentv1.SyncNetworksResponse) (out []proto.Message) {
	add(&out, m.GetVpcs())
	add(&out, m.GetSubnets())
	add(&out, m.GetPorts())
	add(&out, m.GetSecurityGroups())
	add(&out, m.GetRouteTables())
	add(&out, m.GetNatGateways())
	add(&out, m.GetHostNatGateways())
	add(&out, m.GetFloatingIps())
	add(&out, m.GetServiceIps())
	add(&out, m.GetPeerings())
	return out
}

func add[M proto.Message](out *[]proto.Message, all []M) {
	for _, m := range all {
		*out = append(*out, m)
	}
}

// core returns the message of the network API in a record.
func core(r proto.Message) proto.Message {
	switch r := r.(type) {
	case *agentv1.HostVpc:
		return r.GetVpc()
	case *agentv1.HostSubnet:
		return r.GetSubnet()
	case *agentv1.HostPort:
		return r.GetPort()
	case *agentv1.HostNatGateway:
		return r.GetNatGateway()
	}
	return r
}

func idOf(r proto.Message) string { return core(r).(interface{ GetId() string }).GetId() }

// vpcOf returns the VPC of a record, "" if its message has none.
func vpcOf(r proto.Message) string {
	if v, ok := core(r).(interface{ GetVpcId() string }); ok {
		return v.GetVpcId()
	}
	return ""
}

// show returns the records and deletions that an agent got since the last call, in a line each. names has the names of
// IDs.
func (a *fakeAgent) show(names map[string]string) string {
	merged := map[string]string{}
	for _, m := range a.log {
		for _, r := range recordsOf(m) {
			merged[idOf(r)] = line(r, names)
		}
		if m.GetProtected() != nil {
			merged["protected"] = "protected " + strings.Join(m.GetProtected().GetAddresses(), " ")
		}
		for _, id := range m.GetDeleted() {
			merged[id] = "deleted " + scriptName(id, names)
		}
	}
	a.log = nil
	return strings.Join(slices.Sorted(maps.Values(merged)), "\n")
}

func scriptName(id string, names map[string]string) string {
	if name := names[id]; name != "" {
		return name
	}
	return "unknown"
}

func line(r proto.Message, names map[string]string) string {
	kind := strings.TrimPrefix(string(core(r).ProtoReflect().Descriptor().Name()), "Host")
	text := kind + " " + scriptName(idOf(r), names)
	switch r := r.(type) {
	case *agentv1.HostVpc:
		text += " domain=" + r.GetDomain()
	case *networkv1.Peering:
		text += fmt.Sprintf(" of %s and %s", scriptName(r.GetVpcId(), names), scriptName(r.GetPeerVpcId(), names))
	case *agentv1.HostSubnet:
		text += fmt.Sprintf(" vni=%d", r.GetVni())
	case *networkv1.SecurityGroup:
		text += fmt.Sprintf(" rules=%d", len(r.GetRules()))
	case *agentv1.HostNatGateway:
		if id := r.GetServiceIpId(); id != "" {
			text += " of service IP " + scriptName(id, names)
		}
		text += fmt.Sprintf(" node=%s vtep=%s vni=%d generation=%d", r.GetNatGateway().GetNodeId(), r.GetVtep(), r.GetVni(), r.GetBindingGeneration())
	case *agentv1.HostPort:
		text += fmt.Sprintf(" node=%s vtep=%s generation=%d", r.GetPort().GetNodeId(), r.GetVtep(), r.GetBindingGeneration())
		if other := r.GetMigrationNodeId(); other != "" {
			text += " migration_node=" + other
		}
	}
	return text
}
