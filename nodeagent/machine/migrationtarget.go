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
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// receive records that the host is the target of the attempt, launches QEMU, and starts the tunnel. If a tap or a volume
// cannot be opened or the record cannot be written, receive returns the error, and the action is tried again. Any other failure
// ends the attempt: receive or the next plan records it.
func (v *VM) receive(ctx context.Context, want *agentv1.AssignedVm) error {
	began := time.Now()
	r := v.record
	m := want.GetMigration()
	spec, err := v.incomingSpec(want)
	if err != nil {
		return v.recordFailure(ctx, want, brief(err))
	}
	volumes, err := v.openStandby(ctx, want, spec)
	if errors.Is(err, volume.ErrRefused) || errors.Is(err, volume.ErrStale) {
		return v.recordFailure(ctx, want, brief(err))
	}
	if err != nil {
		v.set.counts.launchFailures.Add(1)
		return err
	}
	defer volumes.close()
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
	process, err := v.launch(ctx, want, spec, taps, volumes, v.set.o.QEMU.LaunchIncoming)
	if err == nil {
		v.attach(process)
		v.transfer = transfer{attempt: m.GetAttempt()}
		err = v.confirmStandby(ctx, want)
	}
	if err == nil {
		err = v.prepareIncoming(ctx, m)
	}
	if err == nil {
		v.set.countLaunch(began)
		return nil
	}
	v.set.counts.launchFailures.Add(1)
	if v.process != nil {
		v.transfer.failure = brief(err) // The next plan ends QEMU.
		return nil
	}
	return errors.Join(v.closeTaps(ctx, spec.NICs), v.recordFailure(ctx, want, brief(err)))
}

// incomingSpec returns the Spec of the source's QEMU. It returns an error if the size, the disks or the network
// interfaces in it differ from those of the assigned VM, or if the accelerator is not that of this host.
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
	case s.UEFI != own.UEFI || s.SecureBoot != own.SecureBoot || s.TPM != own.TPM:
		return qemu.Spec{}, errors.New("the firmware or the TPM of the VM at the source differs from the assigned one")
	case s.Kernel != own.Kernel || s.Initrd != own.Initrd || s.CDROM != own.CDROM || s.Windows != own.Windows || s.LocalTime != own.LocalTime:
		return qemu.Spec{}, errors.New("the kernel, the CD-ROM drive or the clock of the VM at the source differs from the assigned one")
	case s.ID != own.ID || s.VCPUs != own.VCPUs || s.MemoryMiB != own.MemoryMiB || s.Cmdline != own.Cmdline || s.Seed != own.Seed ||
		s.DedicatedCPUs != own.DedicatedCPUs || s.Hugepages != own.Hugepages:
		return qemu.Spec{}, errors.New("the vCPUs, memory, huge pages, CPU policy or command line of the VM at the source differ from the assigned ones")
	case s.Accel != own.Accel:
		return qemu.Spec{}, fmt.Errorf("the source runs the guest with %s, and this host with %s", s.Accel, own.Accel)
	case len(s.Disks) != len(own.Disks) || len(s.NICs) != len(own.NICs):
		return qemu.Spec{}, errors.New("the disks or network interfaces at the source differ from the assigned ones")
	}
	for _, d := range own.Disks {
		same := func(other qemu.Disk) bool {
			if d.Volume != "" { // openStandby compares the rest.
				return other.ID == d.ID && other.Bus == d.Bus && other.Volume == d.Volume
			}
			return other.ID == d.ID && other.Bus == d.Bus && other.Base == d.Base && other.Volume == "" && other.RBD == nil && !other.Encrypted
		}
		if !slices.ContainsFunc(s.Disks, same) {
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

// prepareIncoming makes QEMU wait for the guest's state, and starts the tunnel of the target.
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
	channels := int(m.GetMemoryChannels())
	var qemuEnd, tunnelEnd *os.File
	if channels == 0 {
		if qemuEnd, tunnelEnd, err = tunnel.SocketPair(); err != nil {
			return err
		}
		defer tunnelEnd.Close()
	} else if qemuEnd, err = tunnel.Listen(v.home.Migration(), tunnel.MemorySocket); err != nil {
		return err
	}
	defer qemuEnd.Close()
	if err := v.process.PrepareIncoming(ctx, listener, qemuEnd, channels); err != nil {
		return err
	}
	c := tunnel.Config{
		Role: tunnel.Target, VM: string(v.id), Attempt: m.GetAttempt(), Peer: m.GetPeerNodeId(), Identity: identity,
		Dir: v.home.Migration(), Address: address, FirstPort: o.FirstPort, LastPort: o.LastPort,
		Channels: channels, Disks: v.process.Record().Spec.Copies(),
	}
	_, err = tunnel.Start(ctx, o.Command, c, tunnelEnd, pidfd)
	return err
}

// arrive makes the state of the firmware durable, records that the guest runs at this host, activates its volumes, and
// starts its CPUs. It sets the counters of executed starts, reboots and resets to those of the assignment: the source has
// executed these requests.
func (v *VM) arrive(ctx context.Context, want *agentv1.AssignedVm) error {
	r := v.record
	if r.Migration.Committed != r.Migration.Incoming {
		if err := v.process.EndIncoming(ctx); err != nil {
			return err
		}
		if err := v.process.SyncFirmware(); err != nil {
			v.transfer.failure = brief(err) // The source can still continue the guest.
			return v.process.PowerOff(ctx)
		}
		r.Migration.Committed = r.Migration.Incoming
		r.StartsDone, r.ResetsDone = want.GetStarts(), want.GetResets()
		r.RebootsBegun, r.RebootsDone = want.GetReboots(), want.GetReboots()
		if err := v.write(r); err != nil {
			return err
		}
	}
	if err := v.activateVolumes(ctx, want); err != nil {
		return err
	}
	keys, err := v.reopenKeys(want)
	if err != nil {
		return err
	}
	if err := v.process.ResumeMigrated(ctx, keys); err != nil {
		return err
	}
	v.pausedSince = time.Time{}
	// An error is ignored, because the guest runs already. Without the announcement, switches learn the new place of
	// the guest from its next packet.
	_ = v.process.Announce(ctx)
	return tunnel.Stop(v.home.Migration())
}

// recordFailure records that the attempt has failed at this host as the target. The caller must call it only if the VM
// has no process, or if its QEMU is about to end. recordFailure also counts the starts of the assignment as executed,
// so that the host does not start the VM later.
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
