package node

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Placed says that a VM is, or was, on a host: placed/<node>/<vm>. It changes in every transaction that changes what the
// host should do, so that a host's session watches its own beginning of the table and nothing else.
type Placed struct {
	Project    cloud.ProjectID
	Generation uint64
	// Gone marks what is no longer a record: the host destroys it and reports so, then this goes and gives back Held.
	Gone bool
	Held cloud.Capacity
}

// PlacedVMs is the table of placements.
var PlacedVMs = store.NewTable[Placed]("placed")

// Assignment is what a host should make of one VM.
type Assignment struct {
	VM  cloud.VMID
	Say *agentv1.AssignedVm
}

// session is one agent's Watch.
type session struct {
	node cloud.NodeID
	// end ends it.
	end context.CancelCauseFunc
	// ask wakes the session for requests that wait in asks.
	ask chan struct{}

	mu   sync.Mutex
	asks []*agentv1.ConsoleRequest
}

// request queues a console request for the agent. As many can wait as consoles can be open.
func (s *session) request(r *agentv1.ConsoleRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks = append(s.asks, r)
	select {
	case s.ask <- struct{}{}:
	default:
	}
}

// withdraw takes a request back: off the queue, or by a request to cancel when the agent has it.
func (s *session) withdraw(id string) {
	s.mu.Lock()
	waits := slices.IndexFunc(s.asks, func(r *agentv1.ConsoleRequest) bool { return r.GetRequestId() == id })
	if waits >= 0 {
		s.asks = slices.Delete(s.asks, waits, waits+1)
	}
	s.mu.Unlock()
	if waits < 0 {
		s.request(&agentv1.ConsoleRequest{RequestId: id, Cancel: true})
	}
}

func (s *session) taken() []*agentv1.ConsoleRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	asks := s.asks
	s.asks = nil
	return asks
}

// errReplaced ends a session of whose host a newer one has begun.
var errReplaced = fault.New(fault.Aborted, "another session of this host has begun")

// begin makes a session the host's one and ends an older one.
func (s *Service) begin(node cloud.NodeID, end context.CancelCauseFunc) *session {
	n := &session{node: node, end: end, ask: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.sessions[node]; old != nil {
		old.end(errReplaced)
	}
	s.sessions[node] = n
	return n
}

// connected says whether a host has a session with this member.
func (s *Service) connected(node cloud.NodeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[node] != nil
}

func (s *Service) end(n *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[n.node] == n {
		delete(s.sessions, n.node)
	}
}

// loggedVMs is how many VMs one line of the log names.
const loggedVMs = 16

// chunkVMs is how many VMs go into one message of a snapshot.
const chunkVMs = 100

// watch sends an agent the desired state of its host until ctx ends, the term in which this member leads is over, or the
// agent begins another session.
func (s *Service) watch(ctx context.Context, node cloud.NodeID, present []string, send func(*agentv1.WatchResponse) error) error {
	leading, term := s.opts.Leadership.Leader()
	if leading != s.opts.Self {
		return s.redirect(leading)
	}
	inTerm, stop := leader.InTerm(ctx, s.opts.Leadership, s.opts.Self, term)
	defer stop()
	ctx, end := context.WithCancelCause(inTerm)
	var work sync.WaitGroup
	defer work.Wait()
	defer end(nil)
	me := s.begin(node, end)
	defer s.end(me)
	err := s.serve(ctx, me, present, term, &work, send)
	switch {
	case ctx.Err() == nil:
		return err
	case errors.Is(context.Cause(ctx), leader.ErrTermOver):
		return s.termOver()
	}
	return context.Cause(ctx)
}

// termOver returns the error that ends a session whose term is over.
func (s *Service) termOver() error {
	if err := s.leads(); err != nil {
		return err
	}
	return fault.New(fault.Unavailable, "this member leads anew").MayRetry()
}

// batch is what a watch of the placements brought.
type batch struct {
	changes  []store.Change[Placed]
	revision int64
	err      error
}

// serve sends a session's snapshot, and then what changes.
func (s *Service) serve(ctx context.Context, me *session, present []string, term uint64, work *sync.WaitGroup, send func(*agentv1.WatchResponse) error) error {
	from, err := s.snapshot(ctx, me.node, present, term, send)
	if err != nil {
		return err
	}
	w := PlacedVMs.Watch(s.opts.Store, from, string(me.node))
	defer w.Close()
	batches := make(chan batch)
	work.Go(func() {
		for {
			changes, revision, err := w.Next(ctx)
			select {
			case batches <- batch{changes, revision, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	})
	revision := from - 1
	for {
		say := &agentv1.WatchResponse{Term: term, Complete: true, Revision: revision}
		select {
		case b := <-batches:
			if b.err != nil {
				return b.err
			}
			revision, say.Revision = b.revision, b.revision
			if len(b.changes) == 0 {
				continue
			}
			if err := s.delta(ctx, me.node, b.changes, say); err != nil {
				return err
			}
		case <-me.ask:
			if say.ConsoleRequests = me.taken(); len(say.ConsoleRequests) == 0 {
				continue
			}
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := send(say); err != nil {
			return err
		}
	}
}

// snapshot sends everything the host should have, and rules on everything it says it has.
func (s *Service) snapshot(ctx context.Context, node cloud.NodeID, present []string, term uint64, send func(*agentv1.WatchResponse) error) (from int64, err error) {
	var all []Assignment
	if err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		from = v.Revision() + 1
		all, err = s.guests.Assigned(v, node)
		return err
	}); err != nil {
		return 0, err
	}
	known := map[string]bool{}
	for _, a := range all {
		known[string(a.VM)] = true
	}
	var unknown []string
	for _, id := range present {
		if !known[id] {
			known[id] = true
			unknown = append(unknown, id)
			all = append(all, Assignment{cloud.VMID(id), &agentv1.AssignedVm{VmId: id, Power: agentv1.Power_POWER_ORPHANED}})
		}
	}
	if len(unknown) > 0 {
		s.opts.Log.Warn("a host has VMs that no record places there", "node", node, "count", len(unknown), "vms", unknown[:min(len(unknown), loggedVMs)])
	}
	for first := true; first || len(all) > 0; first = false {
		n := min(len(all), chunkVMs)
		say := &agentv1.WatchResponse{Term: term, Revision: from - 1, Complete: n == len(all)}
		if first {
			say.LeaseSeconds = LeaseSeconds
		}
		for _, a := range all[:n] {
			say.Vms = append(say.Vms, a.Say)
		}
		all = all[n:]
		if err := send(say); err != nil {
			return 0, err
		}
	}
	return from, nil
}

// delta says what changed. What a VM should be is read as it is now: newer than the change does no harm, since
// generations only grow. Released is only what is placed here no longer: the host keeps nothing of that.
func (s *Service) delta(ctx context.Context, node cloud.NodeID, changes []store.Change[Placed], say *agentv1.WatchResponse) error {
	touched := map[cloud.VMID]bool{}
	for _, c := range changes {
		touched[cloud.VMID(c.Path[1])] = true
	}
	return s.opts.Store.View(ctx, func(v *store.View) error {
		all, err := s.guests.Assigned(v, node, slices.Collect(maps.Keys(touched))...)
		if err != nil {
			return err
		}
		for _, a := range all {
			say.Vms = append(say.Vms, a.Say)
			delete(touched, a.VM)
		}
		for id := range touched {
			placed, err := PlacedVMs.Has(v, string(node), string(id))
			if err != nil {
				return err
			}
			if !placed {
				say.ReleasedVms = append(say.ReleasedVms, string(id))
			}
		}
		return nil
	})
}

// redirect returns the error that names the address of the leading member to an agent.
func (s *Service) redirect(leading uint64) error {
	if leading == 0 {
		return fault.New(fault.Unavailable, "no leader is known yet").MayRetry()
	}
	return fault.New(fault.FailedPrecondition, "member %d leads", leading).WithReason("NOT_LEADER").With("leader", s.listeners()[leading])
}

// leads returns nil on the leader, and the error of redirect on other members.
func (s *Service) leads() error {
	if leading, _ := s.opts.Leadership.Leader(); leading != s.opts.Self {
		return s.redirect(leading)
	}
	return nil
}

// reports passes a host's reports to Guests in batches of 16, so that the size of a transaction does not grow with the
// host. It waits while the host changes records faster than changeRate.
func (s *Service) reports(ctx context.Context, node cloud.NodeID, all []cloud.Observation) error {
	const most = 16
	b := s.budgetOf(node)
	for len(all) > 0 {
		n := min(len(all), most)
		attempt, cancel := context.WithTimeout(ctx, 10*time.Second)
		changed, err := s.guests.Observed(attempt, node, all[:n])
		cancel()
		if err != nil {
			return err
		}
		if err := s.spend(ctx, b.changes, changed); err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}
