package vpc

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// worker applies one VPC, in a goroutine of its own that ends when the VPC was removed from the host.
type worker struct {
	id    cloud.VPCID
	wakes chan struct{} // capacity 1
	// busy has an element while the kernel's state of the VPC is being changed.
	busy chan struct{}

	// The fields below are guarded by Networks.mu.
	asked uint64 // the newest update that touched the VPC
	since uint64 // the oldest update that is not applied; 0 if all are
	// inForce is the last state that was applied without an error. It is nil if there is none, or if the VPC is being
	// removed. ports and addrs are its ports on this host.
	inForce *wanted
	ports   map[cloud.PortID]bool
	addrs   map[netip.Addr]*place
	rules   int
	// reports are the results of health checks that differ from the records.
	reports []cloud.BackendHealth
	err     error         // of the last attempt, or the problems of the state that it applied
	applied bool          // the last attempt succeeded, perhaps with problems
	suspect bool          // the next attempt must read the kernel's state, because something else has changed it
	took    time.Duration // of the last attempt that succeeded
	// counters are the counters of the packet filter that measure has read last. It is nil before the first time.
	counters *firewall.Counters

	// Only the worker uses the fields below: the time at which measure last read the counters, and the time at which
	// the last attempt that verified the kernel's state began.
	measured, verified time.Time
	again              time.Duration // time until the VPC must be applied again because of a migration, or 0
}

// place is a port on this host with its subnet.
type place struct {
	subnet *cloud.HostSubnet
	port   *cloud.HostPort
	// guest is the description of the port's guest that was rendered last, or nil.
	guest atomic.Pointer[guest]
}

// wake makes the worker of a VPC apply it, and starts a worker if there is none. The caller holds mu.
func (n *Networks) wake(id cloud.VPCID, seq uint64) {
	w := n.workers[id]
	if w == nil {
		w = &worker{id: id, wakes: make(chan struct{}, 1), busy: make(chan struct{}, 1)}
		n.workers[id] = w
		n.done.Go(func() { n.run(w) })
	}
	w.asked = seq
	if w.since == 0 {
		w.since = seq
	}
	select {
	case w.wakes <- struct{}{}:
	default:
	}
}

// run applies the VPC whenever it is woken, after a failure, and every Options.resync, until the VPC was removed or
// Close is called. Wakes do not delay the resync.
func (n *Networks) run(w *worker) {
	pauses := retries.Start()
	timer := time.NewTimer(n.o.resync)
	defer timer.Stop()
	for {
		resync := false
		select {
		case <-w.wakes:
		case <-timer.C:
			resync = true
		case <-n.ctx.Done():
			return
		}
		removed, err := n.attempt(w, resync)
		switch {
		case removed || n.ctx.Err() != nil:
			return
		case err != nil:
			timer.Reset(pauses.NextBackOff())
		default:
			pauses.Reset()
			n.measure(w)
			next := time.Until(w.verified.Add(n.o.resync))
			if w.again > 0 {
				next = min(next, w.again)
			}
			timer.Reset(next)
		}
	}
}

// attempt applies the newest state of the VPC once. It returns true if the VPC was removed and the worker has ended.
func (n *Networks) attempt(w *worker, resync bool) (removed bool, err error) {
	select {
	case n.slots <- struct{}{}:
		defer func() { <-n.slots }()
	case <-n.ctx.Done():
		return false, nil
	}
	w.busy <- struct{}{}
	defer func() { <-w.busy }()

	started := time.Now()
	last := n.trusted(w, resync, started)
	n.mu.RLock()
	want, exists := n.tables.hostVPC(w.id, n.o.VTEP)
	want.Withhold = n.contact.withdrawn
	if want.Moving {
		n.migrations.Bound(w.id)
	}
	w.again = n.migrations.Set(&want.HostVPC)
	reports := judge(&want, n.verdicts(w.id))
	unusable := n.tables.unusable(w.id)
	seq := w.asked
	// Writes are a repair if the same state was in force before.
	settled := resync && w.since == 0 && w.applied && w.inForce != nil &&
		reflect.DeepEqual(w.inForce.Services, want.Services) // the health of backends may have changed
	n.mu.RUnlock()

	var writes []string
	switch {
	case exists:
		writes, err = n.plane.apply(n.ctx, &want, last)
	case unusable != nil:
		err = unusable
	default:
		n.setInForce(w, nil)
		n.checker.Set(n.plane.path(w.id), nil)
		err = n.plane.remove(n.ctx, w.id)
	}
	if n.ctx.Err() != nil {
		return false, nil
	}
	if exists && err == nil {
		n.checker.Set(n.plane.path(w.id), targets(&want))
	}
	if last == nil {
		w.verified = started
	}
	r := result{
		want: want, exists: exists, reports: reports, err: err, writes: writes, repair: settled, took: time.Since(started),
	}
	return n.finish(w, seq, &r), err
}

// trusted returns the state in force if the worker may assume that the kernel has it. It returns nil if the kernel's
// state must be read: at the first attempt, after a failure, if something else has changed the state, and at a resync,
// even one that frequent wakes have delayed.
func (n *Networks) trusted(w *worker, resync bool, now time.Time) *wanted {
	n.mu.Lock()
	defer n.mu.Unlock()
	verify := resync || w.suspect || !w.applied || now.Sub(w.verified) >= n.o.resync
	w.suspect = false
	if verify {
		return nil
	}
	return w.inForce
}

// result is the outcome of an attempt.
type result struct {
	want    wanted
	exists  bool
	reports []cloud.BackendHealth
	err     error
	writes  []string
	repair  bool
	took    time.Duration
}

// finish records the outcome of an attempt that began after the update seq. It returns true if the worker ended.
func (n *Networks) finish(w *worker, seq uint64, r *result) (removed bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	last := w.err
	w.err, w.applied, w.reports = r.err, r.err == nil, r.reports
	if r.err == nil && len(r.want.Problems) > 0 {
		w.err = errors.New(strings.Join(r.want.Problems, "; "))
	}
	if w.err != nil && (last == nil || last.Error() != w.err.Error()) {
		n.o.Log.Warn("cannot apply a VPC completely", "vpc", w.id, "err", w.err)
	}
	if w.err == nil && last != nil {
		n.o.Log.Info("a VPC is applied again", "vpc", w.id)
	}
	switch {
	case r.err != nil:
		n.counts.Failures++
	case r.exists:
		n.counts.Applied++
		n.counts.ApplyTime += r.took
		w.took = r.took
		w.setInForce(&r.want)
		delete(n.restored, w.id)
		n.markUnsaved(w.id)
		if r.repair && len(r.writes) > 0 {
			n.counts.Repairs++
			n.o.Log.Warn("repaired a VPC whose state in the kernel had been changed", "vpc", w.id, "writes", r.writes)
		}
	}
	n.counts.Writes += uint64(len(r.writes))
	if w.asked <= seq {
		w.since = 0
	} else {
		w.since = seq + 1 // later updates of this VPC follow, the first of them not before seq+1
	}
	if !r.exists && r.err == nil && w.since == 0 {
		delete(n.workers, w.id)
		removed = true
	}
	close(n.changed)
	n.changed = make(chan struct{})
	n.acknowledge()
	n.report()
	return removed
}

func (n *Networks) setInForce(w *worker, want *wanted) {
	n.mu.Lock()
	defer n.mu.Unlock()
	w.setInForce(want)
	delete(n.restored, w.id)
	n.markUnsaved(w.id)
}

// setInForce replaces the state in force. The caller holds Networks.mu.
func (w *worker) setInForce(want *wanted) {
	w.inForce, w.ports, w.addrs, w.rules = want, map[cloud.PortID]bool{}, map[netip.Addr]*place{}, 0
	if want == nil {
		return
	}
	for i := range want.Subnets {
		for j := range want.Subnets[i].Ports {
			p := &place{subnet: &want.Subnets[i], port: &want.Subnets[i].Ports[j]}
			w.ports[p.port.ID] = true
			w.addrs[p.port.IP] = p
			if p.port.IP6.IsValid() {
				w.addrs[p.port.IP6] = p
			}
		}
	}
	for i := range want.Groups {
		w.rules += len(want.Groups[i].Rules)
	}
}

// lock waits until nobody changes the kernel's state of the VPC, and returns the function that ends the lock.
func (w *worker) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case w.busy <- struct{}{}:
		return func() { <-w.busy }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
