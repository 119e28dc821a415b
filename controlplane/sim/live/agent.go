package live

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// agent is one run of the agent process on a simulated host. It brings each VM to its desired state and reports the
// observed state to a member.
type agent struct {
	host   *host
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
	levels *levels

	mu       sync.Mutex
	assigned map[cloud.VMID]*agentv1.AssignedVm // the last complete assignment from a member; nil before the first
	vms      map[cloud.VMID]*driven
	volumes  map[cloud.VolumeID]*agentv1.AssignedVolume // the volumes in the last complete assignment from a member
	ended    bool
	// leaseEnded is true after the lease of the host has ended, until the lease was renewed and the assignment of the
	// same session has arrived. fresh is true if the assignment of the present session has arrived.
	leaseEnded, fresh bool
}

// driven is the agent's state for one VM. Two fields are guarded by the agent's mutex; the others are used only by the
// VM's goroutine, which executes the method drive.
type driven struct {
	host *host
	id   cloud.VMID
	wake chan struct{}

	want     *agentv1.AssignedVm // the desired state, guarded by the agent's mu; nil: no member has assigned the VM
	released bool                // a member released the VM, so it is to be destroyed; guarded by the agent's mu

	offAt, pressedAt, rebootAt time.Time

	// leaseEnded is the agent's leaseEnded at the last check of the VM.
	leaseEnded bool
}

func newAgent(h *host) *agent {
	a := &agent{host: h, levels: newLevels(), vms: map[cloud.VMID]*driven{}}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	return a
}

// start starts one goroutine per VM on the host, and one goroutine that keeps a connection to a member.
func (a *agent) start() {
	a.host.f.trace.Add("%s: an agent starts", a.host.name)
	a.work.Go(func() {
		a.mu.Lock()
		for _, id := range a.host.present() {
			a.get(id)
		}
		a.mu.Unlock()
		a.keepSession()
	})
	a.work.Go(a.useStored)
	a.work.Go(a.watchLease)
}

// stop ends the agent, and waits until all its goroutines have ended.
func (a *agent) stop() {
	a.mu.Lock()
	a.ended = true
	a.mu.Unlock()
	a.cancel()
	a.work.Wait()
}

// endAgent ends the agent a, unless it has been replaced by another one since.
func (h *host) endAgent(a *agent) {
	h.mu.Lock()
	if h.agent != a {
		h.mu.Unlock()
		return
	}
	h.agent, h.changed = nil, nil
	h.mu.Unlock()
	h.f.trace.Add("%s: its agent ends", h.name)
	a.stop()
}

// happened wakes the goroutine of a VM. The host calls it when the VM's process has ended.
func (a *agent) happened(id cloud.VMID) {
	a.host.f.behind.Go(func() { // in the background, because the caller has locked the host's mu
		a.mu.Lock()
		defer a.mu.Unlock()
		if d := a.vms[id]; d != nil {
			d.ring()
		}
	})
}

func (d *driven) ring() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// get returns the agent's state for a VM. If there is none, get creates it and starts the VM's goroutine. After the
// agent has ended, nothing is created, and the result may be nil. The caller must hold a.mu.
func (a *agent) get(id cloud.VMID) *driven {
	d := a.vms[id]
	if d == nil && !a.ended {
		d = &driven{host: a.host, id: id, wake: make(chan struct{}, 1)}
		a.vms[id] = d
		a.work.Go(func() { a.drive(d) })
	}
	return d
}

// useStored waits 30 seconds. If no member has sent an assignment by then, it applies the assignment that is stored on
// the host's disk. It leaves out VMs that the stored assignment would destroy or orphan.
func (a *agent) useStored() {
	if sleep(a.ctx, 30*time.Second) != nil {
		return
	}
	a.host.mu.Lock()
	stored := maps.Clone(a.host.stored)
	a.host.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.assigned != nil || stored == nil {
		return
	}
	a.host.f.trace.Add("%s goes by its stored assignment", a.host.name)
	maps.DeleteFunc(stored, func(_ cloud.VMID, want *agentv1.AssignedVm) bool {
		return want.GetPower() == agentv1.Power_POWER_DESTROYED || want.GetPower() == agentv1.Power_POWER_ORPHANED
	})
	a.assign(stored, nil)
}

// take stores a member's complete assignment on the host's disk and applies it.
func (a *agent) take(vms map[cloud.VMID]*agentv1.AssignedVm, released []cloud.VMID) {
	a.host.mu.Lock()
	a.host.stored = maps.Clone(vms)
	a.host.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.assigned, a.fresh = vms, true
	a.assign(vms, released)
}

// assign sets the desired state of each VM from the map vms. VMs listed in released are to be destroyed. All other VMs
// have no desired state afterwards, except those that were released before and are still being destroyed. The caller
// must hold a.mu.
func (a *agent) assign(vms map[cloud.VMID]*agentv1.AssignedVm, released []cloud.VMID) {
	for id, want := range vms {
		if d := a.get(id); d != nil {
			d.want, d.released = want, false
			d.ring()
		}
	}
	for id, d := range a.vms {
		_, assigned := vms[id]
		switch {
		case assigned:
		case slices.Contains(released, id):
			d.want = &agentv1.AssignedVm{VmId: string(id), Generation: d.want.GetGeneration(), Power: agentv1.Power_POWER_DESTROYED}
			d.released = true
			d.ring()
		case !d.released:
			d.want = nil
			d.ring()
		}
	}
}

// drive runs in the VM's goroutine. It repeatedly inspects the VM, reports the observation, and executes the next
// action. It returns when the VM is neither on the host nor assigned to it, or when the agent ends.
func (a *agent) drive(d *driven) {
	for a.ctx.Err() == nil {
		a.mu.Lock()
		want, released := d.want, d.released
		d.leaseEnded = a.leaseEnded
		a.mu.Unlock()
		if want.GetPower() != agentv1.Power_POWER_OFF {
			d.offAt = time.Time{}
		}
		g := a.host.look(d.id)
		if g == nil && (released || want == nil) && a.forget(d) {
			return
		}
		p := d.decide(want, g)
		a.levels.observe(observation(d.id, want, g, p))
		if p.act != nil {
			if sleep(a.ctx, a.host.between(p.least, p.most)) != nil {
				return
			}
			p.act()
			continue
		}
		if p.wait == 0 {
			p.wait = time.Hour
		}
		late := time.NewTimer(p.wait)
		select {
		case <-d.wake:
		case <-late.C:
		case <-a.ctx.Done():
		}
		late.Stop()
	}
}

// forget removes the agent's state for a VM that is not on the host. If a member has assigned the VM in the meantime,
// forget changes nothing and returns false.
func (a *agent) forget(d *driven) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if d.want != nil && !d.released {
		return false
	}
	delete(a.vms, d.id)
	a.levels.forget(d.id)
	return true
}

// present returns the IDs of all VMs that the agent manages: those on the host and those assigned to it.
func (a *agent) present() []cloud.VMID {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.vms))
}

// observation builds the report of a VM for the members: the generation, the action counters, the state in the plan,
// and the process.
func observation(id cloud.VMID, want *agentv1.AssignedVm, g *guest, p plan) cloud.Observation {
	o := cloud.Observation{VM: id, Generation: want.GetGeneration(), Observed: p.seen, Exit: p.exit, LastError: p.error}
	if g == nil {
		return o
	}
	o.StartsDone, o.RebootsDone, o.ResetsDone = g.startsDone, g.rebootsDone, g.resetsDone
	o.StopsWithLease = g.stopsWithLease
	o.Migration = g.migrationOf()
	if g.proc != nil {
		o.PID, o.StartedAt = g.proc.pid, g.proc.since.UnixMilli()
		for _, id := range slices.Sorted(maps.Keys(g.proc.nics)) {
			o.NICs = append(o.NICs, cloud.NICObservation{ID: id, Attached: true})
		}
		o.Disks = g.proc.diskObservations(want)
		if g.proc.up {
			o.Usage = &cloud.Usage{MemoryMiB: 1}
		}
	}
	return o
}

// levels holds the newest observation of each VM. The set dirty has the VMs whose newest observation was not sent yet.
type levels struct {
	mu     sync.Mutex
	newest map[cloud.VMID]cloud.Observation
	dirty  map[cloud.VMID]bool
	wake   chan struct{}
}

func newLevels() *levels {
	return &levels{newest: map[cloud.VMID]cloud.Observation{}, dirty: map[cloud.VMID]bool{}, wake: make(chan struct{}, 1)}
}

func (l *levels) observe(o cloud.Observation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.newest[o.VM], l.dirty[o.VM] = o, true
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *levels) forget(id cloud.VMID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.newest, id)
	delete(l.dirty, id)
}

// take returns observations to send, and marks them as sent. If everything is true, it returns the newest observation
// of each VM. Otherwise it returns only those that were not sent yet.
func (l *levels) take(everything bool) (out []cloud.Observation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(l.newest)) {
		if everything || l.dirty[id] {
			out = append(out, l.newest[id])
		}
	}
	clear(l.dirty)
	return out
}
