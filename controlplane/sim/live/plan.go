package live

import (
	"maps"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// plan says what a simulated agent will do next for one VM, and which state it reports for the VM.
type plan struct {
	seen  cloud.Observed
	exit  cloud.Exit
	error string
	// act is the next action; nil if there is none. It is executed after a random delay between the durations least and
	// most.
	act         func()
	least, most time.Duration
	// wait is used if act is nil. It is the time until the VM is checked again; 0 means that the VM is checked again
	// only when an event wakes its goroutine.
	wait time.Duration
}

// pressAgain is the time between two presses of the power button. hardAfter is the time from the begin of a reboot
// until the agent forces it.
const (
	pressAgain = 10 * time.Second
	hardAfter  = 30 * time.Second
)

// decide returns the plan for a VM with the desired state want and the actual state g. It implements the agent protocol
// without the code of package nodeagent, so that a bug there is not repeated here.
func (d *driven) decide(want *agentv1.AssignedVm, g *guest) plan {
	power := want.GetPower()
	switch {
	case g == nil || power == agentv1.Power_POWER_DESTROYED:
	case d.leaseEnded && g.stopsWithLease && g.proc != nil:
		return step(plan{seen: cloud.ObservedStopping}, func() { d.host.cut(d.id) }, 10*time.Millisecond, time.Second)
	case d.leaseEnded && g.stopsWithLease && g.live:
		return step(reportOnly(g), func() { d.recordExit(g) }, time.Millisecond, 50*time.Millisecond)
	case d.leaseEnded && g.stopsWithLease:
		return reportOnly(g)
	case g.built && (power == agentv1.Power_POWER_ON || power == agentv1.Power_POWER_OFF) && want.GetMigration() == nil &&
		g.stopsWithLease != want.GetStopsWithLease():
		return step(reportOnly(g), func() {
			d.host.change(d.id, func(r *record) { r.stopsWithLease = want.GetStopsWithLease() })
		}, time.Millisecond, 50*time.Millisecond)
	}
	if power == agentv1.Power_POWER_ON {
		if p, is := d.migrate(want, g); is {
			return p
		}
	}
	switch want.GetPower() {
	case agentv1.Power_POWER_ON:
		return d.on(want, g)
	case agentv1.Power_POWER_OFF:
		return d.off(want, g)
	case agentv1.Power_POWER_DESTROYED:
		if g == nil {
			return plan{seen: cloud.ObservedAbsent}
		}
		return step(reportOnly(g), func() { d.host.destroy(d.id) }, 50*time.Millisecond, 8*time.Second)
	case agentv1.Power_POWER_ORPHANED:
		if g != nil && g.proc != nil {
			return step(plan{seen: cloud.ObservedStopping}, func() { d.host.cut(d.id) }, 10*time.Millisecond, time.Second)
		}
	}
	return reportOnly(g)
}

// step returns a copy of p whose next action is act, after a random delay between least and most.
func step(p plan, act func(), least, most time.Duration) plan {
	p.act, p.least, p.most = act, least, most
	return p
}

// reportOnly returns a plan that reports the state of g and has no action.
func reportOnly(g *guest) plan {
	switch {
	case g == nil:
		return plan{seen: cloud.ObservedAbsent}
	case g.proc != nil && g.proc.up:
		return plan{seen: cloud.ObservedRunning}
	case g.proc != nil:
		return plan{seen: cloud.ObservedLaunching}
	case g.live:
		return plan{seen: cloud.ObservedEnded, exit: g.exit, error: g.exitError}
	case !g.built:
		return plan{seen: cloud.ObservedBuilding}
	case g.end == cloud.ExitGuest || g.end == cloud.ExitFailed:
		return plan{seen: cloud.ObservedEnded, exit: g.end, error: g.exitError}
	}
	return plan{seen: cloud.ObservedBuilt}
}

// building returns the plan to create a VM's disks, and true. If the disks exist already, or a process runs, it returns
// false and no plan.
func (d *driven) building(g *guest) (plan, bool) {
	switch {
	case g != nil && (g.built || g.proc != nil):
		return plan{}, false
	case g != nil && g.refused:
		return plan{seen: cloud.ObservedBuildFailed, error: "the image cannot be used"}, true
	}
	return step(plan{seen: cloud.ObservedBuilding}, func() { d.host.build(d.id) }, 100*time.Millisecond, 4*time.Second), true
}

func (d *driven) on(want *agentv1.AssignedVm, g *guest) plan {
	if p, ok := d.building(g); ok {
		return p
	}
	due := g.startsDone < want.GetStarts()
	switch {
	case g.proc == nil && g.live && g.rebooting() && g.exit != cloud.ExitFailed:
		return step(plan{seen: cloud.ObservedRunning}, func() { d.relaunch(want) }, 200*time.Millisecond, 3*time.Second)
	case g.proc == nil && g.live:
		return step(reportOnly(g), func() { d.recordExit(g) }, time.Millisecond, 50*time.Millisecond)
	case g.proc == nil && due:
		return step(plan{seen: cloud.ObservedLaunching}, func() { d.begin(want) }, 200*time.Millisecond, 4*time.Second)
	case g.proc == nil && g.startsDone == 0:
		return plan{seen: cloud.ObservedBuilt}
	case g.proc == nil:
		return plan{seen: cloud.ObservedEnded, exit: g.end, error: g.exitError}
	case !g.proc.up:
		return step(plan{seen: cloud.ObservedLaunching}, func() { d.host.letRun(d.id) }, 50*time.Millisecond, time.Second)
	case due:
		return step(plan{seen: cloud.ObservedRunning}, func() {
			d.host.change(d.id, func(r *record) { r.startsDone = want.GetStarts() })
		}, time.Millisecond, 50*time.Millisecond)
	}
	return d.running(want, g)
}

// running returns the plan for a VM that is to run and does run. The plan executes a pending reset or reboot, if there
// is one.
func (d *driven) running(want *agentv1.AssignedVm, g *guest) plan {
	p := plan{seen: cloud.ObservedRunning}
	quick := func(act func()) plan { return step(p, act, time.Millisecond, 100*time.Millisecond) }
	since := time.Since(d.rebootAt)
	switch {
	case want.GetResets() > g.resetsDone:
		return quick(func() { d.host.change(d.id, func(r *record) { r.resetsDone = want.GetResets() }) })
	case !maps.Equal(nicsOf(want), g.proc.nics):
		return step(p, func() { d.host.setNICs(d.id, want) }, 10*time.Millisecond, 5*time.Second)
	case g.proc.volumesDiffer(want):
		return step(p, func() { d.host.setVolumes(d.id, want) }, 10*time.Millisecond, 5*time.Second)
	case want.GetReboots() > g.rebootsBegun:
		d.rebootAt, d.pressedAt = time.Now(), time.Time{}
		return quick(func() { d.host.change(d.id, func(r *record) { r.rebootsBegun = want.GetReboots() }) })
	case g.rebooting() && since >= hardAfter:
		return quick(func() { d.host.change(d.id, func(r *record) { r.rebootsDone = r.rebootsBegun }) })
	case g.rebooting():
		return d.press(p, hardAfter-since)
	}
	return p
}

func (d *driven) off(want *agentv1.AssignedVm, g *guest) plan {
	if p, ok := d.building(g); ok {
		return p
	}
	switch {
	case g.proc == nil && g.live:
		return step(plan{seen: cloud.ObservedBuilt}, func() { d.recordExit(g) }, time.Millisecond, 50*time.Millisecond)
	case g.proc == nil:
		return plan{seen: cloud.ObservedBuilt}
	}
	if d.offAt.IsZero() {
		d.offAt = time.Now()
	}
	p := plan{seen: cloud.ObservedStopping}
	left := time.Duration(want.GetStopGraceMs())*time.Millisecond - time.Since(d.offAt)
	if left <= 0 || !g.proc.up {
		return step(p, func() { d.host.cut(d.id) }, 10*time.Millisecond, time.Second)
	}
	return d.press(p, left)
}

// press returns a copy of p in which the next action is to press the power button. If the last press was less than
// pressAgain ago, the copy has no action; it waits until the next press is due, at most for the duration left.
func (d *driven) press(p plan, left time.Duration) plan {
	if since := time.Since(d.pressedAt); !d.pressedAt.IsZero() && since < pressAgain {
		p.wait = min(left, pressAgain-since)
		return p
	}
	d.pressedAt = time.Now()
	return step(p, func() { d.host.press(d.id) }, time.Millisecond, 50*time.Millisecond)
}

// begin executes a start that a member requested. It records the start on disk before it launches the process, so that
// no start is executed twice.
func (d *driven) begin(want *agentv1.AssignedVm) {
	d.host.change(d.id, func(r *record) { r.startsDone, r.live = want.GetStarts(), true })
	d.host.launch(want, want.GetStarts(), false)
}

// relaunch completes a reboot: it launches the process again after the guest has powered off.
func (d *driven) relaunch(want *agentv1.AssignedVm) {
	var start uint64
	d.host.change(d.id, func(r *record) { r.rebootsDone, start = r.rebootsBegun, r.startsDone })
	d.host.launch(want, start, true)
}

// recordExit stores in the VM's record on disk how the VM's process ended.
func (d *driven) recordExit(g *guest) {
	d.host.change(d.id, func(r *record) { r.live, r.end, r.exitError = false, g.exit, g.exitError })
}
