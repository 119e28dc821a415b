package live

import (
	"context"
	"slices"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// switchoverWait is how long a source waits for the switchover with the guest paused, before it cancels the attempt.
const switchoverWait = 3 * time.Second

// migrationRecord is the data that a host stores on disk about the migrations of a VM.
type migrationRecord struct {
	attempt uint64
	state   cloud.MigrationState
	// given is the greatest attempt that the host has cancelled as the source, or given up as the target.
	given uint64
}

// migrationOf returns what a host reports about the last migration of a VM.
func (g *guest) migrationOf() *cloud.MigrationObservation {
	if g.migration.attempt == 0 {
		return nil
	}
	o := &cloud.MigrationObservation{Attempt: g.migration.attempt, State: g.migration.state}
	if o.State == cloud.MigrationPrepared {
		o.Machine, o.Address = []byte("machine"), "192.0.2.1:7000"
	}
	return o
}

// migrate returns the plan for a VM that is being migrated, or whose migration has just ended, and true. It returns
// false if the plan does not depend on a migration.
func (d *driven) migrate(want *agentv1.AssignedVm, g *guest) (plan, bool) {
	m := want.GetMigration()
	switch {
	case m == nil && g != nil && g.proc != nil && (g.proc.paused || g.proc.incoming != 0):
		return d.leave(want, g), true
	case m.GetRole() == agentv1.MigrationRole_MIGRATION_ROLE_TARGET:
		return d.receive(want, g), true
	case m != nil && g != nil && g.proc != nil:
		return d.send(want, g), true
	}
	return plan{}, false
}

// leave returns the plan for a host whose assignment has no migration any more. A source continues its guest, unless it
// has handed the guest over and the attempt was not rolled back. A process that waits for a guest is ended.
func (d *driven) leave(want *agentv1.AssignedVm, g *guest) plan {
	p := plan{seen: cloud.ObservedRunning}
	if g.proc.incoming != 0 || g.migration.state == cloud.MigrationHandedOver && want.GetRolledBackAttempt() != g.migration.attempt {
		return step(p, func() { d.host.cut(d.id) }, time.Millisecond, 100*time.Millisecond)
	}
	return step(p, func() { d.host.cancelMigration(d.id, g.migration.attempt, want) }, time.Millisecond, 100*time.Millisecond)
}

// send returns the plan of the source of a migration.
func (d *driven) send(want *agentv1.AssignedVm, g *guest) plan {
	m, r := want.GetMigration(), g.migration
	p := plan{seen: cloud.ObservedRunning}
	set := func(s cloud.MigrationState) func() {
		return func() {
			d.host.change(d.id, func(r *record) { r.migration.attempt, r.migration.state = m.GetAttempt(), s })
		}
	}
	give := func() { d.host.cancelMigration(d.id, m.GetAttempt(), want) }
	const least, most = time.Millisecond, 200 * time.Millisecond
	switch {
	case r.given >= m.GetAttempt():
		if r.attempt != m.GetAttempt() || r.state != cloud.MigrationCancelled {
			return step(p, set(cloud.MigrationCancelled), least, most)
		}
		return p
	case r.attempt != m.GetAttempt():
		return step(p, set(cloud.MigrationPrepared), least, most)
	}
	switch phase := m.GetPhase(); r.state {
	case cloud.MigrationPrepared:
		switch {
		case phase < agentv1.MigrationPhase_MIGRATION_PHASE_TRANSFER:
			return p
		case d.host.chance(10):
			return step(p, give, least, most)
		}
		return step(p, set(cloud.MigrationTransferring), least, most)
	case cloud.MigrationTransferring:
		return step(p, func() { d.host.pause(d.id, m.GetAttempt()) }, 100*time.Millisecond, 8*time.Second)
	case cloud.MigrationAtSwitchover:
		switch {
		case phase == agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER && !g.proc.pausedAt.IsZero():
			return step(p, func() { d.host.handOver(d.id, m) }, least, most)
		case time.Since(g.proc.pausedAt) >= switchoverWait:
			return step(p, give, least, most)
		}
		p.wait = switchoverWait - time.Since(g.proc.pausedAt)
	case cloud.MigrationHandedOver:
		if phase == agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK {
			return step(p, func() { d.host.resume(d.id, m.GetAttempt(), want) }, least, most)
		}
	}
	return p
}

// receive returns the plan of the target of a migration.
func (d *driven) receive(want *agentv1.AssignedVm, g *guest) plan {
	m := want.GetMigration()
	fail := func() { d.host.giveUp(d.id, m.GetAttempt()) }
	const least, most = time.Millisecond, 200 * time.Millisecond
	incoming := g != nil && g.proc != nil && g.proc.incoming == m.GetAttempt()
	switch {
	case g != nil && g.migration.attempt == m.GetAttempt() && g.migration.state == cloud.MigrationRunning:
		if g.proc == nil && g.live {
			return step(reportOnly(g), func() { d.recordExit(g) }, least, most)
		}
		return reportOnly(g)
	case g != nil && g.migration.given >= m.GetAttempt():
		return reportOnly(g)
	case g == nil || !g.built && !g.refused:
		return step(plan{seen: cloud.ObservedBuilding}, func() { d.host.build(d.id) }, 100*time.Millisecond, 2*time.Second)
	case g.refused:
		return step(reportOnly(g), fail, least, most)
	case !incoming && m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_PREPARE && len(m.GetMachine()) > 0 && g.migration.attempt != m.GetAttempt():
		return step(reportOnly(g), func() { d.host.await(want) }, least, 2*time.Second)
	case !incoming && (g.migration.attempt == m.GetAttempt() || m.GetPhase() != agentv1.MigrationPhase_MIGRATION_PHASE_PREPARE):
		return step(reportOnly(g), fail, least, most)
	case !incoming:
		return reportOnly(g)
	case d.leaseEnded:
		return step(reportOnly(g), fail, least, most)
	case g.proc.received && m.GetPhase() != agentv1.MigrationPhase_MIGRATION_PHASE_TRANSFER:
		return step(reportOnly(g), func() { d.host.resume(d.id, m.GetAttempt(), want) }, least, most)
	case m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK:
		return step(reportOnly(g), fail, least, most)
	}
	return reportOnly(g)
}

// sends reports whether a guest of the host is being migrated to another host, and has not been handed over.
func (h *host) sends() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, g := range h.guests {
		if g.proc != nil && g.proc.incoming == 0 && (g.migration.state == cloud.MigrationPrepared || g.migration.state == cloud.MigrationTransferring) {
			return true
		}
	}
	return false
}

// pause pauses the guest on the source, which then waits for the switchover.
func (h *host) pause(id cloud.VMID, attempt uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc != nil && g.migration.attempt == attempt {
		g.proc.paused, g.proc.pausedAt = true, time.Now()
		g.migration.state = cloud.MigrationAtSwitchover
		h.f.audit.stopped(h, id)
	}
}

// cancelMigration stores that the source never hands the guest over, and continues the guest. If the source has handed the
// guest over, the migration was rolled back: cancelMigration then does nothing until the volumes are taken back.
func (h *host) cancelMigration(id cloud.VMID, attempt uint64, want *agentv1.AssignedVm) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil || g.migration.state == cloud.MigrationHandedOver && !h.takeBackVolumes(id, want) {
		return
	}
	g.migration.given = max(g.migration.given, attempt)
	if g.migration.attempt == attempt {
		g.migration.state = cloud.MigrationCancelled
	}
	if g.proc != nil && g.proc.paused {
		g.proc.paused = false
		h.f.audit.resumed(h, id)
		h.checkWriter(id, g.proc)
	}
	h.f.count("migrations that the source cancelled")
}

// handOver stores that the source has handed the guest over, and sends the rest of the guest's state to the target.
// With a probability of 10 %, the state does not arrive.
func (h *host) handOver(id cloud.VMID, m *agentv1.AssignedMigration) {
	h.change(id, func(r *record) { r.migration.state = cloud.MigrationHandedOver })
	if target := h.f.hostOf(cloud.NodeID(m.GetPeerNodeId())); target != nil && !h.chance(10) {
		target.arrive(id, m.GetAttempt())
	}
}

// arrive gives the target the complete state of the guest, if it has a process that waits for it.
func (h *host) arrive(id cloud.VMID, attempt uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil || g.proc == nil || g.proc.incoming != attempt {
		return
	}
	g.proc.received, g.migration.state = true, cloud.MigrationReceived
	if h.changed != nil {
		h.changed(id)
	}
}

// await starts a process that waits for the guest's state. It does nothing if a volume cannot be opened yet. With a probability of 5 %, it gives up instead.
func (h *host) await(want *agentv1.AssignedVm) {
	id, attempt := cloud.VMID(want.GetVmId()), want.GetMigration().GetAttempt()
	if h.chance(5) {
		h.giveUp(id, attempt)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil || g.proc != nil {
		return
	}
	volumes := h.standbyVolumes(id, want)
	if volumes == nil {
		return
	}
	h.pids++
	g.proc = &proc{pid: h.pids, start: want.GetStarts(), since: time.Now(), nics: nicsOf(want), incoming: attempt,
		takes: cloud.Capacity{VCPUs: want.GetVcpus(), MemoryMiB: want.GetMemoryMib()}, volumes: volumes}
	g.stopsWithLease = true // until the control plane knows that the guest runs here
	g.migration.attempt, g.migration.state = attempt, cloud.MigrationPrepared
}

// giveUp stores that the target never runs the guest of an attempt, and ends its process.
func (h *host) giveUp(id cloud.VMID, attempt uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil {
		return
	}
	if g.proc != nil {
		h.ended(id, g, cloud.ExitRequested, "")
	}
	g.migration = migrationRecord{attempt, cloud.MigrationFailed, max(g.migration.given, attempt)}
	h.f.count("migrations that the target gave up")
}

// resume continues the guest: on the target, or on the source after a rollback. It does nothing if the host cannot get the
// volumes yet.
func (h *host) resume(id cloud.VMID, attempt uint64, want *agentv1.AssignedVm) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil || g.proc == nil {
		return
	}
	if !(g.proc.incoming == attempt && h.activateVolumes(id, want) || g.proc.incoming != attempt && h.takeBackVolumes(id, want)) {
		return
	}
	if g.proc.incoming == attempt {
		g.startsDone, g.rebootsBegun, g.rebootsDone, g.resetsDone = want.GetStarts(), want.GetReboots(), want.GetReboots(), want.GetResets()
		g.live = true
		h.f.count("guests that run on another host")
	} else {
		h.f.count("guests that were rolled back")
	}
	g.proc.paused, g.proc.incoming, g.proc.up = false, 0, true
	g.migration.state = cloud.MigrationRunning
	h.f.audit.resumed(h, id)
	h.checkWriter(id, g.proc)
}

// resumed records that a host continues a guest that it has paused or received, and reports a violation if another host
// runs the guest.
func (a *witness) resumed(h *host, id cloud.VMID) {
	t := &a.truth
	t.mu.Lock()
	defer t.mu.Unlock()
	if other := t.runner[id]; other != nil && other != h {
		a.f.fail("two hosts run VM %s: %s, and %s after a migration", id, other.name, h.name)
	}
	t.runner[id] = h
}

// migrate begins a migration of a VM, and sometimes cancels it.
func (t *tenantClient) migrate(ctx context.Context, v *owned) {
	seconds := uint32(5 + t.rng.IntN(60))
	wait := t.rng.IntN(3) == 0
	t.power(ctx, "migrate", v, func(ctx context.Context, p *process, body [32]byte) (vm.PowerResult, error) {
		return p.vms.Migrate(ctx, tenant.Default, v.id, "", seconds, wait, body)
	})
	if t.rng.IntN(6) != 0 {
		return
	}
	t.power(ctx, "cancel the migration of", v, func(ctx context.Context, p *process, _ [32]byte) (vm.PowerResult, error) {
		now, err := p.vms.CancelMigration(ctx, tenant.Default, v.id)
		return vm.PowerResult{VM: &now}, err
	})
}

// migratable changes the request for a VM so that the VM can be migrated: without volumes, or with one that several hosts
// can use.
func (t *tenantClient) migratable(w *vm.CreateRequest) {
	w.Spec.Disks = slices.DeleteFunc(w.Spec.Disks, func(d cloud.Disk) bool { return d.Volume != "" })
	for _, v := range t.volumes {
		if v.movable && !v.leaving && t.rng.IntN(2) == 0 {
			w.Spec.Disks = append(w.Spec.Disks, cloud.Disk{ID: "v0", Volume: v.id})
			return
		}
	}
}
