package node

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits per host and member. An agent stays far below them. They prevent a host whose key was stolen from slowing the
// control plane down for others.
const (
	// MaxMessage limits a message from an agent, in bytes; gRPC refuses larger ones with RESOURCE_EXHAUSTED. The
	// largest message that an agent sends is a Watch request with maxPresent VMs.
	MaxMessage = 1 << 20
	// maxPresent limits the VMs in a Watch request.
	maxPresent = 20_000
	// maxObservations limits the VMs in one message of a Report stream.
	maxObservations = 1000
	// maxConnections limits the connections of a host. An agent uses one, and one more for each member from which it
	// reads an image. Connections from before a power failure remain until keepalive closes them.
	maxConnections = 16
	// maxCalls limits the concurrent calls of a host: its consoles (maxConsoles), its image reads, and a few more.
	maxCalls = 128
	// maxReportStreams limits the concurrent Report streams of a host, each of which may hold a message of MaxMessage.
	maxReportStreams = 4
	// callRate and callBurst limit new calls of a host, per second. An agent sends one heartbeat every 5 s.
	callRate, callBurst = 20, 200
	// watchRate and watchBurst limit new sessions of a host, per second: each one reads all records of VMs placed on
	// the host.
	watchRate, watchBurst = 1, 20
	// imageRate and imageBurst limit new image reads of a host, per second: each one searches the VMs placed on the
	// host.
	imageRate, imageBurst = 2, 64
	// observationRate and observationBurst limit the observations from a host, per second. An agent sends one per VM
	// every 10 s, and all at once when it connects. Each message costs messageCost more.
	observationRate, observationBurst = 2000, 10_000
	messageCost                       = 10
	// changeRate and changeBurst limit the observations of a host that change a record, per second. A host starts 8 VMs
	// at a time; a burst occurs when all its VMs end at once.
	changeRate, changeBurst = 200, 2000
	// refusalDelay delays the refusal of a call beyond callRate, so that a client that retries at once costs little.
	refusalDelay = time.Second
	// minUpdateInterval is the minimum time between two writes of a host's heartbeat data, and between two of its
	// facts, in milliseconds. Changes in between are recorded together at the end of that time.
	minUpdateInterval cloud.Time = 30_000
)

// budget holds this member's limiters and counters for one host. It exists in memory, for each host that has called.
type budget struct {
	calls, watches, images, observations, changes *rate.Limiter

	// Guarded by Service.mu:
	activeCalls, reportStreams int
	lastUpdate                 cloud.Time // when heartbeat data was last recorded; 0: never
	lastFacts                  cloud.Time // when facts were last recorded; 0: never
	pendingFacts               *hostFacts // the newest facts, until they are recorded
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

// beginCall admits one call of a host. Call leave when the call ends, unless err is set.
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

// beginReport counts a Report stream of a host. Call end when it ends.
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

// throttle takes n tokens from a limiter and waits until they are available. The stream is not read meanwhile, so flow
// control slows its sender.
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

// updateNodeThrottled calls change if at least minUpdateInterval has passed since *last, the time of the last recorded
// change, and updates *last. Otherwise it does nothing and returns ok false.
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
