// Package machine is one VM on this host: it looks at what is there, decides the next action by a pure plan, and carries
// it out with packages qemu and disk.
//
// It knows the wishes of agent.v1 and what they mean on a host. It must not know the network, the control plane, when it
// is called ([reconcile] calls it) or what becomes of its reports.
//
// # The parts
//
//   - [Decide] is the behaviour of a VM: from a wish and a [Sight] to a [Plan]. It is pure; testdata/plan tells it as
//     stories.
//   - [Record] is what an agent must remember over its own death, besides the VM's home.
//   - [Host] finds the VMs that are here, and [Machine] is one of them, for a reconcile.Loop.
//
// # Decisions
//
//   - A start, a reset and a reboot are recorded before they are done. For a host that crashes between the two they count
//     as done: a start that was not made up for is visible and can be asked for again, one that is made twice runs a
//     guest that somebody may have moved or stopped.
//   - A guest that ended although it was wanted on is reported, never started again: whether to is the control plane's
//     policy, and it says so by a higher number of starts.
//   - A reboot is the power button, then a new QEMU in place of the old: the guest gets what a stop and a start would give
//     it, a new process included. One that does not go down within [hardAfter] is reset in its QEMU.
//   - The power button is pressed again every [pressAgain]: a guest that is still booting has not heard the first.
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

var _ reconcile.Machine = (*Machine)(nil)

// Machine is one VM on this host. All but what mu guards belongs to the goroutine that calls Next.
type Machine struct {
	host *Host
	id   cloud.VMID

	loaded bool
	exists bool
	home   *qemu.Home
	record Record

	guest   Guest
	trouble string
	cure    bool
	exit    cloud.Exit // of the last process
	pid     int

	refused bool
	failure string // of the last step

	offSince, pressedAt, rebootSince, heldSince time.Time

	mu      sync.Mutex // guards what follows
	process *qemu.Process
	seen    cloud.Observation
	sample  sample
}

// Next looks at the VM and says what to do.
func (m *Machine) Next(ctx context.Context, want *agentv1.AssignedVm) (reconcile.Step, error) {
	if err := m.look(ctx); err != nil {
		return reconcile.Step{}, err
	}
	m.mark(want)
	plan := Decide(want, m.sight())
	step := reconcile.Step{Seen: m.observation(want, plan), Wait: plan.Wait, Gone: !m.exists, Note: plan.note()}
	m.mu.Lock()
	m.seen = step.Seen
	m.mu.Unlock()
	if plan.Action == Nothing {
		return step, nil
	}
	step.Name = plan.Action.String()
	step.Weight = weights[plan.Action]
	step.Do = func(ctx context.Context) error {
		err := m.act(ctx, plan.Action, want)
		m.failure = ""
		if err != nil && ctx.Err() == nil && !errors.Is(err, errEnded) {
			m.failure = brief(err)
		}
		return err
	}
	return step, nil
}

// weights are those that are not light.
var weights = map[Action]reconcile.Weight{Build: reconcile.Build, Start: reconcile.Launch, Relaunch: reconcile.Launch}

// Changed is signalled when something happened to the process.
func (m *Machine) Changed() <-chan struct{} {
	if m.process == nil {
		return nil
	}
	return m.process.Wake()
}

// Close lets go of the VM.
func (m *Machine) Close() {
	m.attach(nil)
	m.host.close(m)
}

// attach puts a process, or none, in place of the one before.
func (m *Machine) attach(p *qemu.Process) {
	m.mu.Lock()
	old := m.process
	m.process, m.sample = p, sample{}
	m.mu.Unlock()
	if old != nil {
		old.Close()
	}
}

// look brings what is known of the host up to date.
func (m *Machine) look(ctx context.Context) error {
	if !m.loaded {
		if err := m.load(ctx); err != nil {
			return err
		}
		m.loaded = true
	}
	if m.process != nil {
		return m.ask(ctx)
	}
	m.guest, m.pid = None, 0
	if !m.exists {
		return nil
	}
	procs, err := m.host.o.Cgroups.Procs(string(m.id))
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	if len(procs) > 0 {
		m.guest, m.pid = Stray, procs[0]
	}
	return nil
}

// load finds out what an agent before this one left.
func (m *Machine) load(ctx context.Context) error {
	var recorded bool
	var err error
	if m.record, recorded, err = readRecord(m.host.recordPath(m.id)); err != nil {
		return err
	}
	m.home, err = m.host.o.Homes.Open(string(m.id))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	present, err := m.host.present(m.id)
	if err != nil {
		return err
	}
	m.exists = recorded || present
	if recorded && m.record.Cluster == "" && m.host.o.Cluster() != "" { // now, before the host can be in another
		if err := m.write(m.record); err != nil {
			return err
		}
	}
	if m.home == nil {
		return nil
	}
	process, err := m.host.o.QEMU.Adopt(ctx, m.home)
	var gone *qemu.GoneError
	switch {
	case err == nil:
		m.record.Live = true
		m.attach(process)
		return nil
	case errors.As(err, &gone):
		m.ended(gone.Exit)
	case errors.Is(err, qemu.ErrNotStarted):
		m.ended(lost)
	default:
		return err
	}
	// The home speaks of the start before, if the agent ended between its record and the launch.
	if last, err := m.home.Record(); m.record.Live && (err != nil || !m.record.marks(last.Owner)) {
		m.ended(lost)
	}
	return nil
}

// lost is the end of a start that was recorded and never made.
var lost = qemu.Exit{Reason: qemu.Crashed, Text: "the agent was restarted before QEMU was started"}

// ended takes note of how the last process ended.
func (m *Machine) ended(e qemu.Exit) {
	m.exit, m.trouble = exits[e.Reason], ""
	if m.exit == 0 {
		m.exit = cloud.ExitFailed
	}
	if m.exit == cloud.ExitFailed {
		m.trouble = brief(errors.New(e.Text))
	}
}

var exits = map[qemu.Reason]cloud.Exit{
	qemu.Guest: cloud.ExitGuest, qemu.Asked: cloud.ExitAsked, qemu.Crashed: cloud.ExitFailed,
}

// ask finds out how the guest is.
func (m *Machine) ask(ctx context.Context) error {
	m.pid = m.process.Record().PID
	m.trouble, m.cure = "", false
	select {
	case <-m.process.Exited():
		m.bereft()
		return nil
	default:
	}
	if m.process.Exit().Reason != "" { // known already, and QEMU is about to end
		m.guest = Off
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	status, err := m.process.Status(bounded)
	switch {
	case errors.Is(err, qemu.ErrExited):
		select {
		case <-m.process.Exited():
			m.bereft()
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		m.guest, m.trouble = Mute, "QEMU does not answer"
		return nil
	}
	if m.guest = guests[status.State]; m.guest == None {
		m.guest, m.trouble = Held, "the guest is stopped ("+status.State+")"
	}
	if text := m.process.LastError(); m.guest == Held && text != "" {
		m.trouble, m.cure = brief(errors.New(text)), status.State == "io-error"
	}
	return nil
}

// guests are QEMU's run states (its qapi/run-state.json); any other holds the guest.
var guests = map[string]Guest{
	"running": Running, "suspended": Running, "prelaunch": Waiting, "shutdown": Off, "guest-panicked": Off, "internal-error": Off,
}

// bereft takes leave of a process that has ended.
func (m *Machine) bereft() {
	m.ended(m.process.Exit())
	if m.exit == cloud.ExitFailed {
		m.host.counts.deaths.Add(1)
	}
	m.attach(nil)
	m.guest, m.pid = None, 0
}

// mark keeps the times from which the plan counts.
func (m *Machine) mark(want *agentv1.AssignedVm) {
	keep := func(since *time.Time, when bool) {
		switch {
		case !when:
			*since = time.Time{}
		case since.IsZero():
			*since = time.Now()
		}
	}
	keep(&m.offSince, want.GetPower() == agentv1.Power_POWER_OFF && m.guest != None)
	keep(&m.rebootSince, m.record.rebooting() && m.guest != None)
	keep(&m.heldSince, m.guest == Held)
	if m.guest == None {
		m.pressedAt = time.Time{}
	}
}

func (m *Machine) sight() Sight {
	return Sight{
		Exists: m.exists, Refused: m.refused, Foreign: m.foreign(), Record: m.record, Guest: m.guest, Trouble: m.trouble, Exit: m.exit, Cure: m.cure,
		Error: m.failure, OffFor: since(m.offSince), PressedFor: since(m.pressedAt), RebootFor: since(m.rebootSince),
		HeldFor: since(m.heldSince),
	}
}

// foreign says whether the record is of another cluster than the one that the host is in.
func (m *Machine) foreign() bool {
	of, in := m.record.Cluster, m.host.o.Cluster()
	return of != "" && in != "" && of != in
}

func since(t time.Time) time.Duration {
	if t.IsZero() {
		return -1
	}
	return time.Since(t)
}

func (m *Machine) observation(want *agentv1.AssignedVm, p Plan) cloud.Observation {
	o := cloud.Observation{
		VM: m.id, Generation: want.GetGeneration(), Observed: p.Observed, Exit: p.Exit, PID: uint32(m.pid), LastError: p.Error,
		StartsDone: m.record.StartsDone, RebootsDone: m.record.RebootsDone, ResetsDone: m.record.ResetsDone,
	}
	if m.process != nil {
		o.StartedAt = m.process.Record().Started.UnixMilli()
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
