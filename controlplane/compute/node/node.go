// Package node manages the hosts, the machines that run VMs. It stores a record per host, tracks which hosts are alive,
// sends each host's agent (the Trivet process on the host) the desired state of its VMs, and receives the agents'
// reports. The main type is Service.
//
// A heartbeat contains a description of its host. The leader writes it to the host's record only if it has changed.
// Liveness is not stored: the leader keeps in memory when it last received a heartbeat of each host, and which hosts'
// agents have a Watch stream to it. A new leader starts without this data and collects it within one heartbeat
// interval. A new leader reports a host as NOT_READY until the host's first heartbeat. It reports no host as
// Unresponsive before cloud.HeartbeatTimeout has passed since the start of its term. The state of a host,
// such as READY, is computed for each request.
//
// The desired state of a host is computed from records: placed/<node>/<vm> lists the VMs of a host, and VMController
// (package vm) returns the desired state of each. Likewise bound-volume/<node>/<volume> lists the volumes of a host,
// and VolumeController (package volume) returns the desired state of each of these volumes. There is no second copy of
// the desired state.
//
// A host is identified by its public key. It keeps its ID when it joins again, for example after its certificate
// expired or after the cluster was restored from a backup, so its VMs stay placed on it. If two machines have the same
// key, such as a host and a copy of its disk, the second cannot join while the first is connected. If a host reports a
// VM that no record places there, the leader tells the agent that the VM is orphaned, and logs it. A host that has just
// joined a restored cluster lets such a VM run (package machine of the agent), because the VM may be newer than the
// records.
//
// The calls of an evicted host (evict.go) are refused until it joins again. The calls of a host with a banned key
// (ban.go) are refused until the key is unbanned. Neither frees the VMs that are placed on the host: they may still
// run, and the control plane cannot stop them. To start them elsewhere, an operator must fence the host first. Every
// member closes the connections of an evicted or banned host (guard.go), and refuses its later calls because of the
// record.
//
// Decisions of this version: a host has one session, which is a Watch stream to the leader, and a newer session ends
// the older one. A host reads at most 8 images from a member, and sends at most 64 console logs, 64 open consoles and 16 snapshots, at a time.
// An attacker may control a host, so this package limits what a host can write into records and the load that it can
// cause on a member (budget.go). A host may read only the images of its own VMs.
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

// Nodes is the table of the hosts' records, at node/<id>.
var Nodes = store.NewTable[cloud.Node]("node")

// LeaseSeconds is how long, in seconds, a host may continue to run its VMs after a heartbeat. The time begins when the
// host sends the heartbeat, and counts only if the host gets a response. Agents get LeaseSeconds in the first message
// of a Watch stream.
const LeaseSeconds = 30

// VMController computes the desired state of VMs and stores the VM states that hosts report. Package vm implements it.
type VMController interface {
	// Assigned returns the desired state of VMs that are or were placed on a host: of the VMs in vms, or of all such
	// VMs if vms is empty.
	Assigned(v *store.View, node cloud.NodeID, vms ...cloud.VMID) ([]Assignment, error)
	// Observed stores the VM states that a host reports. changed is the number of reports that changed a record.
	Observed(ctx context.Context, node cloud.NodeID, reports []cloud.Observation) (changed int, err error)
	// UsesImage reports whether a VM placed on a host uses the image with this checksum to boot or as the backing file
	// of a disk.
	UsesImage(v *store.View, node cloud.NodeID, sha256 string) (bool, error)
	// Describe returns the tenant and the name of a VM, such as acme/shop/web, or its ID if the VM has no record.
	Describe(r store.Reader, project cloud.ProjectID, id cloud.VMID) (string, error)
}

// Options configures New. All fields without a default are required.
type Options struct {
	Store      *store.Store
	Commands   *leader.Commands
	Leadership leader.Leadership
	Self       uint64
	// Listeners returns the address, host:port, on which each current member serves agents, by member ID.
	Listeners func() map[uint64]string
	Authority *mtls.Authority
	Log       *slog.Logger
	// Now returns the wall-clock time.
	Now func() time.Time
	// Steady returns the time from which the ages of heartbeats are computed. It should come from a clock that nobody
	// can set, so that setting the wall clock does not make all hosts look lost. Default: Now.
	Steady func() time.Time
}

// Service implements the node service of one member.
type Service struct {
	opts   Options
	vms    VMController
	images ImageSource
	// networks is nil in tests that need no networks.
	networks NetworkController
	volumes  VolumeController

	mu sync.Mutex
	// termStart is the Steady time, in Unix milliseconds, at which Follow began in this member's current term as
	// leader. It is 0 while this member does not lead. lastHeartbeat holds the Steady time of each host's last
	// heartbeat to this member. The times in lastHeartbeat are kept when a term ends and used again if this member
	// leads again.
	termStart     cloud.Time
	lastHeartbeat map[cloud.NodeID]cloud.Time
	// nodes is a copy of every host's record while this member leads, by host ID; it is empty on other members.
	nodes    map[cloud.NodeID]cloud.Node
	sessions map[cloud.NodeID]*session
	// imageReads counts the image reads in progress on this member, by host.
	imageReads map[cloud.NodeID]int
	// budgets holds the rate limiters and call counters of each host that has called this member.
	budgets map[cloud.NodeID]*budget
	// pause waits for a duration or until the context ends. It is the function sleep, except in tests.
	pause    func(context.Context, time.Duration) error
	guard    guard
	fencings fencings
	// consoles and snapshots are the reads of console logs and of snapshots from hosts. openConsoles are the open
	// consoles, in both directions.
	consoles, snapshots, openConsoles *hostReads
	placement                         placement
	// guests are the calls of guest agents in VMs on hosts.
	guests *hostReads
}

// liveness is the response of lastHeardCommand, with which a member asks the leader when it last received a heartbeat
// of each host.
type liveness struct {
	// Now is the leader's Steady clock at the time of the response. The times in Seen are from the same clock.
	Now  cloud.Time
	Seen map[cloud.NodeID]cloud.Time
}

// New creates the service and registers the commands that other members forward to the leader.
func New(opts Options) *Service {
	if opts.Steady == nil {
		opts.Steady = opts.Now
	}
	s := &Service{
		opts: opts, volumes: noVolumes{}, lastHeartbeat: map[cloud.NodeID]cloud.Time{}, nodes: map[cloud.NodeID]cloud.Node{}, sessions: map[cloud.NodeID]*session{},
		imageReads: map[cloud.NodeID]int{}, budgets: map[cloud.NodeID]*budget{}, pause: sleep, consoles: newConsoleReads(), snapshots: newSnapshotReads(),
		openConsoles: newOpenConsoles(), guests: newGuestCalls(),
		guard: guard{conns: map[*guardedConn]bool{}}, placement: newPlacement(),
	}
	leader.Register(opts.Commands, s, lastHeardCommand, cordonCommand, drainCommand, cancelDrainCommand, newTokenCommand, admitCommand, evictCommand, fenceCommand, banCommand, unbanCommand,
		readConsoleCommand, readSnapshotCommand, openConsoleCommand, callGuestCommand)
	return s
}

// Attach sets the sources of VM states and image bytes. Call it before the service receives calls.
func (s *Service) Attach(guests VMController, images ImageSource) { s.vms, s.images = guests, images }

// Follow keeps s.nodes equal to the host records while this member leads. Package leader runs it on the leader and
// cancels ctx when the term ends.
func (s *Service) Follow(ctx context.Context) error {
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.termStart = 0
		clear(s.nodes)
		s.placement.clear()
	}()
	// Only a host with a record can send a heartbeat. If a host in lastHeartbeat has no record in the View below, its
	// record was deleted, so its entry in lastHeartbeat can be removed.
	s.mu.Lock()
	before := slices.Collect(maps.Keys(s.lastHeartbeat))
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
			s.nodes[r.Value.ID] = *r.Value
			s.placement.put(r.Value, s.lastHeartbeat[r.Value.ID])
		}
		for _, id := range before {
			if _, known := s.nodes[id]; !known {
				delete(s.lastHeartbeat, id)
			}
		}
		s.termStart = s.opts.Steady().UnixMilli()
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
				delete(s.nodes, id)
				delete(s.lastHeartbeat, id)
				s.placement.remove(id)
				if b := s.budgets[id]; b != nil && b.activeCalls == 0 {
					delete(s.budgets, id)
				}
			} else {
				s.nodes[id] = *c.Value
				s.placement.put(c.Value, s.lastHeartbeat[id])
			}
		}
		s.mu.Unlock()
	}
}

// Fleet returns every host with its current state, sorted by host ID. It returns no hosts on members other than the
// leader.
func (s *Service) Fleet() []schedule.Candidate {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Steady().UnixMilli()
	out := make([]schedule.Candidate, 0, len(s.nodes))
	for _, id := range slices.Sorted(maps.Keys(s.nodes)) {
		n := s.nodes[id]
		out = append(out, schedule.Candidate{Node: n, State: n.State(now, s.lastHeartbeat[id])})
	}
	return out
}

// LastHeartbeats returns the wall-clock time of each host's last heartbeat to this member. It returns none if this member
// does not lead. A host without a heartbeat to this member, as may be after a change of the leader, is missing.
func (s *Service) LastHeartbeats() map[cloud.NodeID]time.Time {
	wall, steady := s.opts.Now(), s.opts.Steady().UnixMilli()
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[cloud.NodeID]time.Time, len(s.nodes))
	for id := range s.nodes { // s.nodes is empty on a member that does not lead
		if at := s.lastHeartbeat[id]; at != 0 {
			out[id] = wall.Add(-time.Duration(steady-at) * time.Millisecond)
		}
	}
	return out
}

// Unresponsive reports whether a host has sent no heartbeat for more than cloud.HeartbeatTimeout. It returns false if
// this member does not lead, or has led for no longer than cloud.HeartbeatTimeout.
func (s *Service) Unresponsive(id cloud.NodeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Steady().UnixMilli()
	return s.silent(id, now) > cloud.HeartbeatTimeout
}

// silent returns for how many milliseconds a host has sent no heartbeat at the Steady time now. The time before the
// start of this member's term as leader does not count, because another member received the heartbeats then. silent
// returns 0 if this member does not lead. The caller must hold mu.
func (s *Service) silent(id cloud.NodeID, now cloud.Time) cloud.Time {
	if s.termStart == 0 {
		return 0
	}
	return now - max(s.lastHeartbeat[id], s.termStart)
}

var lastHeardCommand = leader.NewCommand("node.heard", leader.Repeatable, (*Service).lastHeardOnLeader)

// lastHeardOnLeader returns when this member, the leader, received the last heartbeat of each host in ids. The time is
// 0 for a host from which it received none.
func (s *Service) lastHeardOnLeader(_ context.Context, ids []cloud.NodeID) (liveness, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := liveness{Now: s.opts.Steady().UnixMilli(), Seen: make(map[cloud.NodeID]cloud.Time, len(ids))}
	for _, id := range ids {
		out.Seen[id] = s.lastHeartbeat[id]
	}
	return out, nil
}

// States returns the records of all hosts with their present states, sorted by ID. It fails while there is no leader,
// because only the leader knows when the hosts sent their last heartbeats.
func (s *Service) States(ctx context.Context) ([]schedule.Candidate, error) {
	var out []schedule.Candidate
	if err := s.opts.Store.Local(func(v *store.View) error {
		all, _, err := Nodes.List(v, 0)
		for _, r := range all {
			out = append(out, schedule.Candidate{Node: *r.Value})
		}
		return err
	}); err != nil {
		return nil, err
	}
	ids := make([]cloud.NodeID, len(out))
	for i := range out {
		ids[i] = out[i].Node.ID
	}
	heard, err := lastHeardCommand.Call(ctx, s.opts.Commands, ids)
	if err != nil {
		return nil, err
	}
	for i := range out {
		out[i].State = out[i].Node.State(heard.Now, heard.Seen[out[i].Node.ID])
	}
	return out, nil
}

// get returns the record of the host with this ID, or a NotFound error if there is none.
func (s *Service) get(ctx context.Context, id cloud.NodeID) (n *cloud.Node, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if n, err = Nodes.Get(v, string(id)); err == nil && n == nil {
			err = noNode(id)
		}
		return err
	})
	return n, err
}

// Named returns the ID of the host with this ID or name. It returns NotFound if there is none, or several hosts have
// the name.
func (s *Service) Named(ctx context.Context, idOrName string) (id cloud.NodeID, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		all, _, err := Nodes.List(v, 0)
		if err != nil {
			return err
		}
		id = ""
		for _, r := range all {
			switch n := r.Value; {
			case string(n.ID) == idOrName:
				id = n.ID
				return nil
			case n.Name == idOrName && id != "":
				return fault.New(fault.NotFound, "several nodes have the name %s", idOrName)
			case n.Name == idOrName:
				id = n.ID
			}
		}
		if id == "" {
			return noNode(cloud.NodeID(idOrName))
		}
		return nil
	})
	return id, err
}

// list returns a page of host records and the token of the next page.
func (s *Service) list(ctx context.Context, size int32, token string) ([]*cloud.Node, string, error) {
	all := func(*cloud.Node) bool { return true }
	return store.Page(ctx, s.opts.Store, Nodes, store.PageRequest{Size: size, Token: token, Query: "nodes"}, all)
}

type cordonRequest struct {
	Node   cloud.NodeID
	Cordon bool
}

var cordonCommand = leader.NewCommand("node.cordon", leader.Repeatable, (*Service).cordonOnLeader)

// Cordon sets whether the scheduler may place new VMs on a host, and returns the host's record. The caller must already
// be authorized. If cordon is false, Cordon also ends the drain or the maintenance of the host; migrations that have
// begun go on. If cordon is true, a host that is drained or in maintenance is not changed: it is cordoned already.
func (s *Service) Cordon(ctx context.Context, id cloud.NodeID, cordon bool) (cloud.Node, error) {
	if err := cloud.CheckUUID("node_id", string(id)); err != nil {
		return cloud.Node{}, err
	}
	return cordonCommand.Call(ctx, s.opts.Commands, cordonRequest{id, cordon})
}

// cordonOnLeader implements Cordon on the leader.
func (s *Service) cordonOnLeader(ctx context.Context, q cordonRequest) (n cloud.Node, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		have, err := Nodes.Get(tx, string(q.Node))
		if err != nil {
			return err
		}
		if have == nil {
			return noNode(q.Node)
		}
		if n = *have; n.Cordoned == q.Cordon && (q.Cordon || n.Drain == nil) {
			return nil
		}
		if !q.Cordon && n.Drain != nil {
			n.Drain = nil
			if err := forgetDrain(tx, q.Node); err != nil {
				return err
			}
		}
		n.Cordoned, n.UpdatedAt = q.Cordon, tx.Now()
		Nodes.Put(tx, &n, string(q.Node))
		return nil
	})
	return n, err
}

func noNode(id cloud.NodeID) error { return fault.New(fault.NotFound, "no node %s", id) }
