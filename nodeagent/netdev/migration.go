package netdev

import (
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Migrations sets the LooseTCP field of VPCs for a limited time after a live migration, so that the TCP connections of
// the migrated VM continue. Its methods may be called concurrently.
//
// The times are kept in memory only, so a restart of the agent ends all windows. Connections that have sent a packet
// within the window have conntrack entries, and continue after it.
type Migrations struct {
	window time.Duration
	now    func() time.Time

	mu   sync.Mutex // guards ends
	ends map[cloud.VPCID]time.Time
}

// NewMigrations returns Migrations that set LooseTCP for the given time. now returns the time, such as time.Now. With a
// window of 0, LooseTCP is never set.
func NewMigrations(window time.Duration, now func() time.Time) *Migrations {
	return &Migrations{window: window, now: now, ends: map[cloud.VPCID]time.Time{}}
}

// Bound records that a live migration has just bound a port of the VPC to this host. The caller applies the VPC after
// it, and before the VM resumes.
func (m *Migrations) Bound(id cloud.VPCID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ends[id] = m.now().Add(m.window)
}

// Set sets vpc.LooseTCP. While LooseTCP is true, Set returns the time until the caller must call Set and apply the VPC
// again; otherwise it returns 0.
func (m *Migrations) Set(vpc *cloud.HostVPC) (again time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	vpc.LooseTCP = false
	end, recorded := m.ends[vpc.ID]
	if !recorded {
		return 0
	}
	left := end.Sub(m.now())
	if left <= 0 && !mutant.On(mutant.LooseForever) {
		delete(m.ends, vpc.ID)
		return 0
	}
	vpc.LooseTCP = true
	return left
}
