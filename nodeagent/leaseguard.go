package main

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/lease"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// leaseCheckEvery is the interval at which the lease is compared with the clock.
const leaseCheckEvery = 250 * time.Millisecond

// leaseGuard powers off the VMs that must not run without a lease. After the lease has ended, such VMs may not be
// started until two things have happened in one session with a member: a heartbeat was acknowledged, and the complete
// assignment has arrived. An older assignment may have VMs that run on other hosts by now.
type leaseGuard struct {
	valid func() bool
	// set tells the VMs whether they may run. kill ends the processes of those that may not.
	set  func(ended bool)
	kill func(context.Context)
	log  *slog.Logger

	mu sync.Mutex
	// ended is true from the end of the lease until VMs may be started again. current is true if the assignment of the
	// present session has arrived.
	ended, current bool
}

func newLeaseGuard(l *lease.Lease, set func(bool), kill func(context.Context), log *slog.Logger) *leaseGuard {
	g := &leaseGuard{valid: l.Valid, set: set, kill: kill, log: log}
	g.check()
	return g
}

// connected is called when a member has accepted a session, before the first heartbeat of the session.
func (g *leaseGuard) connected() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.current = false
}

// assigned is called when the VMs have received a complete assignment from a member.
func (g *leaseGuard) assigned() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.current = true
}

// check compares the lease with the clock, and returns whether VMs that need a lease must be off.
func (g *leaseGuard) check() (ended bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.ended
	switch {
	case !g.valid() && !mutant.On(mutant.RunWithoutLease):
		g.ended = true
	case g.current || mutant.On(mutant.StartStaleAssignment):
		g.ended = false
	}
	if g.ended != before {
		g.log.Info("VMs that the control plane may start on other hosts may run here", "may", !g.ended)
	}
	g.set(g.ended)
	return g.ended
}

// run checks the lease until ctx ends. While VMs must be off, it kills their processes in each interval, because a start
// that was in progress may have launched another process.
func (g *leaseGuard) run(ctx context.Context) error {
	return every(ctx, leaseCheckEvery, func() {
		if g.check() {
			g.kill(ctx)
		}
	})
}
