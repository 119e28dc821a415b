package node

import (
	"context"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Fence is the record that a host cannot run its VMs any more, at node-fence/<node>. While it exists, VMs of the host
// may get another host. It is removed before the first heartbeat of the host is acknowledged again.
type Fence struct {
	// At is when the fence was recorded.
	At cloud.Time
	// Confirmed is true if a caller, named By, has confirmed that the host is off. Otherwise the host's lease has ended.
	Confirmed bool
	By        string
}

var fences = store.NewTable[Fence]("node-fence")

// FenceOf returns the Fence record of a host, or nil if the host has none.
func FenceOf(r store.Reader, id cloud.NodeID) (*Fence, error) { return fences.Get(r, string(id)) }

// LostTime is the time without a heartbeat, in milliseconds, after which the lease of a host has certainly ended. The
// host counts from when it sent its last heartbeat, and the leader from when it received it. The difference is for the
// time that the host needs to power its VMs off, and for clocks of different speed.
const LostTime = LeaseSeconds*1000 + 15_000

// GatherTime is the time, in milliseconds, within which hosts that lose their power at once become lost. Their last
// heartbeats were sent at different moments of the interval of heartbeats.
const GatherTime = 10_000

// ReasonAnswers is the reason in the error of FenceByHand if the host still answers.
const ReasonAnswers = "NODE_ANSWERS"

var errFencing = fault.New(fault.Unavailable, "the control plane has begun to fence this host: its VMs may start elsewhere")

// fencings counts, for each host, how often this member has begun or ended to write a Fence record. A heartbeat is
// acknowledged only if no such write was in progress while it was handled: otherwise the host would get a new lease, and
// the record would let its VMs start elsewhere.
type fencings struct {
	mu sync.Mutex
	of map[cloud.NodeID]fencing
}

type fencing struct {
	changes uint64
	writing bool
}

// count returns a number that differs from earlier results if a write of the host's Fence record has begun since then.
// While a write is in progress, no two results are equal.
func (f *fencings) count(id cloud.NodeID) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	one := f.of[id]
	if one.writing {
		one.changes++
		f.of[id] = one
	}
	return one.changes
}

// begin returns false if a write is already in progress.
func (f *fencings) begin(id cloud.NodeID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	one := f.of[id]
	if one.writing {
		return false
	}
	if f.of == nil {
		f.of = map[cloud.NodeID]fencing{}
	}
	f.of[id] = fencing{changes: one.changes + 1, writing: true}
	return true
}

func (f *fencings) end(id cloud.NodeID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.of[id] = fencing{changes: f.of[id].changes + 1}
}

// Lost returns the hosts whose VMs may get another host, sorted by ID. These are the hosts that have sent no heartbeat
// for more than LostTime, and the hosts with a Fence by a caller that are Unresponsive. A host that was evicted or
// banned is lost only if it has a Fence by a caller: it sends no heartbeats although it runs, and its agent may have
// ended, so that nothing powers its VMs off. The result is empty on members other than the leader.
func (s *Service) Lost() (lost []cloud.NodeID, err error) {
	confirmed, excluded := map[cloud.NodeID]bool{}, map[cloud.NodeID]bool{}
	if err := s.opts.Store.Local(func(v *store.View) (err error) {
		byHand, _, err := fences.List(v, 0)
		if err != nil {
			return err
		}
		for _, r := range byHand {
			confirmed[cloud.NodeID(r.Path[0])] = r.Value.Confirmed
		}
		evicted, _, err := evictions.List(v, 0)
		if err != nil {
			return err
		}
		for _, r := range evicted {
			excluded[cloud.NodeID(r.Path[0])] = true
		}
		banned, _, err := bans.List(v, 0)
		for _, r := range banned {
			excluded[r.Value.Node] = true
		}
		return err
	}); err != nil {
		return nil, err
	}
	for _, c := range s.Fleet() {
		id := c.Node.ID
		if (confirmed[id] || !excluded[id]) && s.isLost(id, confirmed[id]) {
			lost = append(lost, id)
		}
	}
	return lost, nil
}

// isLost reports whether the VMs of a host may get another host because of the host's silence. The parameter confirmed
// is true if a caller has confirmed that the host is off.
func (s *Service) isLost(id cloud.NodeID, confirmed bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	limit := cloud.Time(LostTime)
	if confirmed || mutant.On(mutant.FenceEarly) {
		limit = cloud.HeartbeatTimeout
	}
	return s.silent(id, s.opts.Steady().UnixMilli()) > limit
}

// MoreLost reports whether a host that is not lost yet will be lost within GatherTime, unless it sends a heartbeat. The
// result is false on members other than the leader.
func (s *Service) MoreLost() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Steady().UnixMilli()
	for id := range s.nodes {
		if silence := s.silent(id, now); silence > LostTime-GatherTime && silence <= LostTime {
			return true
		}
	}
	return false
}

// LeaseEnded reports whether the lease of a host has certainly ended, because the host has sent no heartbeat for more
// than LostTime. The host can have been evicted or banned (see Lost). The result is false on members other than the
// leader.
func (s *Service) LeaseEnded(id cloud.NodeID) bool { return s.isLost(id, false) }

// FenceLost records that the lease of a host has ended. It does nothing if the host has a Fence record. It returns
// false if the host is not lost (see Lost), and therefore not fenced.
func (s *Service) FenceLost(ctx context.Context, id cloud.NodeID) (fenced bool, err error) {
	err = s.writeFence(ctx, id, func() bool { return s.isLost(id, false) }, func(tx *store.Tx) error {
		fenced = true
		return putFence(tx, id, &Fence{At: tx.Now()})
	})
	return fenced, err
}

type fenceRequest struct{ Node cloud.NodeID }

var fenceCommand = leader.NewCommand("node.fence", leader.Repeatable, (*Service).fenceOnLeader)

// FenceByHand records that an Unresponsive host is off, as the caller has confirmed, and returns how many VMs are placed
// on the host. The caller must already be authorized. Without confirmed it returns InvalidArgument. It returns
// FailedPrecondition with ReasonAnswers if the host is not Unresponsive.
func (s *Service) FenceByHand(ctx context.Context, id cloud.NodeID, confirmed bool) (vms int, err error) {
	if err := cloud.CheckUUID("node_id", string(id)); err != nil {
		return 0, err
	}
	if !confirmed {
		return 0, fault.Invalid("confirmed_off", "must be true: make sure that the host is off, or that it cannot run its VMs")
	}
	return fenceCommand.Call(ctx, s.opts.Commands, fenceRequest{id})
}

func (s *Service) fenceOnLeader(ctx context.Context, q fenceRequest) (vms int, err error) {
	if _, err := s.get(ctx, q.Node); err != nil {
		return 0, err
	}
	by := auth.CallerOf(ctx).Name()
	written := false
	err = s.writeFence(ctx, q.Node, func() bool { return s.Unresponsive(q.Node) }, func(tx *store.Tx) error {
		written = true
		placed, _, err := PlacedVMs.List(tx, 0, string(q.Node))
		if err != nil {
			return err
		}
		vms = 0
		for _, r := range placed {
			if !r.Value.Gone {
				vms++
			}
		}
		return putFence(tx, q.Node, &Fence{At: tx.Now(), Confirmed: true, By: by})
	})
	if err == nil && !written {
		return 0, fault.New(fault.FailedPrecondition, "node %s has sent a heartbeat in the last %d seconds, or the leader has not led for so long yet: "+
			"a host that answers cannot be fenced", q.Node, cloud.HeartbeatTimeout/1000).WithReason(ReasonAnswers)
	}
	return vms, err
}

// putFence writes the Fence record of a host. A record by a caller replaces one because of the lease, because it needs
// less time without heartbeats.
func putFence(tx *store.Tx, id cloud.NodeID, f *Fence) error {
	have, err := fences.Get(tx, string(id))
	if err != nil || have != nil && (have.Confirmed || !f.Confirmed) {
		return err
	}
	if known, err := Nodes.Has(tx, string(id)); err != nil || !known {
		return err
	}
	fences.Put(tx, f, string(id))
	return nil
}

// writeFence calls write in a transaction, if allowed returns true. From before the call of allowed until the result of
// the transaction is known, this member acknowledges no heartbeat of the host. If the transaction fails, its entry may
// still be committed later: writeFence then waits until all earlier entries are committed, or this member no longer
// leads.
func (s *Service) writeFence(ctx context.Context, id cloud.NodeID, allowed func() bool, write func(*store.Tx) error) error {
	if !s.fencings.begin(id) {
		return fault.New(fault.Unavailable, "the fence of node %s is being recorded", id)
	}
	defer s.fencings.end(id)
	if !allowed() {
		return nil
	}
	_, err := s.opts.Store.Update(ctx, write)
	for err != nil {
		attempt, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		barrier := s.opts.Store.Barrier(attempt)
		cancel()
		if leader, _ := s.opts.Leadership.Leader(); barrier == nil || leader != s.opts.Self {
			break
		}
	}
	return err
}

// removeFence removes the Fence record of a host whose heartbeat is about to be acknowledged.
func (s *Service) removeFence(ctx context.Context, id cloud.NodeID) error {
	var has bool
	if err := s.opts.Store.Local(func(v *store.View) (err error) {
		has, err = fences.Has(v, string(id))
		return err
	}); err != nil || !has {
		return err
	}
	s.opts.Log.Info("a fenced host answers again", "node", id)
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		fences.Delete(tx, string(id))
		return nil
	})
	return err
}
