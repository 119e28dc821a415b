package node

import (
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// placement holds the index in which Place searches. It has the hosts of Service.nodes, and is changed with that map. Its
// mutex is separate from Service.mu, because a search calls Request.Check, which reads records.
type placement struct {
	mu    sync.RWMutex
	index *schedule.Index
}

// Place chooses a host for a VM. It sets r.Now. The result is based on the leader's copy of the hosts' records, which can
// be older than the records: the caller must check the chosen host in its transaction. On members other than the leader
// no host fits, and Refused is empty.
func (s *Service) Place(r *schedule.Request) schedule.Decision {
	r.Now = s.opts.Steady().UnixMilli()
	s.placement.mu.RLock()
	defer s.placement.mu.RUnlock()
	return s.placement.index.Place(r)
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
