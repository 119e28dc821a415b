// Package machine brings one VM on this host to its desired state: it observes the host, chooses the next action by a
// pure function, and executes the action with packages qemu and disk.
//
// It interprets the desired state of agent.v1 for this host. It does not depend on the network or the control plane:
// package [reconcile] decides when a VM is observed, and passes the reports on.
//
// # Parts
//
//   - [NextAction] is the complete behaviour of a VM: from desired state and [Observation] to a [Plan]. It is a pure
//     function; its tests are the scripts in testdata/plan.
//   - [Record] is the state of a VM that the agent stores on disk, in addition to the VM's directory of package qemu
//     (qemu.Home).
//   - [MachineSet] finds the VMs of this host. [VM] is one of them, and implements reconcile.Reconciled.
//
// # Decisions
//
//   - A start, a reset and a reboot are recorded before they are executed. If the agent crashes in between, they count
//     as done. A start that was recorded and not executed is reported and can be requested again, but a start that is
//     executed twice could run a guest that was moved or stopped since.
//   - A guest that ended although it should run is reported, and not started again by the agent. The restart policy
//     belongs to the control plane, which requests a start by a higher start counter.
//   - A reboot presses the power button and then launches a new QEMU, so that its effect is that of a stop and a start.
//     A guest that does not shut down within [rebootTimeout] is reset in its running QEMU.
//   - The power button is pressed again every [pressInterval], because a guest that is still booting ignores it.
//   - The grace period of a stop starts when this agent first sees the desired state. After a restart of the agent it
//     starts again, because the length of the absence is unknown.
//   - A guest that QEMU paused because its disk was full is resumed every [resumeAfter].
//   - A record names the cluster of its counters. A host may join another cluster, for example one restored from a
//     backup, whose data may be older than the VMs on the host. If the new cluster's desired state is on, a running
//     guest continues. If it is off, the start counters decide: a running guest whose counter is higher than the
//     desired one was started since the backup and continues, any other is stopped. Other differences are only reported
//     too: the guest started since the backup runs until it ends or the new cluster starts it, a guest stopped since
//     the backup is reported as ended, and a guest whose VM the new cluster does not have runs until it ends, and its
//     disks are kept. Only the cluster that the record names may end a guest because it does not have the VM. Before
//     the agent executes a desired state on or off of the new cluster, AdoptCounters lowers the counters to those of
//     that state. Otherwise the cluster's next start would have a lower counter than the record and be ignored.
//   - Taps are opened before a start is recorded. A port that the host does not know yet therefore delays the start
//     instead of failing it. The taps are closed when the exit of the process is recorded, so that an agent that was
//     not running when the process ended closes them too.
//   - A network interface that the desired state adds or removes is attached to or detached from the running guest. A
//     failure is repeated, and reported as final when the guest does not release the interface, or cannot get it for a
//     while.
//   - Volumes are opened before a start is recorded, like taps, and are flushed when the exit of the process is
//     recorded. Until the volumes are flushed, the VM is reported as stopping, because the control plane may attach
//     them to other VMs as soon as the VM is reported to have no process. If a volume has grown, QEMU gets the new size
//     before the guest's CPUs run.
//   - The guest is asked several times to release a volume, each time for a few seconds only, so that a request to stop
//     the VM need not wait long. After 30 seconds the failure is reported, and the guest keeps the volume.
//   - After a new QEMU has opened an RBD image, and before the guest can write to it, the attachment is checked again,
//     because it may have ended while QEMU opened the image. If it has ended, QEMU is killed, or the disk is removed.
//   - To flatten a volume that a guest uses, the guest's QEMU copies the volume's image into the volume. A copy that
//     makes no progress for copyStall is cancelled, and continues later from the same position. Package volume records
//     the volume as independent of its image only after QEMU has ended the copy and package volume has checked the
//     volume's file. QEMU and the agent may therefore be killed at any time. A snapshot interrupts the copy,
//     which continues when the snapshot is complete.
//   - The source and the target of a migration write each decision to their record ([Migrations]) before they act on
//     it. The decisions of the source are that it has handed the guest over and that it has cancelled an attempt. Those
//     of the target are that it has run the guest and that it will never run it. The target runs the guest only after
//     the control plane has assigned the phase SWITCHOVER. If the source does not receive this phase within
//     switchoverWait, it cancels the attempt. A later SWITCHOVER of the same attempt then has no effect.
//   - Volumes are not copied by a migration. The target opens them for a QEMU whose block devices are inactive, so the
//     two processes never write at the same time. The target activates the volumes after the switchover, before the
//     guest's CPUs run. The source takes them back before it continues the guest in the phase ROLLBACK. If the guest
//     already runs because the source had cancelled the attempt before the switchover, the source takes them back
//     afterwards: the target then never gets the complete state of the guest.
//   - Under KVM, the source sends the guest's memory while the guest runs, and stops the guest when the rest is small
//     enough (see memory.mustStop). The source stops the guest first in two cases. Under TCG, QEMU does not copy the
//     memory of a running guest correctly. With some versions of QEMU, [qemu.Process.CanSendRunning] is false. The
//     source hands the guest over only if it stopped the guest before QEMU had sent all of the memory. Otherwise QEMU
//     could resume the guest by itself after the hand-over ([qemu.ErrGuestRan]).
//   - The memory is sent over several connections if the control plane has assigned a number of them to both hosts. It
//     does so only if the source has reported that its QEMU can (see VM.memoryChannels), and if the target can. QEMU 7.2
//     must not notice that a connection other than the main one breaks (see package tunnel). The source therefore makes
//     QEMU stop sending before it ends the tunnel process, and does not hand the guest over without this process.
//   - The QEMU of a migration's target is killed when the host's lease ends, until the control plane assigns the VM to
//     this host without a migration. If the target host is lost, the control plane can therefore continue the guest at
//     the source after the lease has ended.
//   - A VM without desired state is observed and reported, but not changed.
//   - Error texts are one line for a tenant and contain no paths of the host.
package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/reconcile"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// statusWithin is the maximum time for the query of QEMU's run state. A QEMU that needs longer is Unresponsive.
	statusWithin = 2 * time.Second
	// actWithin is the maximum time of an action that only sends QMP commands or writes a file. PowerOff may take 15 s.
	actWithin = 30 * time.Second
)

var _ reconcile.Reconciled = (*VM)(nil)

// VM is one VM on this host. Only the goroutine that calls Next may use the fields that mu does not guard.
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
	exit        cloud.Exit // how the last process ended
	pid         int

	nics        []qemu.AttachedNIC // network interfaces of the process
	lastNIC     string             // id of the one that the last PlugNIC or UnplugNIC was for
	nicFailures map[string]deviceFailure

	volumes       []qemu.AttachedDisk     // disks of the process that are volumes
	unreleased    []qemu.Disk             // volumes of the last process, which has ended, until its exit is recorded
	sizes         map[string]uint64       // sizes in bytes of the process's disks that are not volumes, by id
	lastDisk      string                  // id of the disk of the last PlugDisk, UnplugDisk, ResizeDisk or FlattenDisk
	copyPositions map[string]copyPosition // volumes whose image QEMU copies, by disk id
	diskFailures  map[string]deviceFailure

	seenTransfer Transfer // state of the migration at the last observation
	transfer     transfer

	refused bool
	failure string // error text of the last step; "" if it succeeded

	offSince, pressedAt, rebootSince, pausedSince time.Time

	mu      sync.Mutex // guards the fields below
	process *qemu.Process
	seen    cloud.Observation
	// stopsWithLease is true if Record.needsLease returns true and Record.Live is set.
	stopsWithLease bool
	sample         sample
	addresses      guestAddresses
}

// Next observes the VM and returns the next step towards its desired state want.
func (v *VM) Next(ctx context.Context, want *agentv1.AssignedVm) (reconcile.Step, error) {
	if err := v.observe(ctx); err != nil {
		return reconcile.Step{}, err
	}
	v.updateTimers(want)
	plan := NextAction(want, v.observation())
	step := reconcile.Step{Observation: v.report(want, plan), Wait: plan.Wait, Gone: !v.exists, Note: plan.note()}
	stopsWithLease := v.record.needsLease() && v.record.Live
	v.mu.Lock()
	began := stopsWithLease && !v.stopsWithLease
	v.seen, v.stopsWithLease = step.Observation, stopsWithLease
	v.mu.Unlock()
	if began && v.set.o.GuardNeeded != nil {
		v.set.o.GuardNeeded()
	}
	if plan.Action == Nothing {
		return step, nil
	}
	step.Name = plan.Action.String()
	if name := plan.NIC + plan.Disk; name != "" { // at most one of them is set
		step.Name += " " + name
	}
	step.Weight = weights[plan.Action]
	step.Do = func(ctx context.Context) error {
		err := v.act(ctx, plan, want)
		v.failure = ""
		if err != nil && ctx.Err() == nil && !errors.Is(err, errEnded) {
			v.failure = brief(err)
		}
		return err
	}
	return step, nil
}

// weights contains the weights of the actions that take much time or I/O. The number of steps that run concurrently
// with such a weight is limited. All other actions have the weight reconcile.Light, which has no limit.
var weights = map[Action]reconcile.Weight{Build: reconcile.Build, Start: reconcile.Launch, Relaunch: reconcile.Launch, Receive: reconcile.Launch}

// Changed returns a channel that receives a value when the state of the VM's process has changed. It is nil if there is
// no process.
func (v *VM) Changed() <-chan struct{} {
	if v.process == nil {
		return nil
	}
	return v.process.Wake()
}

// Close closes the agent's connections to the VM. The VM continues to run.
func (v *VM) Close() {
	v.attach(nil)
	v.set.close(v)
}

// attach makes p the VM's process, and closes the previous one. A nil p means that the VM has no process.
func (v *VM) attach(p *qemu.Process) {
	v.mu.Lock()
	old := v.process
	v.process, v.sample, v.addresses = p, sample{}, guestAddresses{}
	v.mu.Unlock()
	if p == nil {
		v.set.o.CPUs.Release(string(v.id))
	}
	v.nics, v.lastNIC, v.nicFailures = nil, "", nil
	v.volumes, v.lastDisk, v.diskFailures, v.copyPositions = nil, "", nil, nil
	if old != nil {
		old.Close()
	}
}

// observe updates the fields that describe the VM's state on the host.
func (v *VM) observe(ctx context.Context) error {
	if !v.loaded {
		if err := v.load(ctx); err != nil {
			return err
		}
		v.loaded = true
	}
	if v.process != nil {
		err := v.queryProcess(ctx)
		if v.process != nil {
			v.observeNICs(ctx)
			v.observeDisks(ctx)
			v.seenTransfer = v.observeTransfer(ctx)
		}
		if v.process != nil || err != nil {
			return err
		}
	}
	v.guest, v.pid, v.unreleased, v.seenTransfer = None, 0, nil, Transfer{}
	if !v.exists {
		return nil
	}
	if v.record.Live {
		var err error
		if v.unreleased, err = v.lastVolumes(); err != nil {
			return err
		}
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

// load reads the VM's record and opens its directory. If the VM has a running process, load adopts it.
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
	// A record without a cluster gets the id of the host's cluster now, before the host can join another one.
	if recorded && v.record.Cluster == "" && v.set.o.Cluster() != "" {
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
	v.set.o.CPUs.Release(string(v.id))
	// The agent may have ended after it wrote the last start to v.record and before it launched QEMU. The qemu.Record
	// in v.home then describes an earlier start.
	if last, err := v.home.Record(); v.record.Live && (err != nil || !v.record.matchesMark(last.Owner)) {
		v.setExit(neverStarted)
	}
	return nil
}

// neverStarted is the exit of a start that was recorded but not executed.
var neverStarted = qemu.Exit{Reason: qemu.Crashed, Text: "the agent was restarted before QEMU was started"}

// setExit sets v.exit and v.trouble from e, the exit of the last process.
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
	qemu.Guest: cloud.ExitGuest, qemu.Requested: cloud.ExitRequested, qemu.Crashed: cloud.ExitFailed,
}

// queryProcess updates v.guest, v.trouble and v.recoverable from the run state of the VM's process.
func (v *VM) queryProcess(ctx context.Context) error {
	v.pid = v.process.Record().PID
	v.trouble, v.recoverable = "", false
	select {
	case <-v.process.Exited():
		v.onExit()
		return nil
	default:
	}
	if v.process.Exit().Reason != "" { // The guest has ended, and QEMU is about to end.
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
	if status.State == "paused" && v.process.Copying() && !v.process.Migrating() { // CopyDisks has stopped the guest for a moment.
		v.guest = Running
		return nil
	}
	if v.guest = guests[status.State]; v.guest == None {
		v.guest, v.trouble = Paused, "the guest is stopped ("+status.State+")"
	}
	if v.guest == Running && v.process.TPMLost() {
		v.trouble = "the process of the VM's TPM has ended: stop and start the VM to get the TPM back"
	}
	if text := v.process.LastError(); v.guest == Paused && text != "" {
		v.trouble, v.recoverable = brief(errors.New(text)), status.State == "io-error"
	}
	return nil
}

// guests maps QEMU's run states (qapi/run-state.json) to values of Guest. In all other run states the guest is Paused.
var guests = map[string]Guest{
	"running": Running, "suspended": Running, "prelaunch": Waiting, "inmigrate": Arriving, "shutdown": Off, "guest-panicked": Off, "internal-error": Off,
}

// onExit is called after the VM's process has ended. It stores the exit and sets the other fields to those of a VM
// without a process.
func (v *VM) onExit() {
	v.setExit(v.process.Exit())
	if v.exit == cloud.ExitFailed {
		v.set.counts.deaths.Add(1)
	}
	v.attach(nil)
	v.guest, v.pid = None, 0
}

// updateTimers updates the times at which conditions of the VM began; observation computes durations from them. It sets
// a time to now when its condition begins, and to zero when the condition has ended. It reports the duration of a stop
// when the VM has ended.
func (v *VM) updateTimers(want *agentv1.AssignedVm) {
	keep := func(since *time.Time, when bool) {
		switch {
		case !when:
			*since = time.Time{}
		case since.IsZero():
			*since = time.Now()
		}
	}
	if v.guest == None && !v.offSince.IsZero() && want.GetPower() == agentv1.Power_POWER_OFF {
		v.set.o.OnStop(time.Since(v.offSince))
	}
	keep(&v.offSince, want.GetPower() == agentv1.Power_POWER_OFF && v.guest != None)
	keep(&v.rebootSince, v.record.rebooting() && v.guest != None)
	keep(&v.pausedSince, v.guest == Paused)
	if v.guest == None {
		v.pressedAt = time.Time{}
	}
}

// observation returns the VM's state on the host, as the argument of NextAction.
func (v *VM) observation() Observation {
	return Observation{
		Exists: v.exists, Refused: v.refused, Foreign: v.foreign(), Record: v.record, Guest: v.guest, Trouble: v.trouble, Exit: v.exit, Recoverable: v.recoverable,
		LeaseEnded: v.set.leaseEnded.Load(), Transfer: v.seenTransfer, Guarded: v.set.guarded.Load(),
		Error: v.failure, NICs: v.nics, LastNIC: v.lastNIC, Volumes: v.volumes, LastDisk: v.lastDisk, Sizes: v.sizes,
		Unreleased: len(v.unreleased) > 0, OffFor: since(v.offSince), PressedFor: since(v.pressedAt), RebootFor: since(v.rebootSince),
		PausedFor: since(v.pausedSince),
	}
}

// foreign reports whether the record's counters belong to another cluster than the host's.
func (v *VM) foreign() bool {
	of, in := v.record.Cluster, v.set.o.Cluster()
	return of != "" && in != "" && of != in
}

// since returns the time since t, or -1 if t is zero.
func since(t time.Time) time.Duration {
	if t.IsZero() {
		return -1
	}
	return time.Since(t)
}

// report returns the observation of the VM that is sent to the control plane, with the state and the error of the plan
// p.
func (v *VM) report(want *agentv1.AssignedVm, p Plan) cloud.Observation {
	o := cloud.Observation{
		VM: v.id, Generation: want.GetGeneration(), Observed: p.Observed, Exit: p.Exit, PID: uint32(v.pid), LastError: p.Error,
		StartsDone: v.record.StartsDone, RebootsDone: v.record.RebootsDone, ResetsDone: v.record.ResetsDone,
		NICs: v.reportNICs(want), Disks: v.reportDisks(want), StopsWithLease: v.record.StopsWithLease && v.set.guarded.Load(),
		Migration: v.reportMigration(want, p),
	}
	if v.process != nil {
		r := v.process.Record()
		o.StartedAt = r.Started.UnixMilli()
		o.LaunchGeneration, o.VCPUs, o.MemoryMiB = r.Generation, uint32(r.Spec.VCPUs), r.Spec.MemoryMiB
	}
	return o
}
