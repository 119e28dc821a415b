package reconcile

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	firstPause = 500 * time.Millisecond
	lastPause  = 30 * time.Second
	// maxRepeats is how often in a row the same step may succeed. The next success counts as a failure, because the
	// step seems to change nothing.
	maxRepeats = 3
)

var errNoProgress = errors.New("the step was repeated and changed nothing")

// vm holds the desired state of one VM, and runs the goroutine that reconciles it.
type vm struct {
	id       cloud.VMID
	loop     *Loop
	wake     chan struct{} // capacity 1
	observed chan struct{} // closed after the first observation

	// loop.mu guards the fields below.
	want       *agentv1.AssignedVm
	released   bool
	change     uint64             // increased with each change of want
	cancelStep context.CancelFunc // cancels the step in progress; nil if there is none
}

// setDesired sets the desired state, and wakes the goroutine if the state has changed. The caller must hold loop.mu.
func (v *vm) setDesired(want *agentv1.AssignedVm, released bool) {
	if v.released == released && (v.want == nil) == (want == nil) && proto.Equal(v.want, want) {
		return
	}
	v.want, v.released = want, released
	v.change++
	if removesVM(want) && v.cancelStep != nil {
		v.cancelStep()
	}
	v.ring()
}

// ring makes the goroutine observe the VM again.
func (v *vm) ring() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// desired returns the newest desired state, and the number of changes of the desired state so far.
func (v *vm) desired() (want *agentv1.AssignedVm, change uint64) {
	v.loop.mu.Lock()
	defer v.loop.mu.Unlock()
	return v.want, v.change
}

// attempts holds the results of the last steps for one desired state.
type attempts struct {
	change uint64    // vm.change at the time of the steps
	fails  int       // number of failures in a row
	again  time.Time // earliest time of the next attempt
	name   string    // name of the last step
	times  int       // how often in a row the step name succeeded
	logged string    // the last error that was logged
}

func (v *vm) run() {
	m := v.loop.o.Open(v.id)
	defer m.Close()
	var t attempts
	var noted string
	for first := true; v.loop.ctx.Err() == nil; first = false {
		want, change := v.desired()
		if change != t.change {
			t = attempts{change: change}
		}
		step, err := m.Next(v.loop.ctx, want)
		if err == nil {
			v.loop.o.Report(step.Observation)
			if noted != step.Note {
				noted = step.Note
				v.loop.o.Log.Warn(cmp.Or(noted, "the last warning about this VM is over"), "vm", v.id, "pid", step.Observation.PID)
			}
		}
		if first {
			close(v.observed)
		}
		if err != nil {
			if v.loop.ctx.Err() != nil {
				return
			}
			if v.failed(&t, "observe", err); !v.sleep(m, max(time.Until(t.again), time.Millisecond)) {
				return
			}
			continue
		}
		if step.Gone && v.removeIfGone(change) {
			return
		}
		pause := step.Wait
		if step.Do != nil {
			if pause = time.Until(t.again); pause <= 0 {
				v.do(m, step, change, &t)
				continue
			}
		}
		if !v.sleep(m, pause) {
			return
		}
	}
}

// do executes a step. If the number of concurrent steps of this weight is limited, do first waits until the step may
// run. If the VM or its desired state changes during this wait, do returns without executing the step.
func (v *vm) do(m Reconciled, step Step, change uint64, t *attempts) {
	gate := v.loop.gates[step.Weight]
	if gate != nil {
		select {
		case gate <- struct{}{}:
			defer func() { <-gate }()
		case <-v.wake:
			return
		case <-m.Changed():
			return
		case <-v.loop.ctx.Done():
			return
		}
	}
	ctx, cancel := context.WithCancel(v.loop.ctx)
	defer cancel()
	if !v.setCancel(change, cancel) {
		return
	}
	err := step.Do(ctx)
	given := ctx.Err() != nil
	v.setCancel(change, nil)
	switch {
	case v.loop.ctx.Err() != nil || given && err != nil:
		return
	case err != nil:
		v.failed(t, step.Name, err)
		return
	}
	v.loop.o.Log.Info("done", "vm", v.id, "step", step.Name)
	if t.times++; step.Name != t.name {
		t.name, t.times = step.Name, 1
	}
	if t.times > maxRepeats {
		v.failed(t, step.Name, errNoProgress)
		return
	}
	t.fails, t.again, t.logged = 0, time.Time{}, ""
}

// setCancel sets v.cancelStep, the function that cancels the step in progress. It returns false if the desired state
// has changed since the caller read it. The parameter change is the value of v.change at that time.
func (v *vm) setCancel(change uint64, cancelStep context.CancelFunc) bool {
	v.loop.mu.Lock()
	defer v.loop.mu.Unlock()
	v.cancelStep = cancelStep
	return v.change == change
}

// failed counts and logs the failure of a step, and sets the time of the next attempt. The parameter name is the name
// of the step.
func (v *vm) failed(t *attempts, name string, err error) {
	pause := min(firstPause<<min(t.fails, 10), lastPause)
	t.fails++
	t.again = time.Now().Add(pause/2 + rand.N(pause/2+1))
	if t.logged != err.Error() {
		t.logged = err.Error()
		v.loop.o.Log.Warn("step failed", "vm", v.id, "step", name, "err", err)
	}
}

// sleep waits for a change of the VM or its desired state. If pause is not 0, sleep waits at most that long. It returns
// false when the Loop is closed.
func (v *vm) sleep(m Reconciled, pause time.Duration) bool {
	var timer <-chan time.Time
	if pause > 0 {
		t := time.NewTimer(pause)
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-timer:
	case <-v.wake:
	case <-m.Changed():
	case <-v.loop.ctx.Done():
		return false
	}
	return true
}

// removeIfGone is called when nothing of the VM is left on the host. It removes the VM from the Loop if the VM has no
// desired state or is released, and reports whether it did. It does nothing if v.change differs from change, because
// the desired state is then newer than the observation.
func (v *vm) removeIfGone(change uint64) bool {
	v.loop.mu.Lock()
	defer v.loop.mu.Unlock()
	if v.change != change || v.want != nil && !v.released {
		return false
	}
	delete(v.loop.vms, v.id)
	v.loop.o.Removed(v.id)
	return true
}
