// Package reconcile brings every VM of this host to its desired state. Each VM has a goroutine that observes the VM,
// executes the next step, and repeats until there is nothing to do.
//
// It does not depend on QEMU, disks or the network: a [Reconciled] decides which step is next and executes it. The
// package decides when a step is executed.
//
// # Rules
//
//   - There is no queue: a VM's goroutine reads the newest desired state before every step.
//   - A step that failed is repeated after a pause that doubles up to [lastPause]. Only a new desired state ends the
//     pause early. A change of the VM leads to a new observation, but not to an earlier attempt.
//   - The numbers of concurrent builds and of concurrent launches are limited separately. Other steps are not limited.
//     A step in progress is cancelled only if the VM is to be removed, or the agent stops.
//   - A VM without desired state is observed and reported only. It is destroyed only if the control plane requests
//     that: by a desired state, or by releasing the VM.
//   - A desired state that was stored on disk may be outdated, so it never destroys a VM.
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

// Reconciled is one VM on this host, with or without desired state. Only one goroutine at a time calls its methods.
type Reconciled interface {
	// Next is called before every step, and after every change of the VM or its desired state. It observes the VM and
	// returns the next step towards the desired state want, which is nil if the VM has none. Next must be quick and
	// must not change the VM. An error means that the observation failed.
	Next(ctx context.Context, want *agentv1.AssignedVm) (Step, error)
	// Changed returns a channel that receives a value when the VM has changed without a step, for example when its
	// process ended.
	Changed() <-chan struct{}
	// Close releases the agent's resources for the VM. The VM continues to run.
	Close()
}

// Step is the result of an observation: what to report, and what to do next.
type Step struct {
	// Name is the name of the step, for the log.
	Name string
	// Do executes the step. It is nil if there is no step to execute now.
	Do func(context.Context) error
	// Weight selects the limit of concurrent steps that applies to Do.
	Weight Weight
	// Wait is the time until the next observation if Do is nil. 0 means that the VM is observed again only after a
	// change.
	Wait time.Duration
	// Observation is passed to Options.Report.
	Observation cloud.Observation
	// Note is a warning for the host's operator, or "". It is logged when it differs from the last one.
	Note string
	// Gone means that this host has no process, file or control group of the VM.
	Gone bool
}

// Weight is the kind of load that a step causes. It selects the limit of concurrent steps.
type Weight uint8

const (
	Light  Weight = iota // not limited
	Launch               // starts a process
	Build                // copies bytes
	weights
)

// Options are the dependencies of a Loop. All are required.
type Options struct {
	// Open returns the VM with that id. It does not access the host.
	Open func(cloud.VMID) Reconciled
	// Report is called with every observation, changed or not.
	Report func(cloud.Observation)
	// Removed is called when the Loop has removed a VM, because nothing of the VM is left on the host.
	Removed func(cloud.VMID)
	Log     *slog.Logger
	// Launches and Builds are the maximum numbers of concurrent steps with the weights Launch and Build.
	Launches, Builds int
}

// Loop runs a goroutine for each VM.
type Loop struct {
	o       Options
	ctx     context.Context
	stop    context.CancelFunc
	gates   [weights]chan struct{} // a slot for each concurrent step; nil means no limit
	running sync.WaitGroup

	mu  sync.Mutex // guards vms, and the last four fields of each vm
	vms map[cloud.VMID]*vm
}

// New returns a Loop without VMs.
func New(o Options) *Loop {
	l := &Loop{o: o, vms: map[cloud.VMID]*vm{}}
	l.ctx, l.stop = context.WithCancel(context.Background())
	l.gates[Launch] = make(chan struct{}, o.Launches)
	l.gates[Build] = make(chan struct{}, o.Builds)
	return l
}

// Close cancels the steps in progress, stops all goroutines and waits for them. The VMs continue to run.
func (l *Loop) Close() {
	l.stop()
	l.running.Wait()
}

// Adopt adds VMs that exist on the host, without desired state. It returns when each has been observed and reported, or
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
		case <-v.observed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Present returns the ids of the VMs that exist on the host or are being created.
func (l *Loop) Present() []cloud.VMID {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.vms))
}

// Assign sets the desired states of all VMs to those of the newest complete assignment. VMs whose ids are in released
// are destroyed and removed. If stored is true, the assignment was read from disk and may be outdated, so that it
// destroys no VM. Assign does not block.
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
			// An earlier assignment released this VM. It keeps the desired state DESTROYED until nothing of it is left.
		default:
			v.setDesired(nil, false)
		}
	}
}

// ObserveAll makes every VM be observed again, as after a change of the VM.
func (l *Loop) ObserveAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, v := range l.vms {
		v.ring()
	}
}

// get returns the vm with that id. If there is none, it creates one and starts its goroutine. The caller must hold mu.
func (l *Loop) get(id cloud.VMID) *vm {
	v, ok := l.vms[id]
	if !ok {
		v = &vm{id: id, loop: l, wake: make(chan struct{}, 1), observed: make(chan struct{})}
		l.vms[id] = v
		l.running.Go(v.run)
	}
	return v
}

// removesVM reports whether the desired state want ends the VM on this host: DESTROYED or ORPHANED.
func removesVM(want *agentv1.AssignedVm) bool {
	p := want.GetPower()
	return p == agentv1.Power_POWER_DESTROYED || p == agentv1.Power_POWER_ORPHANED
}
