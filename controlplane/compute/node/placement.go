package node

import (
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// placement holds the index in which Place searches. The index has the hosts of Service.nodes, and is changed together
// with that map. It has its own mutex, because a search calls Request.Check, which reads records. Request.Check must
// not lock Service.mu, because goroutines that hold Service.mu wait for this mutex.
type placement struct {
	mu    sync.RWMutex
	index *schedule.Index
}

// Place chooses a host for a VM. It sets r.Now. The result is based on the leader's copy of the hosts' records. This
// copy can be older than the records, so the caller must check the chosen host in its transaction. On other members
// than the leader the copy is empty: Node and Refused of the result are empty.
func (s *Service) Place(r *schedule.Request) schedule.Decision {
	r.Now = s.opts.Steady().UnixMilli()
	s.placement.mu.RLock()
	defer s.placement.mu.RUnlock()
	return s.placement.index.Place(r)
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

func (p *placement) put(n *cloud.Node, lastSeen cloud.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index.Put(n, lastSeen)
}

func (p *placement) seen(id cloud.NodeID, at cloud.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index.Seen(id, at)
}

func (p *placement) remove(id cloud.NodeID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index.Remove(id)
}

func (p *placement) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index.Clear()
}
