package node

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/store"
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
	// ask wakes the session for requests that wait in asks.
	ask chan struct{}

	mu   sync.Mutex
	asks []*agentv1.ConsoleRequest
}

// request queues a console request for the agent.
func (s *session) request(r *agentv1.ConsoleRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.asks) >= 256 && !r.GetCancel() {
		return fault.New(fault.Unavailable, "the host has too many requests waiting").MayRetry()
	}
	s.asks = append(s.asks, r)
	select {
	case s.ask <- struct{}{}:
	default:
	}
	return nil
}

func (s *session) taken() []*agentv1.ConsoleRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	asks := s.asks
	s.asks = nil
	return asks
}

// begin makes a session the host's one; an older one of the same host gets no more requests.
func (s *Service) begin(node cloud.NodeID) *session {
	n := &session{node: node, ask: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[node] = n
	return n
}

func (s *Service) end(n *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[n.node] == n {
		delete(s.sessions, n.node)
	}
}

// chunkVMs is how many VMs go into one message of a snapshot.
const chunkVMs = 100

// watch tells an agent what its host should look like until ctx ends or this member no longer leads.
func (s *Service) watch(ctx context.Context, node cloud.NodeID, present []string, send func(*agentv1.WatchResponse) error) error {
	leader, term := s.opts.Leadership.Leader()
	if leader != s.opts.Self {
		return s.redirect(leader)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel()
		for {
			changed := s.opts.Leadership.Changed()
			if l, t := s.opts.Leadership.Leader(); l != s.opts.Self || t != term {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	me := s.begin(node)
	defer s.end(me)
	from, err := s.snapshot(ctx, node, present, term, send)
	if err != nil {
		return err
	}
	w := PlacedVMs.Watch(s.opts.Store, from, string(node))
	defer w.Close()
	type batch struct {
		changes  []store.Change[Placed]
		revision int64
		err      error
	}
	batches := make(chan batch)
	go func() {
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
	}()
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
			if err := s.delta(ctx, node, b.changes, say); err != nil {
				return err
			}
		case <-me.ask:
			say.ConsoleRequests = me.taken()
		case <-ctx.Done():
			return fault.New(fault.Unavailable, "this member no longer leads").MayRetry()
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
	for _, id := range present {
		if !known[id] {
			all = append(all, Assignment{cloud.VMID(id), &agentv1.AssignedVm{VmId: id, Power: agentv1.Power_POWER_ORPHANED}})
		}
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
// generations only grow.
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
			say.ReleasedVms = append(say.ReleasedVms, string(id))
		}
		return nil
	})
}

// redirect tells an agent where the leader is.
func (s *Service) redirect(leader uint64) error {
	if leader == 0 {
		return fault.New(fault.Unavailable, "no leader is known yet").MayRetry()
	}
	return fault.New(fault.FailedPrecondition, "member %d leads", leader).WithReason("NOT_LEADER").With("leader", s.opts.AgentAddresses[leader])
}

// leads is nil on the leader, and says where it is elsewhere.
func (s *Service) leads() error {
	if leader, _ := s.opts.Leadership.Leader(); leader != s.opts.Self {
		return s.redirect(leader)
	}
	return nil
}

// reports hands a host's reports on, a few at a time so that no transaction grows with the host.
func (s *Service) reports(ctx context.Context, node cloud.NodeID, all []cloud.Observation) error {
	const most = 16
	for len(all) > 0 {
		n := min(len(all), most)
		attempt, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := s.guests.Observed(attempt, node, all[:n])
		cancel()
		if err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}
