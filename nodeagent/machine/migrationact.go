package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/tunnel"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MigrationOptions are what the host needs to take part in migrations. All are required.
type MigrationOptions struct {
	// Command is the command of the tunnel process, which calls tunnel.Main.
	Command []string
	// Identity returns the certificate and the key of the host.
	Identity func() (tunnel.Identity, error)
	// Address returns the address at which tunnels of this host listen, and FirstPort and LastPort are their ports.
	Address             func() (string, error)
	FirstPort, LastPort uint16
}

const (
	// beginWithin is the maximum time of BeginTransfer, which opens a stream for each disk.
	beginWithin = time.Minute
	// progressInterval is the minimum time between two reports that differ only in the progress.
	progressInterval = time.Second
)

var errNoMigration = errors.New("this host does not take part in migrations")

// transfer is what the agent knows about a migration and does not store on disk.
type transfer struct {
	attempt uint64
	// failure is why the attempt cannot complete, or "".
	failure string
	address string // of the tunnel of a target
	// sent and total are the progress in bytes, movedAt is when sent last changed, and shownAt when shown was set.
	sent, total        uint64
	shownSent          uint64
	movedAt, shownAt   time.Time
	readyAt, stoppedAt time.Time
	downtime           time.Duration
}

// observeTransfer updates v.transfer and returns the state of a migration on the host.
func (v *VM) observeTransfer(ctx context.Context) Transfer {
	r := v.record.Migration
	if v.process == nil || r.Outgoing == 0 && r.Incoming == 0 {
		return Transfer{}
	}
	if attempt := max(r.Outgoing, r.Incoming); v.transfer.attempt != attempt {
		v.transfer = transfer{attempt: attempt}
	}
	t := &v.transfer
	out := Transfer{Failure: t.failure, Held: v.process.Migrating(), Disks: len(v.process.Record().Spec.Disks)}
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
	out.Status, out.Mirrors, out.Ready = m.Status, len(m.Mirrors), len(m.Mirrors) == out.Disks
	if m.Status == "none" {
		out.Status = ""
	}
	for _, one := range m.Mirrors {
		out.Ready = out.Ready && one.Ready
		if one.Ended && out.Failure == "" && r.sending() {
			out.Failure = brief(fmt.Errorf("a disk could not be copied: %s", one.Error))
		}
	}
	if out.Failure == "" && m.Status == "failed" && r.sending() {
		out.Failure = brief(fmt.Errorf("QEMU could not send the state of the guest: %s", m.Error))
	}
	if m.SentBytes != t.sent || m.TotalBytes != t.total {
		t.sent, t.total, t.movedAt = m.SentBytes, m.TotalBytes, time.Now()
	}
	ready := m.Status == "pre-switchover" && r.Copied == r.Outgoing
	switch {
	case !ready:
		t.readyAt = time.Time{}
	case t.readyAt.IsZero():
		t.readyAt = time.Now()
	}
	out.StalledFor, out.SwitchoverFor = time.Since(t.movedAt), max(since(t.readyAt), 0)
	if m.Status == "completed" && t.downtime == 0 && !t.stoppedAt.IsZero() {
		t.downtime = time.Since(t.stoppedAt)
	}
	return out
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
		} else if machine, err := v.process.Machine(); err == nil && len(machine) <= cloud.MaxMigrationMachine {
			o.Machine = machine
		} else {
			o.State, o.Error = cloud.MigrationUnknown, "the description of the VM is too long"
		}
	case cloud.MigrationCancelled, cloud.MigrationFailed:
		o.Error = v.record.Migration.Error
	case cloud.MigrationTransferring, cloud.MigrationAtSwitchover, cloud.MigrationHandedOver:
		if time.Since(t.shownAt) >= progressInterval || p.Migration != cloud.MigrationTransferring {
			t.shownSent, t.shownAt = t.sent, time.Now()
		}
		o.TotalBytes, o.SentBytes, o.DowntimeMS = t.total, t.shownSent, uint32(t.downtime.Milliseconds())
	}
	return o
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
		return v.fail(ctx, v.sendState(ctx, want.GetMigration().GetMaxBytesPerSecond()))
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
		// After an error, the guest is not continued here: QEMU may have sent the state.
		return v.process.HandOver(ctx)
	case CancelTransfer:
		if !r.Migration.sending() {
			r.Migration.Outgoing = attempt
		}
		r.Migration.Cancelled, r.Migration.Error = r.Migration.Outgoing, p.Reason
		return v.write(r)
	case EndTransfer:
		return v.endTransfer(ctx)
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

// fail stores an error as the reason why the attempt cannot complete, so that the next plan cancels the attempt. It
// returns nil, because the step must not be repeated.
func (v *VM) fail(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil || errors.Is(err, context.DeadlineExceeded) {
		v.transfer.failure = brief(err)
		return nil
	}
	return err
}

// beginTransfer starts the tunnel of a source and makes QEMU copy the disks to the target.
func (v *VM) beginTransfer(ctx context.Context, m *agentv1.AssignedMigration) error {
	o := v.set.o.Migration
	if o == nil {
		return errNoMigration
	}
	identity, err := o.Identity()
	if err != nil {
		return err
	}
	pidfd, err := v.process.PIDFD()
	if err != nil {
		return err
	}
	defer pidfd.Close()
	_, err = tunnel.Start(ctx, o.Command, tunnel.Config{
		Role: tunnel.Source, VM: string(v.id), Attempt: m.GetAttempt(), Peer: m.GetPeerNodeId(), Identity: identity,
		Dir: v.home.Migration(), Address: m.GetPeerAddress(),
	}, nil, pidfd)
	if err != nil {
		return err
	}
	return v.process.BeginMirrors(ctx, m.GetMaxBytesPerSecond(), func(ctx context.Context, disk string) (*os.File, error) {
		return tunnel.Dial(ctx, v.home.Migration(), disk)
	})
}

// sendState stops the guest and makes QEMU send its state through the tunnel.
func (v *VM) sendState(ctx context.Context, rate uint64) error {
	stream, err := tunnel.Dial(ctx, v.home.Migration(), tunnel.Memory)
	if err != nil {
		return err
	}
	defer stream.Close()
	v.transfer.stoppedAt = time.Now()
	return v.process.SendState(ctx, rate, stream)
}

// endTransfer ends what is left of a migration that the record has as cancelled, and continues the guest.
func (v *VM) endTransfer(ctx context.Context) error {
	if err := tunnel.Stop(v.home.Migration()); err != nil { // closes the streams
		return err
	}
	if err := v.process.CancelMigration(ctx); err != nil {
		return err
	}
	if !v.process.Migrating() {
		return nil
	}
	if err := v.process.ResumeMigrated(ctx); err != nil {
		return err
	}
	v.pausedSince = time.Time{}
	return nil
}

// receive records that the host is the target of the attempt, launches QEMU, and starts the tunnel. If a tap cannot be
// opened or the record cannot be written, the action is repeated. After any other failure the attempt is recorded as
// failed.
func (v *VM) receive(ctx context.Context, want *agentv1.AssignedVm) error {
	r := v.record
	m := want.GetMigration()
	spec, err := v.incomingSpec(want)
	if err != nil {
		return v.recordFailure(ctx, want, brief(err))
	}
	taps, err := v.openTaps(ctx, spec.NICs)
	if err != nil {
		v.set.counts.launchFailures.Add(1)
		return err
	}
	defer closeFiles(taps) // a process has its own copies
	r.Live, r.End = true, End{}
	r.Migration.Incoming, r.Migration.Error = m.GetAttempt(), ""
	r.Mark = fmt.Sprintf("migration %d, cluster %s", m.GetAttempt(), r.Cluster)
	if err := v.write(r); err != nil {
		return errors.Join(err, v.closeTaps(ctx, spec.NICs))
	}
	ctx, cancel := launchContext(ctx)
	defer cancel()
	process, err := v.launch(ctx, want, spec, taps, openVolumes{}, v.set.o.QEMU.LaunchIncoming)
	if err == nil {
		v.attach(process)
		v.transfer = transfer{attempt: m.GetAttempt()}
		err = v.prepareIncoming(ctx, m)
	}
	if err == nil {
		v.set.counts.launches.Add(1)
		return nil
	}
	v.set.counts.launchFailures.Add(1)
	if v.process != nil {
		v.transfer.failure = brief(err) // The next plan ends QEMU.
		return nil
	}
	return errors.Join(v.closeTaps(ctx, spec.NICs), v.recordFailure(ctx, want, brief(err)))
}

// incomingSpec returns the Spec of the source's QEMU, after a check that it is that of the assigned VM.
func (v *VM) incomingSpec(want *agentv1.AssignedVm) (qemu.Spec, error) {
	if v.set.o.Migration == nil {
		return qemu.Spec{}, errNoMigration
	}
	s, err := qemu.ParseMachine(want.GetMigration().GetMachine())
	if err != nil {
		return qemu.Spec{}, err
	}
	own := v.set.spec(want)
	switch {
	case s.ID != own.ID || s.VCPUs != own.VCPUs || s.MemoryMiB != own.MemoryMiB || s.Cmdline != own.Cmdline || s.Seed != own.Seed:
		return qemu.Spec{}, errors.New("the VM at the source differs from the assigned one")
	case s.Accel != own.Accel:
		return qemu.Spec{}, fmt.Errorf("the source runs the guest with %s, and this host with %s", s.Accel, own.Accel)
	case len(s.Disks) != len(own.Disks) || len(s.NICs) != len(own.NICs):
		return qemu.Spec{}, errors.New("the disks or network interfaces at the source differ from the assigned ones")
	}
	for _, d := range own.Disks {
		same := func(other qemu.Disk) bool {
			return other.ID == d.ID && other.Bus == d.Bus && other.Base == d.Base && other.Volume == d.Volume && other.RBD == nil && !other.Encrypted
		}
		if d.Volume != "" || !slices.ContainsFunc(s.Disks, same) {
			return qemu.Spec{}, fmt.Errorf("disk %s cannot be moved to this host", d.ID)
		}
	}
	for _, n := range own.NICs {
		same := func(other qemu.NIC) bool { return other.ID == n.ID && other.Port == n.Port && other.MAC == n.MAC }
		if !slices.ContainsFunc(s.NICs, same) {
			return qemu.Spec{}, fmt.Errorf("network interface %s differs at the source", n.ID)
		}
	}
	return s, nil
}

// prepareIncoming makes QEMU wait for the guest's state, and starts the tunnel of a target.
func (v *VM) prepareIncoming(ctx context.Context, m *agentv1.AssignedMigration) error {
	o := v.set.o.Migration
	identity, err := o.Identity()
	if err != nil {
		return err
	}
	address, err := o.Address()
	if err != nil {
		return err
	}
	pidfd, err := v.process.PIDFD()
	if err != nil {
		return err
	}
	defer pidfd.Close()
	listener, err := tunnel.Listen(v.home.Migration(), tunnel.DiskSocket)
	if err != nil {
		return err
	}
	defer listener.Close()
	qemuEnd, tunnelEnd, err := tunnel.SocketPair()
	if err != nil {
		return err
	}
	defer qemuEnd.Close()
	defer tunnelEnd.Close()
	if err := v.process.PrepareIncoming(ctx, listener, qemuEnd); err != nil {
		return err
	}
	c := tunnel.Config{
		Role: tunnel.Target, VM: string(v.id), Attempt: m.GetAttempt(), Peer: m.GetPeerNodeId(), Identity: identity,
		Dir: v.home.Migration(), Address: address, FirstPort: o.FirstPort, LastPort: o.LastPort,
	}
	for _, d := range v.process.Record().Spec.Disks {
		c.Disks = append(c.Disks, d.ID)
	}
	_, err = tunnel.Start(ctx, o.Command, c, tunnelEnd, pidfd)
	return err
}

// arrive records that the guest runs here, with all counters of the assignment as done, and starts its CPUs.
func (v *VM) arrive(ctx context.Context, want *agentv1.AssignedVm) error {
	r := v.record
	if r.Migration.Committed != r.Migration.Incoming {
		if err := v.process.EndIncoming(ctx); err != nil {
			return err
		}
		r.Migration.Committed = r.Migration.Incoming
		r.StartsDone, r.ResetsDone = want.GetStarts(), want.GetResets()
		r.RebootsBegun, r.RebootsDone = want.GetReboots(), want.GetReboots()
		if err := v.write(r); err != nil {
			return err
		}
	}
	if err := v.process.ResumeMigrated(ctx); err != nil {
		return err
	}
	v.pausedSince = time.Time{}
	// The guest runs already. Without the announcement, others learn where it is when it sends a packet.
	_ = v.process.Announce(ctx)
	return tunnel.Stop(v.home.Migration())
}

// recordFailure records that the host will never have a QEMU of the attempt. QEMU has ended, or was not started. The
// starts of the assignment count as done, so that the host does not boot the guest.
func (v *VM) recordFailure(ctx context.Context, want *agentv1.AssignedVm, reason string) error {
	if err := v.closeLastTaps(ctx, nil); err != nil {
		return err
	}
	r := v.record
	if reason == "" {
		reason = "the target failed"
	}
	if v.transfer.attempt == r.Migration.Incoming && v.transfer.failure != "" {
		reason = v.transfer.failure
	}
	r.Migration.Failed = max(r.Migration.Incoming, want.GetMigration().GetAttempt(), r.Migration.Failed)
	if m := want.GetMigration(); r.Migration.Incoming != 0 && m != nil && m.GetAttempt() != r.Migration.Incoming {
		r.Migration.Failed = r.Migration.Incoming // A later attempt can still succeed.
	}
	r.Migration.Incoming, r.Migration.Error = 0, reason
	r.Live, r.End = false, End{Exit: cloud.ExitFailed, Error: reason}
	r.StartsDone = max(r.StartsDone, want.GetStarts())
	return v.write(r)
}
