package node

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits on the calls of one host to one member. An agent needs far less. They prevent someone with the stolen key of a
// host from slowing the control plane down for others.
const (
	// MaxMessage is the maximum size, in bytes, of a message from an agent; gRPC refuses larger ones with
	// RESOURCE_EXHAUSTED. The largest message that an agent sends is a Watch request that lists maxPresent VMs.
	MaxMessage = 1 << 20
	// maxPresent is the maximum number of VMs in a Watch request.
	maxPresent = 20_000
	// maxObservations is the maximum number of VMs in one message of a Report stream.
	maxObservations = 1000
	// maxConnections is the maximum number of concurrent connections of a host to one member. An agent uses one, and
	// one more for each member from which it reads an image. After a power failure of the host, its old connections
	// count until keepalive closes them.
	maxConnections = 16
	// maxCalls is the maximum number of concurrent calls of a host: at most maxConsoles console logs, maxOpenConsoles
	// open consoles, maxSnapshots snapshots, its image reads, and a few more.
	maxCalls = 160
	// maxReportStreams is the maximum number of concurrent Report streams of a host. The member may buffer one message
	// of up to MaxMessage bytes for each.
	maxReportStreams = 4
	// callRate is the allowed number of new calls of a host per second, and callBurst the number allowed at once. An
	// agent sends one heartbeat every 5 s.
	callRate, callBurst = 20, 200
	// watchRate is the allowed number of new Watch streams of a host per second, and watchBurst the number allowed at
	// once. Each new stream reads all records of VMs placed on the host.
	watchRate, watchBurst = 1, 20
	// imageRate is the allowed number of new image reads of a host per second, and imageBurst the number allowed at
	// once. Each one searches the VMs placed on the host.
	imageRate, imageBurst = 2, 64
	// observationRate is the allowed number of reported VM states of a host per second, and observationBurst the number
	// allowed at once. An agent reports each VM every 10 s, and all VMs when it connects. Each message counts as
	// messageCost VM states in addition to those in it.
	observationRate, observationBurst = 2000, 10_000
	messageCost                       = 10
	// changeRate is the allowed number of reported VM states per second that change a record, and changeBurst the
	// number allowed at once. A host starts at most 8 VMs at a time; a burst occurs when all VMs of a host stop at
	// once.
	changeRate, changeBurst = 200, 2000
	// refusalDelay is how long a member waits before it refuses a call that exceeds callRate. The delay limits the load
	// from a client that repeats refused calls at once.
	refusalDelay = time.Second
	// minUpdateInterval is the minimum time, in milliseconds, between two writes of a host's heartbeat data to the
	// host's record. It is also the minimum time between two writes of the host's facts. Of several changes within that
	// time, only the last is written, at the end of the time.
	minUpdateInterval cloud.Time = 30_000
)

// budget holds this member's rate limiters and counters for one host. It is created when the host first calls, and is
// not stored.
type budget struct {
	calls, watches, images, observations, changes *rate.Limiter

	// Service.mu guards the following fields:
	activeCalls, reportStreams int
	lastUpdate                 cloud.Time // time of the last write of heartbeat data to the host's record; 0: none
	lastFacts                  cloud.Time // time of the last write of facts to the host's record; 0: none
	pendingFacts               *hostFacts // the host's newest facts until they are written to its record, then nil
}

// budgetOf returns the budget of a host, creating it if needed.
func (s *Service) budgetOf(id cloud.NodeID) *budget {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.budgets[id]
	if b == nil {
		b = &budget{
			calls: rate.NewLimiter(callRate, callBurst), watches: rate.NewLimiter(watchRate, watchBurst), images: rate.NewLimiter(imageRate, imageBurst),
			observations: rate.NewLimiter(observationRate, observationBurst), changes: rate.NewLimiter(changeRate, changeBurst),
		}
		s.budgets[id] = b
	}
	return b
}

// beginCall counts a call of a host. If the host exceeds maxCalls or callRate, it returns ResourceExhausted. If err is
// nil, the caller must call leave when the call ends.
func (s *Service) beginCall(ctx context.Context, id cloud.NodeID) (leave func(), err error) {
	b := s.budgetOf(id)
	s.mu.Lock()
	full := b.activeCalls >= maxCalls
	if !full {
		b.activeCalls++
	}
	s.mu.Unlock()
	if full {
		return nil, fault.New(fault.ResourceExhausted, "this host has %d calls in progress, which is the limit: end some first", maxCalls)
	}
	leave = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		b.activeCalls--
	}
	if b.calls.AllowN(s.opts.Steady(), 1) {
		return leave, nil
	}
	defer leave()
	if err := s.pause(ctx, refusalDelay); err != nil {
		return nil, err
	}
	return nil, fault.New(fault.ResourceExhausted, "this host makes more than %d calls a second: make fewer", callRate)
}

// beginReport counts a Report stream of a host. If the host already has maxReportStreams streams, it returns
// ResourceExhausted. If err is nil, the caller must call end when the stream ends.
func (s *Service) beginReport(id cloud.NodeID) (end func(), err error) {
	b := s.budgetOf(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.reportStreams >= maxReportStreams {
		return nil, fault.New(fault.ResourceExhausted, "this host has %d streams of reports open: end one before opening another", maxReportStreams)
	}
	b.reportStreams++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		b.reportStreams--
	}, nil
}

// throttle takes n tokens from the limiter l and waits until they are available, or returns the error of ctx. A stream
// handler reads no messages while it waits, so flow control slows the sender down.
func (s *Service) throttle(ctx context.Context, l *rate.Limiter, n int) error {
	for n > 0 {
		now, part := s.opts.Steady(), min(n, l.Burst())
		if err := s.pause(ctx, l.ReserveN(now, part).DelayFrom(now)); err != nil {
			return err
		}
		n -= part
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// updateNodeThrottled limits how often a host's record is written. If *last is 0 or at least minUpdateInterval ago, it
// calls updateNode, and sets *last to the current time if the record changed. Otherwise it changes nothing and returns
// ok=false.
func (s *Service) updateNodeThrottled(ctx context.Context, id cloud.NodeID, last *cloud.Time, change func(*cloud.Node)) (n cloud.Node, ok bool, err error) {
	now := s.opts.Steady().UnixMilli()
	s.mu.Lock()
	before := *last
	if before != 0 && now-before < minUpdateInterval {
		s.mu.Unlock()
		return cloud.Node{}, false, nil
	}
	*last = now
	s.mu.Unlock()
	n, changed, err := s.updateNode(ctx, id, change)
	if !changed {
		s.mu.Lock()
		*last = before
		s.mu.Unlock()
	}
	return n, true, err
}
