package live

import (
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// leaseCheckEvery is the interval at which an agent compares the lease with the clock.
const leaseCheckEvery = 250 * time.Millisecond

// beginSession is called when a member has accepted a session, before the first heartbeat of the session.
func (a *agent) beginSession() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fresh = false
}

// renewLease is called when a member has acknowledged a heartbeat that was sent at the time sent.
func (a *agent) renewLease(sent time.Time) {
	a.host.mu.Lock()
	defer a.host.mu.Unlock()
	if until := sent.Add(node.LeaseSeconds * time.Second); until.After(a.host.lease) {
		a.host.lease = until
	}
}

// watchLease checks the lease until the agent ends. After the lease has ended, it kills the processes of the VMs that
// must not run without a lease.
func (a *agent) watchLease() {
	for {
		a.host.mu.Lock()
		valid := time.Now().Before(a.host.lease)
		a.host.mu.Unlock()
		a.mu.Lock()
		before := a.leaseEnded
		if !valid {
			a.leaseEnded = true
		} else if a.fresh {
			a.leaseEnded = false
		}
		ended := a.leaseEnded
		if ended != before {
			a.host.f.count("leases that ended or began")
			for _, d := range a.vms {
				d.ring()
			}
		}
		a.mu.Unlock()
		if ended {
			a.host.cutLeased()
		}
		if sleep(a.ctx, leaseCheckEvery) != nil {
			return
		}
	}
}

// cutLeased kills the processes of the VMs that must not run without a lease.
func (h *host) cutLeased() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, g := range h.guests {
		if g.stopsWithLease && g.proc != nil {
			h.ended(id, g, cloud.ExitRequested, "")
		}
	}
}

// makeMovable changes the request for a VM so that the control plane may start the VM on another host: its only disks
// are volumes in common storage.
func (t *tenantClient) makeMovable(w *vm.CreateRequest) {
	w.Spec.Disks = nil
	d, ok := t.randomVolume()
	if ok && slices.ContainsFunc(t.volumes, func(v ownedVolume) bool { return v.movable && v.id == d.Volume }) {
		w.Spec.Disks = append(w.Spec.Disks, d)
	}
	if w.Metadata == nil {
		w.Metadata = map[string]string{}
	}
	w.Metadata[cloud.HighAvailability] = "restart"
}

// guardDelay is how long after the end of the lease the guard process of a host kills VMs.
const guardDelay = 3 * time.Second

// leaseGrace is the maximum time for which a VM may run after the lease of its host has ended: the delay of the guard
// process, the interval of its checks, and one second.
const leaseGrace = guardDelay + 2*time.Second

// runner is a VM on a host.
type runner struct {
	host *host
	vm   cloud.VMID
}

// unleased returns the VMs that run although they need a lease and the host has none at the time now.
func (h *host) unleased(now time.Time) (out []cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !now.After(h.lease) {
		return nil
	}
	for id, g := range h.guests {
		if g.stopsWithLease && g.proc != nil {
			out = append(out, id)
		}
	}
	return out
}

// runsUnleased reports whether unleased returns the VM.
func (h *host) runsUnleased(id cloud.VMID, now time.Time) bool {
	return slices.Contains(h.unleased(now), id)
}

// leaseValid reports whether the host has a lease.
func (h *host) leaseValid() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Now().Before(h.lease)
}

// guardLease kills the processes of VMs that must not run without a lease, also while no agent runs. It returns at the
// end of the simulation.
func (h *host) guardLease() {
	for !h.f.ended() {
		h.mu.Lock()
		ended := time.Now().After(h.lease.Add(guardDelay))
		h.mu.Unlock()
		if ended {
			h.cutLeased()
		}
		time.Sleep(time.Second)
	}
}
