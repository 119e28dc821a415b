// Package node keeps the hypervisor hosts: their records, whether they are alive, what they are told and what they
// report.
//
// A host's record changes when what its agent says of it changes. That it is alive is soft state of the leader: when it
// was last heard from, and the session its agent holds. A new leader knows nothing of that, gathers it anew within a
// heartbeat, and calls no host lost before a heartbeat's grace has passed: until it has heard from a host, that is
// NOT_READY but not Away. State is READY, NOT_READY or CORDONED, computed when asked.
//
// What a host should look like is a projection of records: placed/<node>/<vm> says which VMs are its own, and Guests
// (package vm) says what each should be. There is no second copy of wanted state.
//
// Who a host is, is its key: it keeps its id when it joins again, after its certificate ran out or into a cluster that was
// made of a backup, so that what is placed on it stays its own. A copy of a host is refused while that one is connected.
// What a host has and no record places there, it is told to be orphaned, and the log names it. A host that has just joined
// a restored cluster keeps such a guest running (package machine of the agent): records that are older than the guest
// cannot know it.
//
// A host that is evicted (evict.go) is not talked to until it joins again; a key that is banned (ban.go) is not until it is
// unbanned. Neither frees what is placed on the host: its guests may run on, and nobody here can stop them. Whoever wants
// them elsewhere has to fence the host first. Every member closes the host's connections (guard.go); a call after that is
// refused by the record.
//
// Decisions of this version: a host has one session, and a newer one ends the older; it sends at most eight images and
// 64 consoles at a time. This package limits what a host may write into records, and the load that it may cause on a
// member (budget.go), since an attacker may control a host. A host may read only the images of its own VMs.
package node

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// Nodes is the table of hosts: node/<id>.
var Nodes = store.NewTable[cloud.Node]("node")

// LeaseSeconds is how long a host may run what it owns after the sending of its last answered heartbeat.
const LeaseSeconds = 30

// Guests is what package vm knows and a host must be told.
type Guests interface {
	// Assigned is what the host should make of what is or was placed on it: of the VMs that are named, or of all.
	Assigned(v *store.View, node cloud.NodeID, vms ...cloud.VMID) ([]Assignment, error)
	// Observed records a host's reports, and returns how many of them changed a record.
	Observed(ctx context.Context, node cloud.NodeID, reports []cloud.Observation) (changed int, err error)
	// UsesImage reports whether a VM placed on a host uses an image, as the backing file of a disk or to boot.
	UsesImage(v *store.View, node cloud.NodeID, sha256 string) (bool, error)
}

// Options of the service; all are required.
type Options struct {
	Store      *store.Store
	Commands   *leader.Commands
	Leadership leader.Leadership
	Self       uint64
	// AgentAddresses are the members' listeners for agents, host:port.
	AgentAddresses map[uint64]string
	// Listeners, when set, is what AgentAddresses is now: members come and go.
	Listeners func() map[uint64]string
	Authority *mtls.Authority
	Log       *slog.Logger
	// Now is the clock.
	Now func() time.Time
	// Steady is a clock that is never set, by which hosts are known to be alive: one that is set must not make all of them
	// look lost. Now when nil.
	Steady func() time.Time
}

// Service is the node service of one member.
type Service struct {
	opts   Options
	guests Guests
	images ImageSource

	mu sync.Mutex
	// since is when this member began to lead, 0 when it does not. seen is when each host was heard from while this member
	// led: that stays true when it leads again.
	since cloud.Time
	seen  map[cloud.NodeID]cloud.Time
	// fleet is every host's record, followed by the leader; empty on other members.
	fleet    map[cloud.NodeID]cloud.Node
	sessions map[cloud.NodeID]*session
	// reading counts the images that each host reads from this member.
	reading map[cloud.NodeID]int
	// budgets holds the budget of each host that has called this member.
	budgets map[cloud.NodeID]*budget
	// pause is sleep; tests replace it.
	pause    func(context.Context, time.Duration) error
	consoles consoles
	guard    guard
}

// liveness is what the leader knows of hosts and no record says.
type liveness struct {
	// Now is the leader's clock, by which it heard of them.
	Now  cloud.Time
	Seen map[cloud.NodeID]cloud.Time
}

// New makes the service and registers its commands.
func New(opts Options) *Service {
	if opts.Steady == nil {
		opts.Steady = opts.Now
	}
	s := &Service{
		opts: opts, seen: map[cloud.NodeID]cloud.Time{}, fleet: map[cloud.NodeID]cloud.Node{}, sessions: map[cloud.NodeID]*session{},
		reading: map[cloud.NodeID]int{}, budgets: map[cloud.NodeID]*budget{}, pause: sleep, consoles: consoles{open: map[string]*console{}},
		guard: guard{conns: map[*guarded]bool{}},
	}
	leader.Register(opts.Commands, s, lastHeardCommand, cordonCommand, newTokenCommand, admitCommand, evictCommand, banCommand, unbanCommand,
		readConsoleCommand)
	return s
}

// listeners are the members' listeners for agents, host:port.
func (s *Service) listeners() map[uint64]string {
	if s.opts.Listeners != nil {
		return s.opts.Listeners()
	}
	return s.opts.AgentAddresses
}

// Attach gives the service what it hands on to agents. Call it before serving.
func (s *Service) Attach(guests Guests, images ImageSource) { s.guests, s.images = guests, images }

// Follow keeps the fleet as the records have it while this member leads. It is a leader's task that ends with the
// leadership.
func (s *Service) Follow(ctx context.Context) error {
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.since = 0
		clear(s.fleet)
	}()
	// Who was heard from before the records are read has a record there, or none any more.
	s.mu.Lock()
	before := slices.Collect(maps.Keys(s.seen))
	s.mu.Unlock()
	var from int64
	if err := s.opts.Store.View(ctx, func(v *store.View) error {
		from = v.Revision() + 1
		all, _, err := Nodes.List(v, 0)
		if err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, r := range all {
			s.fleet[r.Value.ID] = *r.Value
		}
		for _, id := range before {
			if _, known := s.fleet[id]; !known {
				delete(s.seen, id)
			}
		}
		s.since = s.opts.Steady().UnixMilli()
		return nil
	}); err != nil {
		return err
	}
	w := Nodes.Watch(s.opts.Store, from)
	defer w.Close()
	for {
		changes, _, err := w.Next(ctx)
		if err != nil {
			return err
		}
		s.mu.Lock()
		for _, c := range changes {
			id := cloud.NodeID(c.Path[0])
			if c.Value == nil {
				delete(s.fleet, id)
				delete(s.seen, id)
				if b := s.budgets[id]; b != nil && b.underWay == 0 {
					delete(s.budgets, id)
				}
			} else {
				s.fleet[id] = *c.Value
			}
		}
		s.mu.Unlock()
	}
}

// Fleet is every host as the leader knows it now.
func (s *Service) Fleet() []schedule.Candidate {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Steady().UnixMilli()
	out := make([]schedule.Candidate, 0, len(s.fleet))
	for _, id := range slices.Sorted(maps.Keys(s.fleet)) {
		n := s.fleet[id]
		out = append(out, schedule.Candidate{Node: n, State: n.State(now, s.seen[id])})
	}
	return out
}

// Away reports whether a host is known not to answer. A leader that is younger than a heartbeat's grace knows it of
// none, and a member that does not lead knows nothing.
func (s *Service) Away(id cloud.NodeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Steady().UnixMilli()
	return s.since != 0 && now-max(s.seen[id], s.since) > cloud.HeartbeatLost
}

var lastHeardCommand = leader.NewCommand("node.heard", leader.Repeatable, (*Service).lastHeardOnLeader)

// lastHeardOnLeader returns when this member, as the leader, last received a heartbeat of each host; 0 for never.
func (s *Service) lastHeardOnLeader(_ context.Context, ids []cloud.NodeID) (liveness, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := liveness{Now: s.opts.Steady().UnixMilli(), Seen: make(map[cloud.NodeID]cloud.Time, len(ids))}
	for _, id := range ids {
		out.Seen[id] = s.seen[id]
	}
	return out, nil
}

// get is one host's record.
func (s *Service) get(ctx context.Context, id cloud.NodeID) (n *cloud.Node, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if n, err = Nodes.Get(v, string(id)); err == nil && n == nil {
			err = noNode(id)
		}
		return err
	})
	return n, err
}

// list is a page of hosts' records.
func (s *Service) list(ctx context.Context, size int32, token string) ([]*cloud.Node, string, error) {
	all := func(*cloud.Node) bool { return true }
	return store.Page(ctx, s.opts.Store, Nodes, store.PageRequest{Size: size, Token: token, Query: "nodes"}, all)
}

type cordonChange struct {
	Node   cloud.NodeID
	Cordon bool
}

var cordonCommand = leader.NewCommand("node.cordon", leader.Repeatable, (*Service).cordonOnLeader)

// cordonOnLeader sets whether a host takes new VMs, and returns its record.
func (s *Service) cordonOnLeader(ctx context.Context, q cordonChange) (n cloud.Node, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		have, err := Nodes.Get(tx, string(q.Node))
		if err != nil {
			return err
		}
		if have == nil {
			return noNode(q.Node)
		}
		if n = *have; n.Cordoned == q.Cordon {
			return nil
		}
		n.Cordoned, n.UpdatedAt = q.Cordon, tx.Now()
		Nodes.Put(tx, &n, string(q.Node))
		return nil
	})
	return n, err
}

func noNode(id cloud.NodeID) error { return fault.New(fault.NotFound, "no node %s", id) }
