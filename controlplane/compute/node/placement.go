package node

import (
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// placement holds the index in which Place searches. The index has the hosts of Service.nodes. A search can take long,
// because it calls Request.Check, which reads records. Heartbeats must not wait for it. So a change of a host is only
// queued in pending, and the next Place applies it to the index.
type placement struct {
	// mu guards index. Goroutines that hold Service.mu must not lock it.
	mu    sync.RWMutex
	index *schedule.Index

	// changing guards pending and cleared. It is held for short times only.
	changing sync.Mutex
	// pending holds the queued changes by host ID. If cleared is set, all hosts are removed from the index before the
	// changes are applied.
	pending map[cloud.NodeID]hostChange
	cleared bool
}

// hostChange is a change of one host in the index. If node is nil, only the time of its last heartbeat has changed, or
// the host is removed.
type hostChange struct {
	node     *cloud.Node
	lastSeen cloud.Time
	removed  bool
}

func newPlacement() placement {
	return placement{index: schedule.NewIndex(), pending: map[cloud.NodeID]hostChange{}}
}

// Place chooses a host for a VM. It sets r.Now. The result is based on the leader's copy of the hosts' records. This
// copy can be older than the records, so the caller must check the chosen host in its transaction. On other members
// than the leader the copy is empty: Node and Refused of the result are empty.
func (s *Service) Place(r *schedule.Request) schedule.Decision {
	r.Now = s.opts.Steady().UnixMilli()
	s.placement.apply()
	s.placement.mu.RLock()
	defer s.placement.mu.RUnlock()
	return s.placement.index.Place(r)
}

// BaselineCPU returns the CPU model for VMs of an architecture that request none (cloud.BaselineCPU). If arch is
// unspecified, it must be offered by the hosts of all architectures. It returns "" on other members than the leader.
func (s *Service) BaselineCPU(arch cloud.Architecture) string {
	s.placement.apply()
	s.placement.mu.RLock()
	defer s.placement.mu.RUnlock()
	return s.placement.index.BaselineCPU(arch)
}

// apply applies the queued changes to the index. It waits for the searches in progress, unless there are no changes.
func (p *placement) apply() {
	p.changing.Lock()
	unchanged := len(p.pending) == 0 && !p.cleared
	p.changing.Unlock()
	if unchanged {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changing.Lock()
	pending, cleared := p.pending, p.cleared
	p.pending, p.cleared = map[cloud.NodeID]hostChange{}, false
	p.changing.Unlock()
	if cleared {
		p.index.Clear()
	}
	for id, c := range pending {
		switch {
		case c.removed:
			p.index.Remove(id)
		case c.node != nil:
			p.index.Put(c.node, c.lastSeen)
		default:
			p.index.Seen(id, c.lastSeen)
		}
	}
}

// Snapshot returns the hosts in the records of v with the times of their last heartbeats, and the time now. It returns
// Unavailable if this member does not lead.
func (s *Service) Snapshot(v *store.View) (hosts []schedule.SnapshotHost, now cloud.Time, err error) {
	all, _, err := Nodes.List(v, 0)
	if err != nil {
		return nil, 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.termStart == 0 {
		return nil, 0, fault.New(fault.Unavailable, "this member does not lead").MayRetry()
	}
	for _, r := range all {
		hosts = append(hosts, schedule.SnapshotHost{Node: *r.Value, LastSeen: s.lastHeartbeat[r.Value.ID]})
	}
	return hosts, s.opts.Steady().UnixMilli(), nil
}

// Leads reports whether this member leads and has read the hosts' records.
func (s *Service) Leads() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.termStart != 0
}

// put queues that the host n is new or has changed. The caller must not change n afterwards.
func (p *placement) put(n *cloud.Node, lastSeen cloud.Time) {
	p.changing.Lock()
	defer p.changing.Unlock()
	p.pending[n.ID] = hostChange{node: n, lastSeen: lastSeen}
}

// seen queues the time of a host's last heartbeat.
func (p *placement) seen(id cloud.NodeID, at cloud.Time) {
	p.changing.Lock()
	defer p.changing.Unlock()
	c := p.pending[id]
	c.lastSeen = at
	p.pending[id] = c
}

// remove queues the removal of a host.
func (p *placement) remove(id cloud.NodeID) {
	p.changing.Lock()
	defer p.changing.Unlock()
	p.pending[id] = hostChange{removed: true}
}

// clear queues the removal of all hosts.
func (p *placement) clear() {
	p.changing.Lock()
	defer p.changing.Unlock()
	clear(p.pending)
	p.cleared = true
}
