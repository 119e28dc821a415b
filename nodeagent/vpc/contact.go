package vpc

import (
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// contactInterval is how often the host compares the time of its last contact with the lease.
const contactInterval = 250 * time.Millisecond

// contact records whether the host may answer for the addresses of NAT gateways and of floating IPs of service IPs.
// After cloud.HeartbeatTimeout without a heartbeat, the leader assigns these addresses to other hosts without waiting
// for this host. So this host withdraws them when its lease (cloud.AddressLease), which is shorter, has ended.
//
// When the host has contact again, its records can still assign to it an address that another host has taken over. The
// host answers again only after the snapshot of a connection that was opened after the lease had ended, and only for
// the addresses that this snapshot assigns to it. A snapshot of an older connection can arrive late.
type contact struct {
	watched bool
	// withdrawn is true after the lease has ended, until the host may answer again. ended is when the host noticed the
	// end of the lease. losing is true from this time until the addresses have been withdrawn without an error.
	losing, withdrawn bool
	ended             time.Time
	// snapshot is when the connection of the newest snapshot was opened.
	snapshot time.Time
}

// watchContact withdraws and restores addresses as the contact to the control plane requires, until Close.
func (n *Networks) watchContact(began time.Time) {
	tick := time.NewTicker(contactInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			n.checkContact(began)
		case <-n.ctx.Done():
			return
		}
	}
}

// checkContact compares the time of the last contact with the lease. began is the time from which the lease runs if
// there was no contact yet.
func (n *Networks) checkContact(began time.Time) {
	last, ok := n.o.Contact()
	if !ok {
		last = began
	}
	leased := time.Since(last) < n.o.lease
	n.mu.Lock()
	c := &n.contact
	resume := leased && c.withdrawn && c.snapshot.After(c.ended)
	// A failed withdrawal may be in effect for some addresses. The host repeats the withdrawal until it succeeds, even
	// if there is contact again: until then, package edge answers for no address that another host can take over.
	lose := c.losing || !leased && !c.withdrawn && !mutant.On(mutant.KeepCutOffAddress)
	if lose && !c.losing {
		c.losing, c.ended = true, time.Now()
	}
	n.mu.Unlock()
	switch {
	case lose:
		list, err := n.plane.withdraw(n.ctx)
		if err != nil {
			n.o.Log.Warn("cannot withdraw external addresses that other hosts can take over", "err", err)
			return // the next tick tries again
		}
		n.mu.Lock()
		c.losing, c.withdrawn = false, true
		n.mu.Unlock()
		n.o.Log.Warn("no contact to the control plane: external addresses that other hosts can take over are withdrawn",
			"since", time.Since(last).Round(time.Millisecond), "addresses", list)
	case resume:
		// restore precedes the change of withdrawn: a worker that has computed its wanted state before the change still
		// sets Withhold, and so keeps the addresses withdrawn.
		n.plane.restore()
		n.mu.Lock()
		defer n.mu.Unlock()
		c.withdrawn = false
		for _, w := range n.workers {
			select {
			case w.wakes <- struct{}{}:
			default:
			}
		}
		n.o.Log.Info("contact to the control plane: external addresses that are assigned to this host are answered again")
	}
}
