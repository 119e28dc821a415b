// Package reconcile drives every VM of this host towards what is wanted of it: one goroutine a VM, which looks, does the
// next thing, and looks again until nothing is left to do.
//
// It knows wishes, steps and time; it must not know QEMU, disks or the network. What a step is, and which one is next,
// is a [Reconciled]'s to say.
//
// # Rules
//
//   - The newest wish wins. There is no queue: a VM's goroutine reads the wish afresh before every step.
//   - A step that failed is tried again after a pause that doubles up to [lastPause]; a new wish ends the pause. So does
//     nothing else: what happens by itself leads to a new look, not to a new try.
//   - Steps that build are few at a time, so are launches, and neither waits for the other; everything else goes at once.
//     A step under way is given up only when the VM is to go away, or the agent stops.
//   - A VM that no assignment rules on is looked at and reported, and otherwise left alone. It is destroyed only when the
//     control plane says so: by a wish, or by releasing it.
//   - A wish that comes from the disk may be out of date, so none of that kind destroys anything.
package reconcile

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Reconciled is one VM on this host, wanted or not. Its methods are called by one goroutine at a time.
type Reconciled interface {
	// Next looks at the VM and says what to do towards want; nil is no wish at all. It is quick, and changes nothing.
	// An error means that the look itself failed.
	Next(ctx context.Context, want *agentv1.AssignedVm) (Step, error)
	// Changed is signalled when something happened by itself, such as the end of a process.
	Changed() <-chan struct{}
	// Close lets go of the VM, which goes on as it is.
	Close()
}

// Step is what a look led to.
type Step struct {
	// Name of what Do does, for the log.
	Name string
	// Do brings the VM nearer to the wish; nil when there is nothing to do now.
	Do func(context.Context) error
	// Weight says with how many others Do may run at the same time.
	Weight Weight
	// Wait, without Do, is when to look again; 0: when something happens.
	Wait time.Duration
	// Seen is the report.
	Seen cloud.Observation
	// Note, when set, is for the host's operator: it is logged when it changes.
	Note string
	// Gone means that nothing of the VM is on this host.
	Gone bool
}

// Weight is how heavy a step is.
type Weight uint8

const (
	Light  Weight = iota // no limit
	Launch               // starts a process
	Build                // copies bytes
	weights
)

// Options of a Loop. All are required.
type Options struct {
	// Open gives the machine of a VM. It touches nothing of the host.
	Open func(cloud.VMID) Reconciled
	// Report takes what every look saw, whether it changed or not.
	Report func(cloud.Observation)
	// Forget ends the reports of a VM of which nothing is left.
	Forget func(cloud.VMID)
	Log    *slog.Logger
	// Launches and Builds are how many steps of these weights run at the same time.
	Launches, Builds int
}

// Loop holds the goroutines.
type Loop struct {
	o       Options
	ctx     context.Context
	stop    context.CancelFunc
	gates   [weights]chan struct{} // nil: open
	running sync.WaitGroup

	mu  sync.Mutex // guards vms and, in each, want
	vms map[cloud.VMID]*vm
}

// New makes a loop without VMs.
func New(o Options) *Loop {
	l := &Loop{o: o, vms: map[cloud.VMID]*vm{}}
	l.ctx, l.stop = context.WithCancel(context.Background())
	l.gates[Launch] = make(chan struct{}, o.Launches)
	l.gates[Build] = make(chan struct{}, o.Builds)
	return l
}

// Close stops all goroutines, with the steps under way, and waits for them. The VMs go on as they are.
func (l *Loop) Close() {
	l.stop()
	l.running.Wait()
}

// Adopt takes up VMs that exist on the host, without a wish, and returns when each has been looked at and reported, or
// with the error of ctx.
func (l *Loop) Adopt(ctx context.Context, ids []cloud.VMID) error {
	l.mu.Lock()
	var adopted []*vm
	for _, id := range ids {
		adopted = append(adopted, l.get(id))
	}
	l.mu.Unlock()
	for _, v := range adopted {
		select {
		case <-v.looked:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Present lists the VMs that exist on the host in any form, or are about to.
func (l *Loop) Present() []cloud.VMID {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.vms))
}

// Assign takes the newest assignment, whole. released are VMs that the control plane wants nothing left of. stored means
// that it comes from the disk. It does not block.
func (l *Loop) Assign(vms map[cloud.VMID]*agentv1.AssignedVm, released []cloud.VMID, stored bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, want := range vms {
		if stored && removesVM(want) {
			continue
		}
		l.get(id).setDesired(want, false)
	}
	for id, v := range l.vms {
		_, assigned := vms[id]
		switch {
		case assigned:
		case slices.Contains(released, id) && !stored:
			v.setDesired(&agentv1.AssignedVm{
				VmId: string(id), Generation: v.want.GetGeneration(), Power: agentv1.Power_POWER_DESTROYED,
			}, true)
		case v.released:
			// What was released stays so until nothing is left.
		default:
			v.setDesired(nil, false)
		}
	}
}

// get is the VM of that id, started if need be. mu is held.
func (l *Loop) get(id cloud.VMID) *vm {
	v, ok := l.vms[id]
	if !ok {
		v = &vm{id: id, loop: l, wake: make(chan struct{}, 1), looked: make(chan struct{})}
		l.vms[id] = v
		l.running.Go(v.run)
	}
	return v
}

// removesVM says whether a wish takes the VM away from this host.
func removesVM(want *agentv1.AssignedVm) bool {
	p := want.GetPower()
	return p == agentv1.Power_POWER_DESTROYED || p == agentv1.Power_POWER_ORPHANED
}
