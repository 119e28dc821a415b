package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/pinning"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/tunnel"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// launchWithin is the maximum time of a launch, also on a loaded host.
	launchWithin = 90 * time.Second
	// launchGrace is how long a launch in progress may continue after the agent has begun to stop. A launch that is
	// interrupted counts as failed, so it gets this time to complete.
	launchGrace = 5 * time.Second
	// plugWithin is the maximum time to attach a volume to a running guest.
	plugWithin = 5 * time.Minute
)

// act executes the action of the plan p. The parameter want is the desired state for which NextAction returned p.
func (v *VM) act(ctx context.Context, p Plan, want *agentv1.AssignedVm) error {
	a := p.Action
	if a != Build && a != Start && a != Relaunch && a != Receive {
		within := actWithin
		switch a {
		case PlugDisk: // may fetch an image
			within = plugWithin
		case BeginTransfer:
			within = beginWithin
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, within)
		defer cancel()
	}
	switch a {
	case Build:
		return v.build(ctx, want)
	case Start:
		r := v.record
		r.StartsDone = want.GetStarts()
		// The new QEMU also fulfils the reboots and resets that were requested before this start.
		r.RebootsBegun, r.RebootsDone, r.ResetsDone = want.GetReboots(), want.GetReboots(), want.GetResets()
		return v.start(ctx, want, r)
	case Relaunch:
		r := v.record
		r.RebootsDone = r.RebootsBegun
		return v.start(ctx, want, r)
	case Resume, ResumeAfterDiskError:
		if a == Resume {
			if err := v.confirmVolumes(ctx); err != nil {
				return err
			}
		}
		if err := v.process.Resume(ctx); err != nil {
			return err
		}
		v.pausedSince = time.Time{}
		return nil
	case PressPowerButton:
		if err := v.process.PressPowerButton(ctx); err != nil {
			return err
		}
		v.pressedAt = time.Now()
		v.shutDownGuest(ctx)
		return nil
	case PowerOff:
		return v.powerOff(ctx)
	case RecordExit:
		if err := v.closeLastTaps(ctx, nil); err != nil {
			return err
		}
		if err := v.releaseVolumes(ctx, v.unreleased); err != nil {
			return err
		}
		r := v.record
		r.Live, r.End = false, End{Exit: v.exit, Error: v.trouble}
		return v.write(r)
	case RecordLeaseRule:
		r := v.record
		r.StopsWithLease = want.GetStopsWithLease()
		return v.write(r)
	case Reset:
		return v.reset(ctx, func(r *Record) { r.ResetsDone = want.GetResets() })
	case Restart:
		return v.reset(ctx, func(r *Record) { r.RebootsDone = r.RebootsBegun })
	case Reboot:
		r := v.record
		r.RebootsBegun = want.GetReboots()
		return v.write(r)
	case AckStart:
		r := v.record
		r.StartsDone, r.Live = want.GetStarts(), true
		return v.write(r)
	case AdoptCounters:
		return v.write(v.record.withCountersOf(v.set.o.Cluster(), want))
	case PlugNIC, UnplugNIC:
		return v.changeNIC(ctx, a, p.NIC, want)
	case PlugDisk, UnplugDisk, ResizeDisk, FlattenDisk, TakeBackDisk:
		return v.changeDisk(ctx, a, p.Disk, want)
	case Destroy:
		return v.destroy(ctx)
	case BeginTransfer, SendState, StopGuest, CompleteDisks, HandOver, CancelTransfer, EndTransfer, Receive, Arrive, RecordFailure, Settle:
		return v.actMigration(ctx, p, want)
	}
	return fmt.Errorf("no such action: %d", a)
}

// write replaces the VM's record on disk by r, syncs it, and then sets v.record to r. If r.Cluster is empty, write
// first sets it to the id of the host's cluster.
func (v *VM) write(r Record) error {
	if r.Cluster == "" {
		r.Cluster = v.set.o.Cluster()
	}
	if err := r.write(v.set.recordPath(v.id)); err != nil {
		return err
	}
	v.record, v.exists = r, true
	return nil
}

// build creates the disks and fetches every image that a start needs.
func (v *VM) build(ctx context.Context, want *agentv1.AssignedVm) error {
	began := time.Now()
	err := v.makeDisks(ctx, want)
	switch {
	case err == nil:
		v.set.counts.builds.Add(1)
		v.set.o.OnBuild(time.Since(began))
	case ctx.Err() == nil:
		v.set.counts.buildFailures.Add(1)
		v.refused = errors.Is(err, disk.ErrRefused) || errors.Is(err, qemu.ErrInvalid)
	}
	return err
}

func (v *VM) makeDisks(ctx context.Context, want *agentv1.AssignedVm) error {
	if err := v.set.check(want); err != nil {
		return err
	}
	// The record is written first, so that List finds the VM before any other file of it exists.
	if err := v.write(v.record); err != nil {
		return err
	}
	var err error
	if v.home, err = v.set.o.Homes.Claim(string(v.id)); err != nil {
		return err
	}
	if err := v.fetchImages(ctx, want); err != nil {
		return err
	}
	if err := disk.Build(ctx, v.set.o.Images, v.home.Disks(), v.home.UID(), disks(want)); err != nil {
		return err
	}
	if err := v.writeSeed(want); err != nil {
		return err
	}
	r := v.record
	r.Built = true
	return v.write(r)
}

// fetchImages downloads those images of an assigned VM that this host does not have.
func (v *VM) fetchImages(ctx context.Context, want *agentv1.AssignedVm) error {
	for _, img := range images(want) {
		if err := v.set.o.Images.Ensure(ctx, img); err != nil {
			return err
		}
	}
	return nil
}

// start opens the VM's taps and volumes, writes the start to the VM's record, and then launches QEMU. If a tap or
// volume cannot be opened or the first write fails, the start is tried again later. If the launch fails, the failure is
// recorded as the exit of this start, and the start is not tried again.
func (v *VM) start(ctx context.Context, want *agentv1.AssignedVm, r Record) error {
	began := time.Now()
	wanted := nics(want)
	if err := v.closeLastTaps(ctx, wanted); err != nil {
		return err
	}
	if err := v.releaseVolumes(ctx, v.unreleased); err != nil { // the volumes that the process had open before a reboot
		return err
	}
	taps, err := v.openTaps(ctx, wanted)
	if err != nil {
		v.set.counts.launchFailures.Add(1)
		return err
	}
	defer closeFiles(taps) // a process has its own copies
	volumes, err := v.openVolumes(ctx, want)
	if err != nil {
		v.set.counts.launchFailures.Add(1)
		return errors.Join(err, v.closeTaps(ctx, wanted))
	}
	defer volumes.close()
	r.Live, r.End, r.Mark = true, End{}, r.startMark()
	if err := v.write(r); err != nil {
		volumes.close()
		return errors.Join(err, v.closeTaps(ctx, wanted), v.releaseVolumes(ctx, volumes.disks()))
	}
	ctx, cancel := launchContext(ctx)
	defer cancel()
	process, err := v.launch(ctx, want, v.set.spec(want), taps, volumes, v.set.o.QEMU.Launch)
	if err == nil {
		v.set.countLaunch(began)
		v.attach(process)
		return nil
	}
	v.set.counts.launchFailures.Add(1)
	closeErr := v.closeTaps(ctx, wanted)
	volumes.close()
	// If the release fails, the volumes are flushed when they are detached.
	closeErr = errors.Join(closeErr, v.releaseVolumes(ctx, volumes.disks()))
	r.Live, r.End = false, End{Exit: cloud.ExitFailed, Error: brief(err)}
	// v.record is set even if the write below fails. If the write fails and the agent is restarted, it finds a recorded
	// start without a process.
	v.record = r
	return fmt.Errorf("%w: %w", errEnded, errors.Join(err, closeErr, v.write(r)))
}

// errEnded is wrapped by the error of a start whose failure is recorded as its exit. Such an error is not stored in
// v.failure, because the exit has the same text.
var errEnded = errors.New("the start failed")

// launchContext returns a context that ends after launchWithin. If ctx ends, the returned context ends launchGrace
// later.
func launchContext(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithTimeout(context.WithoutCancel(ctx), launchWithin)
	stop := context.AfterFunc(ctx, func() {
		t := time.NewTimer(launchGrace)
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-longer.Done():
		}
	})
	return longer, func() { stop(); cancel() }
}

// launcher is the method Launch or LaunchIncoming of qemu.Launcher.
type launcher func(context.Context, *qemu.Home, qemu.Spec, qemu.Files, uint64, string) (*qemu.Process, error)

// launch opens the VM's files and launches QEMU with them, the taps and the volumes.
func (v *VM) launch(ctx context.Context, want *agentv1.AssignedVm, spec qemu.Spec, taps map[string]*os.File, volumes openVolumes,
	launch launcher) (*qemu.Process, error) {
	if err := v.fetchImages(ctx, want); err != nil {
		return nil, err
	}
	files := qemu.Files{Disks: map[string]qemu.Layers{}, Taps: taps}
	defer func() {
		for _, f := range []*os.File{files.Kernel, files.Initrd, files.Seed, files.CDROM} {
			if f != nil {
				f.Close()
			}
		}
	}()
	volumes.addTo(&spec, files.Disks)
	if err := v.makeRescueDisk(ctx, want); err != nil {
		return nil, err
	}
	for _, d := range ownDisks(want) {
		if d.GetVolume() != nil {
			continue
		}
		chain, err := disk.Open(v.set.o.Images, v.home.Disks(), d.GetId())
		if err != nil {
			return nil, err
		}
		defer chain.Close()
		files.Disks[d.GetId()] = qemu.Layers{Overlay: chain.Overlay, Base: chain.Base, Size: d.GetSizeBytes()}
	}
	var err error
	for _, one := range []struct {
		image *agentv1.AssignedImage
		file  **os.File
	}{{want.GetKernel(), &files.Kernel}, {want.GetInitrd(), &files.Initrd}, {want.GetCdrom(), &files.CDROM}} {
		if one.image == nil {
			continue
		}
		if *one.file, err = v.set.o.Images.Open(image(one.image)); err != nil {
			return nil, err
		}
	}
	if files.Seed, err = v.openSeed(want); err != nil {
		return nil, err
	}
	if err := v.takeCPUs(&spec); err != nil {
		return nil, err
	}
	process, err := launch(ctx, v.home, spec, files, want.GetGeneration(), v.record.Mark)
	if err != nil {
		v.set.o.CPUs.Release(string(v.id))
	}
	return process, err
}

// takeCPUs chooses the host's CPUs for a VM with dedicated CPUs.
func (v *VM) takeCPUs(spec *qemu.Spec) error {
	if !spec.DedicatedCPUs {
		return nil
	}
	cpus, node, err := v.set.o.CPUs.Take(string(v.id), spec.VCPUs)
	if err != nil {
		return err
	}
	if spec.CPUs = cpus; node != pinning.NoNode {
		spec.MemoryNode = &node
	}
	return nil
}

// makeRescueDisk deletes the rescue disk of an earlier start. If the assigned VM has a rescue disk, makeRescueDisk then
// makes it from its image.
func (v *VM) makeRescueDisk(ctx context.Context, want *agentv1.AssignedVm) error {
	if err := disk.RemoveOne(v.home.Disks(), cloud.RescueDisk); err != nil || want.GetRescue() == nil {
		return err
	}
	return disk.Build(ctx, v.set.o.Images, v.home.Disks(), v.home.UID(), []disk.Disk{diskOf(want.GetRescue())})
}

// powerOff ends the VM's process. If the VM has only processes of which it has no record, powerOff kills all processes
// of its control group.
func (v *VM) powerOff(ctx context.Context) error {
	if v.process != nil {
		return v.process.PowerOff(ctx)
	}
	if err := v.set.o.Cgroups.Kill(ctx, string(v.id)); err != nil {
		return err
	}
	v.setExit(qemu.Exit{Reason: qemu.Requested})
	return v.set.o.Cgroups.Remove(ctx, string(v.id))
}

// reset changes the record by calling note, writes it, and then resets the guest. A guest that was Paused is Waiting
// after the reset, so that NextAction resumes it.
func (v *VM) reset(ctx context.Context, note func(*Record)) error {
	r := v.record
	note(&r)
	if err := v.write(r); err != nil {
		return err
	}
	v.pressedAt = time.Time{}
	return v.process.Reset(ctx)
}

// destroy ends the VM's processes and removes its files. The record is removed last, so that List finds a VM whose
// removal was interrupted.
func (v *VM) destroy(ctx context.Context) error {
	if v.process != nil {
		if err := v.process.Kill(ctx); err != nil {
			return err
		}
		v.attach(nil)
		v.guest, v.pid = None, 0
	}
	if err := v.set.o.Cgroups.Kill(ctx, string(v.id)); err != nil {
		return err
	}
	if err := v.set.o.Cgroups.Remove(ctx, string(v.id)); err != nil {
		return err
	}
	home, err := v.set.o.Homes.Claim(string(v.id)) // Claim also opens a home whose creation was interrupted.
	if err != nil {
		return err
	}
	v.home = home
	if err := tunnel.Stop(home.Migration()); err != nil {
		return err
	}
	if err := v.closeLastTaps(ctx, nil); err != nil {
		return err
	}
	volumes, err := v.lastVolumes()
	if err == nil {
		err = v.releaseVolumes(ctx, volumes)
	}
	if err != nil {
		return err
	}
	if err := disk.Remove(home.Disks()); err != nil {
		return err
	}
	if err := home.Remove(); err != nil {
		return err
	}
	path := v.set.recordPath(v.id)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record: %w", err)
	}
	if err := atomicfile.SyncDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("remove record: %w", err)
	}
	v.home, v.exists, v.refused, v.record = nil, false, false, Record{Version: recordVersion}
	v.exit, v.trouble = 0, ""
	return nil
}
