package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/tunnel"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// beginTransfer starts the tunnel of a source, and makes QEMU start to copy the disks to the target. It copies nothing if
// the guest could not be handed over afterwards.
func (v *VM) beginTransfer(ctx context.Context, m *agentv1.AssignedMigration) error {
	o := v.set.o.Migration
	if o == nil {
		return errNoMigration
	}
	if err := v.process.CheckMigratable(ctx); err != nil {
		return err
	}
	if err := v.process.CheckEnded(ctx); err != nil {
		return err
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
		Channels: int(m.GetMemoryChannels()), Sockets: v.home.Sockets(), UID: v.home.UID(),
	}, nil, pidfd)
	if err != nil {
		return err
	}
	return v.process.BeginMirrors(ctx, v.maxRate(m), func(ctx context.Context, disk string) (*os.File, error) {
		return tunnel.Dial(ctx, v.home.Migration(), disk)
	})
}

// memoryChannels returns the number of connections, besides the main one, over which the source can send the memory. It
// is 0 if QEMU can use only the main one, or would not keep to the maximum rate.
func (v *VM) memoryChannels(m *agentv1.AssignedMigration) uint32 {
	if v.set.o.Migration == nil || !v.process.SendsChannels() {
		return 0
	}
	if rate := v.maxRate(m); rate > 0 && rate < qemu.ChannelRate {
		return 0
	}
	return qemu.MemoryChannels
}

// maxRate returns the maximum rate of the transfer in bytes per second, or 0 if there is no limit.
func (v *VM) maxRate(m *agentv1.AssignedMigration) uint64 {
	if rate := m.GetMaxBytesPerSecond(); rate > 0 {
		return rate
	}
	return v.set.o.Migration.MaxBytesPerSecond
}

// sendState makes QEMU send the guest's state through the tunnel. It stops the guest first if
// qemu.Process.CanSendRunning is false, if the target's agent cannot receive the memory of a running guest, or if the
// guest runs under TCG and MigrationOptions.SendRunning is not set.
func (v *VM) sendState(ctx context.Context, m *agentv1.AssignedMigration) error {
	o := v.set.o.Migration
	if o == nil {
		return v.fail(ctx, errNoMigration)
	}
	to := qemu.Route{Channels: int(m.GetMemoryChannels()), Socket: tunnel.MemorySocket}
	running, err := v.findTunnel(m.GetAttempt())
	if err != nil {
		return v.fail(ctx, err)
	}
	if running.Channels != to.Channels {
		// A leader of an earlier version drops the number of channels. The target's QEMU waits for those of before.
		return v.fail(ctx, fmt.Errorf("the migration was begun with %d memory channels, and now has %d", running.Channels, to.Channels))
	}
	able, err := v.process.CanSendRunning(ctx)
	if err != nil {
		return v.fail(ctx, err)
	}
	send := v.process.SendState
	if able && m.GetSendRunning() && (v.process.Record().Spec.Accel == qemu.KVM || o.SendRunning) {
		r := v.record
		r.Migration.Running = r.Migration.Outgoing
		if err := v.write(r); err != nil {
			return err
		}
		send = v.process.SendRunning
	}
	if to.Channels == 0 {
		if to.Stream, err = tunnel.Dial(ctx, v.home.Migration(), tunnel.Memory); err != nil {
			return v.fail(ctx, err)
		}
		defer to.Stream.Close()
	}
	return v.fail(ctx, send(ctx, v.maxRate(m), to))
}

// findTunnel returns the state of the tunnel process of the attempt at the source, and an error if it does not run.
func (v *VM) findTunnel(attempt uint64) (tunnel.State, error) {
	s, running, err := tunnel.Find(v.home.Migration())
	if err == nil && (!running || s.Attempt != attempt) {
		err = errors.New("the tunnel process of the source has ended")
	}
	return s, err
}

// endTransfer removes all parts of a cancelled migration from the host and from QEMU, and resumes the guest if the
// migration has stopped it. After a rollback, the volumes are taken back before. If the target may have written to one
// of them, endTransfer ends QEMU instead, because the guest's memory does not match the volume any more.
func (v *VM) endTransfer(ctx context.Context, want *agentv1.AssignedVm) error {
	if s, running, err := tunnel.Find(v.home.Migration()); err == nil && running && s.Channels > 0 {
		if v.process.StopSending(ctx) != nil && ctx.Err() == nil && tunnel.FailMemory(v.home.Migration()) == nil {
			// After an error, the streams are closed all the same, because the guest must be resumed.
			_ = v.process.StopSending(ctx)
		}
	}
	if err := ctx.Err(); err != nil {
		return err // The agent ends. QEMU may still send: the next agent must find the tunnel process and stop QEMU first.
	}
	if err := tunnel.Stop(v.home.Migration()); err != nil { // closes the streams
		return err
	}
	err := v.process.CancelMigration(ctx)
	if errors.Is(err, qemu.ErrNotEnded) && v.record.Migration.HandedOver != v.record.Migration.Outgoing {
		// The tunnel process was killed while QEMU sent the memory. Before the guest is handed over, the thread that waits
		// does not prevent that the guest runs. The next migration is refused with the same error (see beginTransfer).
		err = nil
	}
	if err != nil {
		return err
	}
	if !v.process.Migrating() {
		return nil
	}
	for _, d := range v.process.Record().Spec.Disks {
		if at, err := findVolume(want, d.ID); err == nil && takesBack(want.GetDisks()[at].GetVolume(), d) {
			if ended, err := v.takeBackDisk(ctx, d.ID, want); ended || err != nil {
				return err
			}
		}
	}
	var keys map[string]qemu.Key
	if m := v.record.Migration; m.HandedOver == m.Outgoing { // Without a switchover, QEMU still has the disks open.
		var err error
		if keys, err = v.reopenKeys(want); err != nil {
			return err
		}
	}
	if err := v.process.ResumeMigrated(ctx, keys); err != nil {
		return err
	}
	v.pausedSince = time.Time{}
	return nil
}
