// Package machine is one VM on this host: it looks at what is there, decides the next action by a pure plan, and carries
// it out with packages qemu and disk.
//
// It knows the wishes of agent.v1 and what they mean on a host. It must not know the network, the control plane, when it
// is called ([reconcile] calls it) or what becomes of its reports.
//
// # The parts
//
//   - [NextAction] is the behaviour of a VM: from a wish and a [Observation] to a [Plan]. It is pure; testdata/plan tells it as
//     stories.
//   - [Record] is what an agent must remember over its own death, besides the VM's home.
//   - [MachineSet] finds the VMs that are here, and [VM] is one of them, for a reconcile.Loop.
//
// # Decisions
//
//   - A start, a reset and a reboot are recorded before they are done. For a host that crashes between the two they count
//     as done: a start that was not made up for is visible and can be asked for again, one that is made twice runs a
//     guest that somebody may have moved or stopped.
//   - A guest that ended although it was wanted on is reported, never started again: whether to is the control plane's
//     policy, and it says so by a higher number of starts.
//   - A reboot is the power button, then a new QEMU in place of the old: the guest gets what a stop and a start would give
//     it, a new process included. One that does not go down within [rebootTimeout] is reset in its QEMU.
//   - The power button is pressed again every [pressInterval]: a guest that is still booting has not heard the first.
//   - The grace of a stop counts from when this agent first saw the wish. After a restart of the agent it counts anew, for
//     nobody knows how long the agent was away.
//   - A guest that QEMU stopped because its disk was full gets another chance every [resumeAfter].
//   - A record says of which cluster its counts are. When the host joins another one, made of a backup say, the records
//     there may be older than what is here. A guest that they want on goes on, and one that they want off and have
//     started as often goes off. What they cannot know is kept, and said: a guest that was started since stays on until
//     it is started (which only takes it over) or ends, one that was stopped since is reported as ended, and one that no
//     record knows lives until it ends by itself, with its disks kept. That a returning host kills what it no longer
//     owns is for a cluster that has ruled on the VM before. With the first wish that is carried out the counts become
//     that cluster's, or a start with a lower number would be none.
//   - What waits for a person's or the control plane's word (no record knows the VM) is left as it is.
//   - Error texts are one line for a tenant, without paths of the host.
package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/reconcile"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// statusWithin bounds the question how a guest is. A QEMU that needs longer is mute.
	statusWithin = 2 * time.Second
	// actWithin bounds an action that only talks to QEMU or writes a file. Cutting power may take 15 s.
	actWithin = 30 * time.Second
)

var _ reconcile.Reconciled = (*VM)(nil)

// VM is one VM on this host. All but what mu guards belongs to the goroutine that calls Next.
type VM struct {
	set *MachineSet
	id  cloud.VMID

	loaded bool
	exists bool
	home   *qemu.Home
	record Record

	guest       Guest
	trouble     string
	recoverable bool
	exit        cloud.Exit // of the last process
	pid         int

	refused bool
	failure string // of the last step

	offSince, pressedAt, rebootSince, pausedSince time.Time

	mu      sync.Mutex // guards what follows
	process *qemu.Process
	seen    cloud.Observation
	sample  sample
}

// Next looks at the VM and says what to do.
func (v *VM) Next(ctx context.Context, want *agentv1.AssignedVm) (reconcile.Step, error) {
	if err := v.observe(ctx); err != nil {
		return reconcile.Step{}, err
	}
	v.updateTimers(want)
	plan := NextAction(want, v.observation())
	step := reconcile.Step{Seen: v.report(want, plan), Wait: plan.Wait, Gone: !v.exists, Note: plan.note()}
	v.mu.Lock()
	v.seen = step.Seen
	v.mu.Unlock()
	if plan.Action == Nothing {
		return step, nil
	}
	step.Name = plan.Action.String()
	step.Weight = weights[plan.Action]
	step.Do = func(ctx context.Context) error {
		err := v.act(ctx, plan.Action, want)
		v.failure = ""
		if err != nil && ctx.Err() == nil && !errors.Is(err, errEnded) {
			v.failure = brief(err)
		}
		return err
	}
	return step, nil
}

// weights are those that are not light.
var weights = map[Action]reconcile.Weight{Build: reconcile.Build, Start: reconcile.Launch, Relaunch: reconcile.Launch}

// Changed is signalled when something happened to the process.
func (v *VM) Changed() <-chan struct{} {
	if v.process == nil {
		return nil
	}
	return v.process.Wake()
}

// Close lets go of the VM.
func (v *VM) Close() {
	v.attach(nil)
	v.set.close(v)
}

// attach puts a process, or none, in place of the one before.
func (v *VM) attach(p *qemu.Process) {
	v.mu.Lock()
	old := v.process
	v.process, v.sample = p, sample{}
	v.mu.Unlock()
	if old != nil {
		old.Close()
	}
}

// observe brings what is known of the host up to date.
func (v *VM) observe(ctx context.Context) error {
	if !v.loaded {
		if err := v.load(ctx); err != nil {
			return err
		}
		v.loaded = true
	}
	if v.process != nil {
		return v.queryProcess(ctx)
	}
	v.guest, v.pid = None, 0
	if !v.exists {
		return nil
	}
	procs, err := v.set.o.Cgroups.Procs(string(v.id))
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	if len(procs) > 0 {
		v.guest, v.pid = OrphanProcess, procs[0]
	}
	return nil
}

// load finds out what an agent before this one left.
func (v *VM) load(ctx context.Context) error {
	var recorded bool
	var err error
	if v.record, recorded, err = readRecord(v.set.recordPath(v.id)); err != nil {
		return err
	}
	v.home, err = v.set.o.Homes.Open(string(v.id))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	present, err := v.set.present(v.id)
	if err != nil {
		return err
	}
	v.exists = recorded || present
	if recorded && v.record.Cluster == "" && v.set.o.Cluster() != "" { // now, before the host can be in another
		if err := v.write(v.record); err != nil {
			return err
		}
	}
	if v.home == nil {
		return nil
	}
	process, err := v.set.o.QEMU.Adopt(ctx, v.home)
	var gone *qemu.GoneError
	switch {
	case err == nil:
		v.record.Live = true
		v.attach(process)
		return nil
	case errors.As(err, &gone):
		v.setExit(gone.Exit)
	case errors.Is(err, qemu.ErrNotStarted):
		v.setExit(neverStarted)
	default:
		return err
	}
	// The home speaks of the start before, if the agent ended between its record and the launch.
	if last, err := v.home.Record(); v.record.Live && (err != nil || !v.record.matchesMark(last.Owner)) {
		v.setExit(neverStarted)
	}
	return nil
}

// neverStarted is the end of a start that was recorded and never made.
var neverStarted = qemu.Exit{Reason: qemu.Crashed, Text: "the agent was restarted before QEMU was started"}

// setExit takes note of how the last process ended.
func (v *VM) setExit(e qemu.Exit) {
	v.exit, v.trouble = exits[e.Reason], ""
	if v.exit == 0 {
		v.exit = cloud.ExitFailed
	}
	if v.exit == cloud.ExitFailed {
		v.trouble = brief(errors.New(e.Text))
	}
}

var exits = map[qemu.Reason]cloud.Exit{
	qemu.Guest: cloud.ExitGuest, qemu.Asked: cloud.ExitAsked, qemu.Crashed: cloud.ExitFailed,
}

// queryProcess finds out how the guest is.
func (v *VM) queryProcess(ctx context.Context) error {
	v.pid = v.process.Record().PID
	v.trouble, v.recoverable = "", false
	select {
	case <-v.process.Exited():
		v.onExit()
		return nil
	default:
	}
	if v.process.Exit().Reason != "" { // known already, and QEMU is about to end
		v.guest = Off
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	status, err := v.process.Status(bounded)
	switch {
	case errors.Is(err, qemu.ErrExited):
		select {
		case <-v.process.Exited():
			v.onExit()
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		v.guest, v.trouble = Unresponsive, "QEMU does not answer"
		return nil
	}
	if v.guest = guests[status.State]; v.guest == None {
		v.guest, v.trouble = Paused, "the guest is stopped ("+status.State+")"
	}
	if text := v.process.LastError(); v.guest == Paused && text != "" {
		v.trouble, v.recoverable = brief(errors.New(text)), status.State == "io-error"
	}
	return nil
}

// guests are QEMU's run states (its qapi/run-state.json); any other holds the guest.
var guests = map[string]Guest{
	"running": Running, "suspended": Running, "prelaunch": Waiting, "shutdown": Off, "guest-panicked": Off, "internal-error": Off,
}

// onExit takes leave of a process that has ended.
func (v *VM) onExit() {
	v.setExit(v.process.Exit())
	if v.exit == cloud.ExitFailed {
		v.set.counts.deaths.Add(1)
	}
	v.attach(nil)
	v.guest, v.pid = None, 0
}

// updateTimers keeps the times from which the plan counts.
func (v *VM) updateTimers(want *agentv1.AssignedVm) {
	keep := func(since *time.Time, when bool) {
		switch {
		case !when:
			*since = time.Time{}
		case since.IsZero():
			*since = time.Now()
		}
	}
	keep(&v.offSince, want.GetPower() == agentv1.Power_POWER_OFF && v.guest != None)
	keep(&v.rebootSince, v.record.rebooting() && v.guest != None)
	keep(&v.pausedSince, v.guest == Paused)
	if v.guest == None {
		v.pressedAt = time.Time{}
	}
}

func (v *VM) observation() Observation {
	return Observation{
		Exists: v.exists, Refused: v.refused, Foreign: v.foreign(), Record: v.record, Guest: v.guest, Trouble: v.trouble, Exit: v.exit, Recoverable: v.recoverable,
		Error: v.failure, OffFor: since(v.offSince), PressedFor: since(v.pressedAt), RebootFor: since(v.rebootSince),
		PausedFor: since(v.pausedSince),
	}
}

// foreign says whether the record is of another cluster than the one that the host is in.
func (v *VM) foreign() bool {
	of, in := v.record.Cluster, v.set.o.Cluster()
	return of != "" && in != "" && of != in
}

func since(t time.Time) time.Duration {
	if t.IsZero() {
		return -1
	}
	return time.Since(t)
}

func (v *VM) report(want *agentv1.AssignedVm, p Plan) cloud.Observation {
	o := cloud.Observation{
		VM: v.id, Generation: want.GetGeneration(), Observed: p.Observed, Exit: p.Exit, PID: uint32(v.pid), LastError: p.Error,
		StartsDone: v.record.StartsDone, RebootsDone: v.record.RebootsDone, ResetsDone: v.record.ResetsDone,
	}
	if v.process != nil {
		o.StartedAt = v.process.Record().Started.UnixMilli()
	}
	return o
}

var hostPath = regexp.MustCompile(`(^|[\s"'=(])/[^\s"':;,)]*`)

// maxBrief bounds an error text, in bytes.
const maxBrief = 300

// brief is an error as a tenant may read it: one line, no paths of the host.
func brief(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	text = hostPath.ReplaceAllString(text, "${1}(file)")
	if len(text) > maxBrief {
		text = strings.ToValidUTF8(text[:maxBrief], "")
	}
	return text
}
