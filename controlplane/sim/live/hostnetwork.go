package live

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// hostNetworks is the state of VPCs on a simulated host.
type hostNetworks struct {
	// again receives a value when the agent must open a new SyncNetworks stream.
	again chan struct{}

	mu sync.Mutex
	// records has the records up to the last complete message, by ID; nil before the first. A message proto.Message is
	// never changed after it was stored.
	records map[string]proto.Message
	// snapshots is the number of snapshots that were received completely.
	snapshots int
	// bindings has the highest binding generation of each port that the host has ever received.
	bindings map[cloud.PortID]uint64
	// acknowledged has the highest binding generation of each of the host's own ports that the host has ever
	// acknowledged without a failure of the port's VPC.
	acknowledged map[cloud.PortID]uint64
}

func newHostNetworks() *hostNetworks {
	return &hostNetworks{
		again: make(chan struct{}, 1), bindings: map[cloud.PortID]uint64{}, acknowledged: map[cloud.PortID]uint64{},
	}
}

// errNewStream is the error of a SyncNetworks stream that the agent ends in order to open another.
var errNewStream = errors.New("the agent opens a new stream for networks")

// syncNetworks keeps a SyncNetworks stream to a member open until one fails. At random it replaces the stream by a new
// one, as if the part of the agent that builds networks had crashed.
func (a *agent) syncNetworks(ctx context.Context, p *process) error {
	for {
		err := a.syncOnce(ctx, p)
		if !errors.Is(err, errNewStream) {
			return err
		}
		a.host.f.count("network streams replaced")
		if err := sleep(ctx, a.host.between(time.Second, 3*time.Second)); err != nil {
			return err
		}
	}
}

// syncOnce opens a SyncNetworks stream to a member and processes its messages until the stream ends.
func (a *agent) syncOnce(ctx context.Context, p *process) error {
	h := a.host
	group, ctx := errgroup.WithContext(ctx)
	stream := &networkStream{
		ctx: ctx, in: make(chan *agentv1.SyncNetworksRequest, 1), out: make(chan *agentv1.SyncNetworksResponse, 2),
	}
	stream.in <- &agentv1.SyncNetworksRequest{Protocol: 1, Host: &agentv1.HostNetwork{
		Vtep: h.vtep, UnderlayMtu: 1500, ExternalNetworks: []string{externalNetwork.Name},
	}}
	group.Go(func() error {
		return a.handled(ctx, p, func(ctx context.Context) error {
			return p.agents.SyncNetworks(&networkStream{ctx: ctx, in: stream.in, out: stream.out})
		})
	})
	group.Go(func() error { return a.followNetworks(stream, p) })
	return group.Wait()
}

// followNetworks processes the messages of a SyncNetworks stream. It stores the records of complete messages only, and
// acknowledges them after a random delay.
func (a *agent) followNetworks(s *networkStream, p *process) error {
	h := a.host
	staged := map[string]proto.Message{}
	for first := true; ; {
		var m *agentv1.SyncNetworksResponse
		select {
		case m = <-s.out:
		case <-h.networks.again:
			return errNewStream
		case <-s.ctx.Done():
			return s.ctx.Err()
		}
		if err := h.f.net.pass(s.ctx, p.s.name, h.name); err != nil {
			return err
		}
		if !h.acceptsTerm(m.GetTerm()) {
			return errLowerTerm
		}
		applyNetworks(staged, m)
		if !m.GetComplete() {
			continue
		}
		h.keepNetworks(staged, first)
		first = false
		most := 100 * time.Millisecond
		if h.chance(10) {
			most = 5 * time.Second
			h.f.count("slow network acknowledgments")
		}
		if err := sleep(s.ctx, h.between(0, most)); err != nil {
			return err
		}
		if !h.f.closing() && h.chance(3) {
			return errNewStream
		}
		if err := a.acknowledge(s, p, staged, m.GetRevision()); err != nil {
			return err
		}
	}
}

// acknowledge sends the acknowledgment of a revision. At random, and only while there are faults, the first one reports
// that a VPC could not be applied; another one without the failure follows.
func (a *agent) acknowledge(s *networkStream, p *process, records map[string]proto.Message, revision int64) error {
	h := a.host
	for try := 0; ; try++ {
		r := &agentv1.SyncNetworksRequest{AppliedRevision: revision}
		if try == 0 && !h.f.closing() && h.chance(8) {
			for id, m := range records {
				if _, ok := m.(*agentv1.HostVpc); ok {
					h.f.count("VPC failures reported")
					r.Failures = append(r.Failures, &agentv1.VpcFailure{VpcId: id, Error: "no device"})
				}
			}
		}
		h.recordAcknowledgment(records, len(r.GetFailures()) > 0)
		if err := h.f.net.pass(s.ctx, h.name, p.s.name); err != nil {
			return err
		}
		select {
		case s.in <- r:
		case <-s.ctx.Done():
			return s.ctx.Err()
		}
		h.f.count("network acknowledgments")
		if len(r.GetFailures()) == 0 {
			return nil
		}
		if err := sleep(s.ctx, h.between(10*time.Millisecond, 5*time.Second)); err != nil {
			return err
		}
	}
}

// keepNetworks stores the records of a complete message. A binding that is older than one that the host has received
// before is a violation.
func (h *host) keepNetworks(records map[string]proto.Message, snapshot bool) {
	n := h.networks
	n.mu.Lock()
	defer n.mu.Unlock()
	n.records = maps.Clone(records)
	if snapshot {
		n.snapshots++
	}
	for id, r := range records {
		port, ok := r.(*agentv1.HostPort)
		if !ok {
			continue
		}
		now, seen := port.GetBindingGeneration(), n.bindings[cloud.PortID(id)]
		if now < seen {
			h.f.fail("%s receives binding %d of port %s after binding %d", h.name, now, id, seen)
		}
		n.bindings[cloud.PortID(id)] = now
	}
}

// recordAcknowledgment records which bindings of its own ports the host acknowledges: none if VPCs have failed.
func (h *host) recordAcknowledgment(records map[string]proto.Message, failed bool) {
	n := h.networks
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, r := range records {
		if port, ok := r.(*agentv1.HostPort); ok && !failed && port.GetPort().GetNodeId() == string(h.node) {
			n.acknowledged[cloud.PortID(id)] = max(n.acknowledged[cloud.PortID(id)], port.GetBindingGeneration())
		}
	}
}

// acknowledgedBinding returns the highest binding generation of a port that the host has acknowledged.
func (h *host) acknowledgedBinding(id cloud.PortID) uint64 {
	h.networks.mu.Lock()
	defer h.networks.mu.Unlock()
	return h.networks.acknowledged[id]
}

// networkRecords returns the records on the host, and how many snapshots it has received.
func (h *host) networkRecords() (map[string]proto.Message, int) {
	h.networks.mu.Lock()
	defer h.networks.mu.Unlock()
	return h.networks.records, h.networks.snapshots
}

// applyNetworks changes records as a message says. The comments of agent.proto specify it.
func applyNetworks(records map[string]proto.Message, m *agentv1.SyncNetworksResponse) {
	for _, id := range m.GetDeleted() {
		var gone []string // collected before the deletion: the VPC of a floating IP is that of its port
		for key, r := range records {
			if key == id || vpcOf(records, r) == id {
				gone = append(gone, key)
			}
		}
		for _, key := range gone {
			delete(records, key)
		}
	}
	if len(m.GetDeleted()) > 0 {
		dropGroups(records)
	}
	for _, r := range m.GetVpcs() {
		records[r.GetVpc().GetId()] = r
	}
	for _, r := range m.GetSubnets() {
		records[r.GetSubnet().GetId()] = r
	}
	for _, r := range m.GetPorts() {
		records[r.GetPort().GetId()] = r
	}
	for _, r := range m.GetSecurityGroups() {
		records[r.GetId()] = r
	}
	for _, r := range m.GetRouteTables() {
		records[r.GetId()] = r
	}
	for _, r := range m.GetNatGateways() {
		records[r.GetId()] = r
	}
	for _, r := range m.GetHostNatGateways() {
		records[r.GetNatGateway().GetId()] = r
	}
	for _, r := range m.GetFloatingIps() {
		records[r.GetId()] = r
	}
}

// dropGroups deletes the security groups of projects without a VPC in records.
func dropGroups(records map[string]proto.Message) {
	projects := map[string]bool{}
	for _, r := range records {
		if v, ok := r.(*agentv1.HostVpc); ok {
			projects[v.GetVpc().GetProjectId()] = true
		}
	}
	maps.DeleteFunc(records, func(_ string, r proto.Message) bool {
		g, ok := r.(*networkv1.SecurityGroup)
		return ok && !projects[g.GetProjectId()]
	})
}

// vpcOf returns the ID of the VPC to which a record belongs, "" for VPCs and security groups. A floating IP belongs to
// the VPC of its port.
func vpcOf(records map[string]proto.Message, r proto.Message) string {
	switch r := r.(type) {
	case *agentv1.HostSubnet:
		return r.GetSubnet().GetVpcId()
	case *agentv1.HostPort:
		return r.GetPort().GetVpcId()
	case *networkv1.RouteTable:
		return r.GetVpcId()
	case *networkv1.NatGateway:
		return r.GetVpcId()
	case *agentv1.HostNatGateway:
		return r.GetNatGateway().GetVpcId()
	case *networkv1.FloatingIp:
		port, _ := records[r.GetPortId()].(*agentv1.HostPort)
		return port.GetPort().GetVpcId()
	}
	return ""
}

// compareSnapshots makes each host open a new SyncNetworks stream, and checks that the snapshot equals the records that
// the host had from changes. No call may be in progress. If records change meanwhile, because a VM that had waited has
// got a host, it waits until the cloud has settled and does it again.
func (f *fleet) compareSnapshots() {
	for _, h := range f.hosts {
		for f.compareSnapshot(h) {
			f.settle("a record of a network has changed", f.audit.unsettled)
			if f.failed() {
				return
			}
		}
	}
}

// compareSnapshot is compareSnapshots for one host. It returns true, and compares nothing, if records have changed
// meanwhile.
func (f *fleet) compareSnapshot(h *host) (changed bool) {
	changes := f.audit.networkChanges()
	if f.audit.unsettled() != "" {
		return true
	}
	before, count := h.networkRecords()
	h.networks.again <- struct{}{}
	var now map[string]proto.Message
	if err := within(time.Minute, func() error {
		var snapshots int
		if now, snapshots = h.networkRecords(); snapshots == count {
			return errors.New("it receives no snapshot")
		}
		return nil
	}); err != nil {
		f.fail("%s opens a new stream for networks: %v", h.name, err)
		return false
	}
	if f.audit.networkChanges() != changes {
		return true
	}
	for id, r := range now {
		if !proto.Equal(before[id], r) {
			f.fail("%s had %v, a snapshot has %v", h.name, before[id], r)
		}
	}
	if len(before) != len(now) {
		f.fail("%s had %d network records, a snapshot has %d", h.name, len(before), len(now))
	}
	f.count("network snapshots compared")
	return false
}

// networkStream is the stream of a SyncNetworks handler. It passes requests and responses through channels.
type networkStream struct {
	grpc.ServerStream
	ctx context.Context
	in  chan *agentv1.SyncNetworksRequest
	out chan *agentv1.SyncNetworksResponse
}

// Context returns the context of the call, which the member's handler uses.
func (s *networkStream) Context() context.Context { return s.ctx }

// Send queues a copy of m for the agent.
func (s *networkStream) Send(m *agentv1.SyncNetworksResponse) error {
	select {
	case s.out <- proto.Clone(m).(*agentv1.SyncNetworksResponse):
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// Recv returns the agent's next request.
func (s *networkStream) Recv() (*agentv1.SyncNetworksRequest, error) {
	select {
	case r := <-s.in:
		return r, nil
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

// vtepOf returns the underlay address of the n-th host.
func vtepOf(n int) string { return fmt.Sprintf("192.0.2.%d", n) }
