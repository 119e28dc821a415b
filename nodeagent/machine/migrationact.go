package machine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/tunnel"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MigrationOptions are the settings and functions with which a host takes part in migrations. Those without another
// comment are required.
type MigrationOptions struct {
	// Command starts a tunnel process. The program must call tunnel.Main.
	Command []string
	// Identity returns the certificate and the private key of the host, and the authority of the cluster.
	Identity func() (tunnel.Identity, error)
	// Address returns the IP address at which the tunnels of this host listen. FirstPort and LastPort are the first and
	// the last port that they use.
	Address             func() (string, error)
	FirstPort, LastPort uint16
	// MaxDowntime is the maximum time for which the rest of the memory may be sent while the guest is stopped, if the
	// control plane sets none. 0 means defaultMaxDowntime.
	MaxDowntime time.Duration
	// MaxBytesPerSecond is the maximum rate of a transfer, if the control plane sets none. 0 means no limit.
	MaxBytesPerSecond uint64
	// SendRunning makes the host send the memory of all guests while they run. Without it, the host does so only for
	// guests under KVM. It is for tests with an idle guest: under TCG, QEMU does not copy the memory of a running guest
	// correctly if the guest writes to it.
	SendRunning bool
}

const (
	// beginWithin is the maximum time of BeginTransfer. It opens one stream for each disk.
	beginWithin = time.Minute
	// progressInterval is the minimum time between two reports of a transfer between which only the progress has
	// changed.
	progressInterval = time.Second
)

var errNoMigration = errors.New("this host has no migration settings")

// transfer is the state of a migration that the agent keeps in memory only.
type transfer struct {
	attempt uint64
	// failure is the reason why the attempt cannot complete, or "".
	failure string
	address string // address of the tunnel of a target
	// sent and total are the progress in bytes, and movedAt is when they last changed. shownSent is the value of sent
	// in the last report, and shownAt is when it was set. readyAt is when the source became ready for the switchover.
	// stoppedAt is when the source stopped the guest, and downtime is the time from then until the source was ready for the
	// switchover. moved is the number of bytes of memory that were sent in all passes. ending is Transfer.Ending.
	sent, total, moved uint64
	shownSent          uint64
	movedAt, shownAt   time.Time
	readyAt, stoppedAt time.Time
	downtime           time.Duration
	ending             bool
	memory             memory
}

// observeTransfer updates v.transfer, and returns the observed state of a migration on the host. If QEMU does not
// answer, observeTransfer also sets v.guest to Unresponsive.
func (v *VM) observeTransfer(ctx context.Context) Transfer {
	r := v.record.Migration
	if v.process == nil || r.Outgoing == 0 && r.Incoming == 0 {
		return Transfer{}
	}
	if attempt := max(r.Outgoing, r.Incoming); v.transfer.attempt != attempt {
		v.transfer = transfer{attempt: attempt}
	}
	t := &v.transfer
	out := Transfer{Failure: t.failure, Held: v.process.Migrating(), Disks: len(v.process.Record().Spec.Copies()),
		Running: r.Running != 0 && r.Running == r.Outgoing, Ending: t.ending}
	if o := v.set.o.Migration; o != nil {
		out.MaxDowntime = o.MaxDowntime
	}
	if r.Outgoing != 0 {
		t.stoppedAt, out.Stopped = v.process.StoppedForMigration()
	}
	if s, running, err := tunnel.Find(v.home.Migration()); err == nil && running && s.Attempt == t.attempt {
		out.Tunnel, t.address = true, s.Address
	}
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	m, err := v.process.Migration(ctx)
	if t.movedAt.IsZero() {
		t.movedAt = time.Now()
	}
	if err != nil {
		if v.guest != None && v.guest != Off {
			v.guest, v.trouble = Unresponsive, "QEMU does not answer"
		}
		out.StalledFor = time.Since(t.movedAt)
		return out
	}
	out.Status = transferStatus(r, out.Held || out.Running, m)
	out.Mirrors, out.Ready = len(m.Mirrors), len(m.Mirrors) == out.Disks
	for _, one := range m.Mirrors {
		out.Ready = out.Ready && one.Ready
		if one.Ended && out.Failure == "" && r.sending() {
			out.Failure = brief(fmt.Errorf("a disk could not be copied: %s", one.Error))
		}
	}
	if out.Failure == "" && out.Status == "failed" && r.sending() {
		out.Failure = brief(fmt.Errorf("QEMU could not send the state of the guest: %s", m.Error))
	}
	if m.SentBytes != t.sent || m.TotalBytes != t.total || m.Memory.Sent != t.moved {
		t.sent, t.total, t.moved, t.movedAt = m.SentBytes, m.TotalBytes, m.Memory.Sent, time.Now()
	}
	if out.Running && out.Status == "active" {
		t.memory.observe(m.Memory, time.Now())
		out.Memory = t.memory
	}
	ready := m.Status == "pre-switchover" && r.Copied == r.Outgoing
	switch {
	case !ready:
		t.readyAt = time.Time{}
	case t.readyAt.IsZero():
		t.readyAt = time.Now()
		if !t.stoppedAt.IsZero() {
			t.downtime = t.readyAt.Sub(t.stoppedAt)
		}
	}
	out.StalledFor, out.SwitchoverFor = time.Since(t.movedAt), max(since(t.readyAt), 0)
	return out
}

// transferStatus returns Transfer.Status for the state m of QEMU. A QEMU that was the target or the source of an earlier
// migration reports the status of that migration until it sends memory itself. For a source that has not yet made QEMU
// send memory, transferStatus therefore returns "". The parameter begun is true if an agent has called SendState, even
// if that agent ended before it sent the command to QEMU. QEMU cannot complete the current attempt until the source has
// handed the guest over. Until then, the status completed belongs to an earlier migration, and transferStatus returns
// "".
func transferStatus(r Migrations, begun bool, m qemu.Migration) string {
	switch {
	case m.Status == "none", r.sending() && !begun && !m.Active():
		return ""
	case r.sending() && r.HandedOver != r.Outgoing && m.Status == "completed":
		return ""
	}
	return m.Status
}

// reportMigration returns the report of the assigned migration, or nil if there is none.
func (v *VM) reportMigration(want *agentv1.AssignedVm, p Plan) *cloud.MigrationObservation {
	m := want.GetMigration()
	if m == nil {
		return nil
	}
	o := &cloud.MigrationObservation{Attempt: m.GetAttempt(), State: p.Migration}
	t := &v.transfer
	switch p.Migration {
	case cloud.MigrationPrepared:
		if m.GetRole() == agentv1.MigrationRole_MIGRATION_ROLE_TARGET {
			o.Address = t.address
		} else {
			var err error
			o.MemoryChannels = v.memoryChannels(m)
			if o.Machine, err = describeMachine(v.process.Machine()); err != nil {
				o.State, o.Error = cloud.MigrationUnknown, brief(err) // The control plane ends the migration.
			}
		}
	case cloud.MigrationCancelled, cloud.MigrationFailed:
		o.Error = v.record.Migration.Error
	case cloud.MigrationTransferring, cloud.MigrationAtSwitchover, cloud.MigrationHandedOver:
		if time.Since(t.shownAt) >= progressInterval || p.Migration != cloud.MigrationTransferring {
			// In each further pass over the memory, t.sent begins at a smaller number.
			t.shownSent, t.shownAt = max(t.shownSent, t.sent), time.Now()
		}
		o.TotalBytes, o.SentBytes, o.DowntimeMS = t.total, t.shownSent, uint32(t.downtime.Milliseconds())
	}
	return o
}

// describeMachine returns the description of the source's QEMU for the target. It returns an error if the description
// could not be made, or has more than cloud.MaxMigrationMachine bytes.
func describeMachine(machine []byte, err error) ([]byte, error) {
	switch {
	case err != nil:
		return nil, fmt.Errorf("the source cannot describe its QEMU: %w", err)
	case len(machine) > cloud.MaxMigrationMachine:
		return nil, fmt.Errorf("the source's description of the VM has %d bytes, the limit is %d", len(machine), cloud.MaxMigrationMachine)
	}
	return machine, nil
}

// actMigration executes an action of a migration.
func (v *VM) actMigration(ctx context.Context, p Plan, want *agentv1.AssignedVm) error {
	r := v.record
	attempt := want.GetMigration().GetAttempt()
	switch p.Action {
	case BeginTransfer:
		r.Migration.Outgoing, r.Migration.Error = attempt, ""
		if err := v.write(r); err != nil {
			return err
		}
		v.transfer = transfer{attempt: attempt}
		return v.fail(ctx, v.beginTransfer(ctx, want.GetMigration()))
	case SendState:
		return v.sendState(ctx, want.GetMigration())
	case StopGuest:
		err := v.process.StopGuest(ctx)
		v.transfer.ending = err == nil
		return v.fail(ctx, err)
	case CompleteDisks:
		if err := v.process.EndMirrors(ctx); err != nil {
			return v.fail(ctx, err)
		}
		r.Migration.Copied = r.Migration.Outgoing
		return v.write(r)
	case HandOver:
		r.Migration.HandedOver = r.Migration.Outgoing
		if err := v.write(r); err != nil {
			return err
		}
		if _, err := v.findTunnel(r.Migration.Outgoing); err != nil {
			return err // The target fails, and the guest continues here after the rollback.
		}
		// After an error, the guest is not resumed here, because QEMU may have sent the state.
		return v.process.HandOver(ctx)
	case CancelTransfer:
		if !r.Migration.sending() {
			r.Migration.Outgoing = attempt
		}
		r.Migration.Cancelled, r.Migration.Error = r.Migration.Outgoing, p.Reason
		return v.write(r)
	case EndTransfer:
		return v.endTransfer(ctx, want)
	case Receive:
		return v.receive(ctx, want)
	case Arrive:
		return v.arrive(ctx, want)
	case RecordFailure:
		return v.recordFailure(ctx, want, p.Reason)
	case Settle:
		if err := tunnel.Stop(v.home.Migration()); err != nil {
			return err
		}
		r.Migration.Incoming = 0
		return v.write(r)
	}
	return fmt.Errorf("no such action: %d", p.Action)
}

// fail stores err as the reason why the attempt cannot complete. The next plan then cancels the attempt. fail returns
// nil in this case, because the action must not be repeated. If ctx was cancelled because the agent ends, fail only
// returns err.
func (v *VM) fail(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil || errors.Is(err, context.DeadlineExceeded) {
		v.transfer.failure = brief(err)
		return nil
	}
	return err
}
