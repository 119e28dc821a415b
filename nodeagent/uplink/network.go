package uplink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Networks applies the VPCs of this host.
type Networks interface {
	// Apply begins to apply an update. The first update of each stream is a snapshot, which replaces everything. Apply
	// must not block. When the update is applied, Link.AcknowledgeNetworks is called with its stream and revision.
	Apply(cloud.NetworkUpdate)
}

var errNetworksEnded = errors.New("the member ended the stream of networks")

// networkAcks has the newest acknowledgment, and the reports about the health of backends that were not sent yet.
type networkAcks struct {
	wake chan struct{} // capacity 1

	mu     sync.Mutex // guards the fields below
	latest cloud.NetworkAck
	health []cloud.BackendHealth
}

// requestPause is the pause after a request with reports, so that many changes need few requests.
const requestPause = 100 * time.Millisecond

// AcknowledgeNetworks queues an acknowledgment, to be sent on the stream that the update arrived on. An acknowledgment
// of an earlier stream is not sent: its revision may be that of another cluster.
func (l *Link) AcknowledgeNetworks(ack cloud.NetworkAck) {
	l.networkAcks.set(func(a *networkAcks) { a.latest = ack })
}

// ReportBackends queues reports about the health of backends, at most 1,000. They replace reports that were not sent
// yet. Queued reports are lost when the connection ends, so the caller must queue a report again until an update
// contains the reported health.
func (l *Link) ReportBackends(all []cloud.BackendHealth) {
	l.networkAcks.set(func(a *networkAcks) { a.health = all })
}

// set calls change while it holds mu, and wakes the sender.
func (a *networkAcks) set(change func(*networkAcks)) {
	a.mu.Lock()
	change(a)
	a.mu.Unlock()
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// take returns the newest acknowledgment, and returns and removes the reports that were not sent.
func (a *networkAcks) take() (cloud.NetworkAck, []cloud.BackendHealth) {
	a.mu.Lock()
	defer a.mu.Unlock()
	health := a.health
	a.health = nil
	return a.latest, health
}

// syncNetworks receives the host's VPCs and sends acknowledgments until ctx or the stream ends. With a member that does
// not know the call, it returns nil: the host then has no networks.
func (l *Link) syncNetworks(ctx context.Context, agent agentv1.AgentServiceClient) error {
	if l.o.Networks == nil {
		return nil
	}
	err := l.networkStream(ctx, agent)
	switch {
	case status.Code(err) == codes.Unimplemented:
		l.o.Log.Warn("the control plane does not know networks: this host gets none")
		return nil
	case errors.Is(err, io.EOF):
		return errNetworksEnded
	}
	return fmt.Errorf("networks: %w", err)
}

// networkStream runs one stream. The error is never nil.
func (l *Link) networkStream(ctx context.Context, agent agentv1.AgentServiceClient) error {
	ctx, cancel := context.WithCancel(ctx)
	began := time.Now()
	stream, err := agent.SyncNetworks(ctx)
	if err != nil {
		cancel()
		return err
	}
	l.networks.begin(l.Node(), l.disk.highestTerm())
	l.networks.began = began
	first := &agentv1.SyncNetworksRequest{Protocol: Protocol, Host: l.o.HostNetwork}
	if err := stream.Send(first); err != nil && !errors.Is(err, io.EOF) {
		cancel()
		return err
	}
	var sending sync.WaitGroup
	number := l.networks.stream
	sending.Go(func() { l.sendNetworkAcks(ctx, stream, number) })
	defer func() { cancel(); sending.Wait() }()
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		update, err := l.networks.add(m)
		if err != nil {
			return err
		}
		l.disk.raiseTerm(m.GetTerm())
		if update != nil {
			l.o.Networks.Apply(*update)
		}
	}
}

// sendNetworkAcks sends the newest acknowledgment of a stream and the reports about backends whenever they change,
// until the stream ends. When the member ends the stream, Recv returns the reason, so errors of Send are ignored.
// Reports that are queued before the first acknowledgment of the stream are dropped, because they are about records of
// an earlier stream.
func (l *Link) sendNetworkAcks(
	ctx context.Context,
	stream grpc.BidiStreamingClient[agentv1.SyncNetworksRequest, agentv1.SyncNetworksResponse],
	number uint64,
) {
	for {
		select {
		case <-l.networkAcks.wake:
		case <-ctx.Done():
			return
		}
		ack, health := l.networkAcks.take()
		if ack.Stream != number {
			continue
		}
		m := &agentv1.SyncNetworksRequest{AppliedRevision: ack.Revision}
		for _, f := range ack.Failures {
			m.Failures = append(m.Failures, &agentv1.VpcFailure{VpcId: string(f.VPC), Error: f.Error})
		}
		for _, b := range health {
			m.BackendHealth = append(m.BackendHealth, backendHealth(b))
		}
		if stream.Send(m) != nil {
			return
		}
		if len(health) > 0 {
			select {
			case <-time.After(requestPause):
			case <-ctx.Done():
				return
			}
		}
	}
}

func backendHealth(b cloud.BackendHealth) *agentv1.BackendHealth {
	out := &agentv1.BackendHealth{
		VpcId: string(b.VPC), ServiceIpId: string(b.Service), PortId: string(b.Port), Healthy: b.Healthy,
	}
	if b.Address.IsValid() {
		out.Address = b.Address.String()
	}
	return out
}
