package live

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"io"
	"maps"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	errLowerTerm = errors.New("the member sent a message of an earlier term")
	errOver      = errors.New("the member ended it")
)

// The interval between heartbeats, the interval between complete reports, and the timeout of a call to a member.
const (
	heartbeatEvery = 5 * time.Second
	reportAllEvery = 30 * time.Second
	answerWithin   = 5 * time.Second
)

// keepSession keeps the agent connected to a member until the agent ends. After a session has ended, it connects to the
// leader if the last member named one, otherwise to the next member in order.
func (a *agent) keepSession() {
	slots := a.host.f.slots
	for n := 0; a.ctx.Err() == nil; n++ {
		to := slots[n%len(slots)]
		err := a.session(to)
		if a.ctx.Err() != nil {
			return
		}
		a.host.f.trace.Add("%s: its session with %s ended: %v", a.host.name, to.name, err)
		if why := exclusion(err); why != "" {
			a.excluded(why)
			return
		}
		if f, ok := fault.From(err); ok && f.Reason == "NOT_LEADER" {
			for i, s := range slots {
				if f.Details["leader"] == string(s.name) {
					n = i - 1
				}
			}
		}
		if sleep(a.ctx, a.host.between(100*time.Millisecond, 800*time.Millisecond)) != nil {
			return
		}
	}
}

// session connects the agent to a member and exchanges messages until one of the streams fails. If the host has no
// certificate yet, session only calls join.
func (a *agent) session(to *memberSlot) error {
	h := a.host
	if err := h.f.net.pass(a.ctx, h.name, to.name); err != nil {
		return err
	}
	p := to.current()
	if p == nil || p.gone() {
		return errNoRoute
	}
	if _, certified := h.identity(); !certified {
		return a.join(p)
	}
	group, ctx := errgroup.WithContext(a.ctx)
	responses := make(chan *agentv1.WatchResponse, 64)
	group.Go(func() error {
		request := &agentv1.WatchRequest{Protocol: 1, AgentVersion: "sim"}
		for _, id := range a.present() {
			request.PresentVms = append(request.PresentVms, string(id))
		}
		return a.handled(ctx, p, func(ctx context.Context) error {
			return p.agents.Watch(request, &watchStream{ctx: ctx, out: responses})
		})
	})
	group.Go(func() error {
		return a.watch(ctx, to, responses, func() {
			h.f.trace.Add("%s is connected to %s", h.name, to.name)
			h.f.count("agent sessions")
			a.beginSession()
			group.Go(func() error { return a.report(ctx, p) })
			group.Go(func() error { return a.syncNetworks(ctx, p) })
			group.Go(func() error { return a.sendHeartbeats(ctx, p) })
		})
	})
	return group.Wait()
}

// handled executes a call of this host on a member's process, by calling handler, and returns the error of the call
// after a network delay. If the call succeeds, it returns errOver, so that a stream that the member ended also ends the
// session.
func (a *agent) handled(ctx context.Context, p *process, handler func(context.Context) error) error {
	inside, leave := p.enter(a.host.shows(ctx))
	if leave == nil {
		return errLost
	}
	err := handler(inside)
	leave()
	if p.gone() {
		return errLost
	}
	if passed := a.host.f.net.pass(ctx, p.s.name, a.host.name); passed != nil {
		return passed
	}
	if err == nil {
		return errOver
	}
	return err
}

// join registers the host as a node with its join token, and stores the certificate from the response. It always
// returns an error, so that the caller begins a new session, which uses the certificate.
func (a *agent) join(p *process) error {
	h := a.host
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, h.key)
	if err != nil {
		return err
	}
	token, _ := h.identity()
	var credential *agentv1.Credential
	err = a.handled(a.ctx, p, func(ctx context.Context) (err error) {
		ctx, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		credential, err = p.agents.Join(ctx, &agentv1.JoinRequest{Protocol: 1, Token: token, Csr: csr, Name: string(h.name)})
		return err
	})
	if credential == nil || !errors.Is(err, errOver) {
		return err
	}
	leaf, err := x509.ParseCertificate(credential.GetCertificate())
	if err != nil {
		return err
	}
	h.f.joined(h, leaf, cloud.NodeID(credential.GetNodeId()))
	return errors.New("it has joined")
}

// watch receives the messages of a member's Watch stream and assembles the assignment from them. When the host has
// accepted the term of the first message, watch calls accepted, once.
func (a *agent) watch(ctx context.Context, from *memberSlot, responses <-chan *agentv1.WatchResponse, accepted func()) error {
	var vms map[cloud.VMID]*agentv1.AssignedVm
	volumes := map[cloud.VolumeID]*agentv1.AssignedVolume{}
	var released []cloud.VMID
	whole := false
	for first := true; ; first = false {
		var m *agentv1.WatchResponse
		select {
		case m = <-responses:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := a.host.f.net.pass(ctx, from.name, a.host.name); err != nil {
			return err
		}
		if !a.host.acceptsTerm(m.GetTerm()) {
			return errLowerTerm
		}
		if first {
			accepted()
		}
		if vms == nil || whole {
			vms, released = maps.Clone(vms), nil
		}
		if vms == nil {
			vms = map[cloud.VMID]*agentv1.AssignedVm{}
		}
		for _, vm := range m.GetVms() {
			vms[cloud.VMID(vm.GetVmId())] = vm
		}
		for _, id := range m.GetReleasedVms() {
			delete(vms, cloud.VMID(id))
			released = append(released, cloud.VMID(id))
		}
		volumes = maps.Clone(volumes)
		for _, v := range m.GetVolumes() {
			volumes[cloud.VolumeID(v.GetVolumeId())] = v
		}
		for _, id := range m.GetReleasedVolumes() {
			delete(volumes, cloud.VolumeID(id))
		}
		if whole = whole || m.GetComplete(); whole {
			a.takeVolumes(volumes)
			a.take(vms, released)
		}
	}
}

// acceptsTerm reports whether the host accepts a message with the given leader term. It stores the highest accepted
// term, and refuses messages with a lower one.
func (h *host) acceptsTerm(term uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if term < h.term {
		return false
	}
	h.term = term
	return true
}

// report sends observations to the member: all of them at first and then every reportAllEvery, and in between those
// that have changed.
func (a *agent) report(ctx context.Context, p *process) error {
	h := a.host
	group, ctx := errgroup.WithContext(ctx)
	in := make(chan *agentv1.ReportRequest, 16)
	group.Go(func() error {
		return a.handled(ctx, p, func(ctx context.Context) error {
			return p.agents.Report(&reportStream{ctx: ctx, in: in})
		})
	})
	group.Go(func() error {
		all := time.NewTicker(reportAllEvery)
		defer all.Stop()
		facts := &agentv1.NodeFacts{BootId: "sim", AgentVersion: "sim", QemuVersion: "0", Architecture: vmv1.Architecture_ARCHITECTURE_X86_64,
			StoragePools: []*agentv1.StoragePool{
				{Name: cloud.LocalClass, AllocatableGib: poolGiB},
				{Name: sharedClass, AllocatableGib: sharedGiB, PoolId: sharedPoolID, Shared: true},
			}, Rbd: true, LiveMigration: true, MachineFeatures: []*agentv1.MachineFeature{{Name: cloud.FeatureVolumeMigration}},
		}
		for everything := true; ; {
			say := &agentv1.ReportRequest{Facts: facts}
			facts = nil
			for _, o := range a.levels.take(everything) {
				say.Vms = append(say.Vms, convert.Observation(o))
			}
			say.Volumes = a.volumeReports()
			if err := h.f.net.pass(ctx, h.name, p.s.name); err != nil {
				return err
			}
			select {
			case in <- say:
			case <-ctx.Done():
				return ctx.Err()
			}
			a.delayReports(p, say)
			everything = false
			select {
			case <-a.levels.wake:
			case <-all.C:
				everything = true
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	return group.Wait()
}

// delayReports makes some reports arrive at the member a second time, up to a minute later. This simulates reports that
// an older connection had buffered.
func (a *agent) delayReports(p *process, say *agentv1.ReportRequest) {
	if !a.host.chance(a.host.f.late()) || len(say.GetVms())+len(say.GetVolumes()) == 0 {
		return
	}
	late := a.host.between(500*time.Millisecond, time.Minute)
	a.host.f.count("delayed reports")
	ctx := a.host.shows(context.Background())
	a.host.f.behind.Go(func() {
		_ = sleep(ctx, late)
		inside, leave := p.enter(ctx)
		if leave == nil {
			return
		}
		defer leave()
		in := make(chan *agentv1.ReportRequest, 1)
		in <- &agentv1.ReportRequest{Vms: say.GetVms(), Volumes: say.GetVolumes()}
		close(in)
		_ = p.agents.Report(&reportStream{ctx: inside, in: in}) // the connection that a response would need has ended
	})
}

// sendHeartbeats sends a heartbeat to the member at the interval heartbeatEvery. It returns when one fails.
func (a *agent) sendHeartbeats(ctx context.Context, p *process) error {
	h := a.host
	every := time.NewTicker(heartbeatEvery)
	defer every.Stop()
	room := &vmv1.NodeCapacity{Vcpus: h.room.VCPUs, MemoryMib: h.room.MemoryMiB, StorageGib: h.room.StorageGiB}
	for {
		sent := time.Now()
		if err := h.f.net.pass(ctx, h.name, p.s.name); err != nil {
			return err
		}
		err := a.handled(ctx, p, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, answerWithin)
			defer cancel()
			_, err := p.heartbeats.HeartbeatNode(ctx, &vmv1.HeartbeatNodeRequest{
				NodeId: string(h.node), Name: string(h.name), State: vmv1.NodeState_NODE_STATE_READY, Capacity: room, Allocatable: room,
				Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM}, AgentVersion: "sim",
			})
			return err
		})
		if !errors.Is(err, errOver) {
			return err
		}
		a.renewLease(sent)
		select {
		case <-every.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watchStream is the stream that the member's Watch handler sends to. It passes the messages to the agent through a
// buffered channel.
type watchStream struct {
	grpc.ServerStream
	ctx context.Context
	out chan<- *agentv1.WatchResponse
}

// Context returns the context of the call, which the member's handler uses.
func (s *watchStream) Context() context.Context { return s.ctx }

// Send queues a copy of m for the agent.
func (s *watchStream) Send(m *agentv1.WatchResponse) error {
	select {
	case s.out <- proto.Clone(m).(*agentv1.WatchResponse):
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// reportStream is the stream that the member's Report handler receives from. The agent sends its reports to the channel
// in.
type reportStream struct {
	grpc.ServerStream
	ctx context.Context
	in  <-chan *agentv1.ReportRequest
}

// Context returns the context of the call, which the member's handler uses.
func (s *reportStream) Context() context.Context { return s.ctx }

// Recv returns the agent's next report, or io.EOF when the channel is closed.
func (s *reportStream) Recv() (*agentv1.ReportRequest, error) {
	select {
	case m, ok := <-s.in:
		if !ok {
			return nil, io.EOF
		}
		return m, nil
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

// SendAndClose discards the member's response.
func (s *reportStream) SendAndClose(*agentv1.ReportResponse) error { return nil }
