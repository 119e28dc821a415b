package node

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// What one host may use of one member. An agent stays far below; a stolen key must not slow the cloud for others.
const (
	// MaxMessage is the largest message, in bytes, that a member takes from an agent; gRPC answers a larger one with
	// RESOURCE_EXHAUSTED. An agent's largest is a Watch that names maxPresent VMs.
	MaxMessage = 1 << 20
	// maxPresent is how many VMs a Watch may name.
	maxPresent = 20_000
	// maxObservations is how many VMs one message of a Report may be about.
	maxObservations = 1000
	// maxConnections is how many connections a host may hold. An agent uses one, and one for each image that it reads from
	// another member; connections of before a power failure stay until keepalive finds them dead.
	maxConnections = 16
	// maxCalls is how many calls of a host may be under way: its consoles (maxConsoles), its images, and a few more.
	maxCalls = 128
	// maxReportStreams is how many of them may be Reports, each of which may hold a message of MaxMessage.
	maxReportStreams = 4
	// callRate and callBurst bound the calls that a host begins, per second. An agent makes one heartbeat every 5 s.
	callRate, callBurst = 20, 200
	// watchRate and watchBurst bound the sessions that a host begins, per second: each one reads all that is placed on the
	// host.
	watchRate, watchBurst = 1, 20
	// imageRate and imageBurst bound how many readings of images a host begins, per second: each one searches what is
	// placed on the host.
	imageRate, imageBurst = 2, 64
	// observationRate and observationBurst bound the observations that are read of a host, per second. An agent sends one
	// for each VM every 10 s, and all at once when it connects. A message costs messageCost of them besides its own.
	observationRate, observationBurst = 2000, 10_000
	messageCost                       = 10
	// changeRate and changeBurst bound the observations of a host that change a record, per second. A host starts 8 VMs at a
	// time; a burst is what ends with it.
	changeRate, changeBurst = 200, 2000
	// refusalDelay is how long a call beyond callRate waits for its refusal, so that a caller who repeats it at once costs
	// little.
	refusalDelay = time.Second
	// recordEvery is how often a heartbeat and the facts of a host are recorded, each, in milliseconds. What changes sooner
	// is recorded with what changed until then.
	recordEvery cloud.Time = 30_000
)

// budget is what this member has left for one host. There is one for each host that has called; it is not recorded.
type budget struct {
	calls, watches, images, observations, changes *rate.Limiter

	// Guarded by Service.mu:
	underWay, reports int
	described         cloud.Time   // when a heartbeat's changes were last recorded; 0 never
	stated            cloud.Time   // when facts were last recorded; 0 never
	facts             *statedFacts // the newest, while they wait to be recorded
}

// budgetOf returns the budget of a host, making it if need be.
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

// enter admits one call of a host. The caller calls leave at the call's end unless err is set.
func (s *Service) enter(ctx context.Context, id cloud.NodeID) (leave func(), err error) {
	b := s.budgetOf(id)
	s.mu.Lock()
	full := b.underWay >= maxCalls
	if !full {
		b.underWay++
	}
	s.mu.Unlock()
	if full {
		return nil, fault.New(fault.ResourceExhausted, "%d calls of this host are under way: end some before beginning more", maxCalls)
	}
	leave = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		b.underWay--
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

// beginReport counts a Report of a host; end is to be called when it ends.
func (s *Service) beginReport(id cloud.NodeID) (end func(), err error) {
	b := s.budgetOf(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.reports >= maxReportStreams {
		return nil, fault.New(fault.ResourceExhausted, "this host has %d streams of reports open: end one before opening another", maxReportStreams)
	}
	b.reports++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		b.reports--
	}, nil
}

// spend takes n from a limiter and waits until the limiter has had them. The sender of a stream that is not read meanwhile
// is slowed by flow control.
func (s *Service) spend(ctx context.Context, l *rate.Limiter, n int) error {
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

// describeInTurn calls describe if the last change was recorded recordEvery ago or longer; last is the time of that change,
// a field of the host's budget. ok is false, and nothing has happened, if it was not.
func (s *Service) describeInTurn(ctx context.Context, id cloud.NodeID, last *cloud.Time, change func(*cloud.Node)) (n cloud.Node, ok bool, err error) {
	now := s.opts.Steady().UnixMilli()
	s.mu.Lock()
	before := *last
	if before != 0 && now-before < recordEvery {
		s.mu.Unlock()
		return cloud.Node{}, false, nil
	}
	*last = now
	s.mu.Unlock()
	n, changed, err := s.describe(ctx, id, change)
	if !changed {
		s.mu.Lock()
		*last = before
		s.mu.Unlock()
	}
	return n, true, err
}
