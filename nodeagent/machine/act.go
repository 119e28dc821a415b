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
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// launchWithin bounds a launch on a host that is full.
	launchWithin = 90 * time.Second
	// launchGrace is how long a launch under way may go on when the agent stops: done by half it would have failed.
	launchGrace = 5 * time.Second
)

// act carries an action out.
func (m *Machine) act(ctx context.Context, a Action, want *agentv1.AssignedVm) error {
	if a != Build && a != Start && a != Relaunch {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, actWithin)
		defer cancel()
	}
	switch a {
	case Build:
		return m.build(ctx, want)
	case Start:
		r := m.record
		r.StartsDone = want.GetStarts()
		// What was asked of the guest before this start is over with it.
		r.RebootsBegun, r.RebootsDone, r.ResetsDone = want.GetReboots(), want.GetReboots(), want.GetResets()
		return m.start(ctx, want, r)
	case Relaunch:
		r := m.record
		r.RebootsDone = r.RebootsBegun
		return m.start(ctx, want, r)
	case Go, Resume:
		if err := m.process.Cont(ctx); err != nil {
			return err
		}
		m.heldSince = time.Time{}
		return nil
	case Press:
		if err := m.process.Powerdown(ctx); err != nil {
			return err
		}
		m.pressedAt = time.Now()
		return nil
	case Cut:
		return m.cut(ctx)
	case Bury:
		r := m.record
		r.Live, r.End = false, End{Exit: m.exit, Error: m.trouble}
		return m.write(r)
	case Reset:
		return m.reset(ctx, func(r *Record) { r.ResetsDone = want.GetResets() })
	case Restart:
		return m.reset(ctx, func(r *Record) { r.RebootsDone = r.RebootsBegun })
	case Reboot:
		r := m.record
		r.RebootsBegun = want.GetReboots()
		return m.write(r)
	case Credit:
		r := m.record
		r.StartsDone, r.Live = want.GetStarts(), true
		return m.write(r)
	case Recount:
		return m.write(m.record.recounted(m.host.o.Cluster(), want))
	case Destroy:
		return m.destroy(ctx)
	}
	return fmt.Errorf("no such action: %d", a)
}

// write makes a record durable, and then the one that counts. A first record is of the cluster that the host is in.
func (m *Machine) write(r Record) error {
	if r.Cluster == "" {
		r.Cluster = m.host.o.Cluster()
	}
	if err := r.write(m.host.recordPath(m.id)); err != nil {
		return err
	}
	m.record, m.exists = r, true
	return nil
}

// build makes the disks, and fetches every image that a start needs.
func (m *Machine) build(ctx context.Context, want *agentv1.AssignedVm) error {
	err := m.make(ctx, want)
	switch {
	case err == nil:
		m.host.counts.builds.Add(1)
	case ctx.Err() == nil:
		m.host.counts.buildFailures.Add(1)
		m.refused = errors.Is(err, disk.ErrRefused) || errors.Is(err, qemu.ErrInvalid)
	}
	return err
}

func (m *Machine) make(ctx context.Context, want *agentv1.AssignedVm) error {
	if err := m.host.check(want); err != nil {
		return err
	}
	if err := m.write(m.record); err != nil { // so that the VM is known to be here from its first file on
		return err
	}
	var err error
	if m.home, err = m.host.o.Homes.Claim(string(m.id)); err != nil {
		return err
	}
	if err := m.hold(ctx, want); err != nil {
		return err
	}
	if err := disk.Build(ctx, m.host.o.Images, m.home.Disks(), m.home.UID(), disks(want)); err != nil {
		return err
	}
	r := m.record
	r.Built = true
	return m.write(r)
}

// hold fetches the images that are not here.
func (m *Machine) hold(ctx context.Context, want *agentv1.AssignedVm) error {
	for _, img := range images(want) {
		if err := m.host.o.Images.Hold(ctx, img); err != nil {
			return err
		}
	}
	return nil
}

// start records a start and makes it. A failure is recorded as its end; only a record that could not be written leaves
// it to be tried again.
func (m *Machine) start(ctx context.Context, want *agentv1.AssignedVm, r Record) error {
	r.Live, r.End, r.Mark = true, End{}, r.mark()
	if err := m.write(r); err != nil {
		return err
	}
	ctx, cancel := patient(ctx)
	defer cancel()
	process, err := m.launch(ctx, want)
	if err == nil {
		m.host.counts.launches.Add(1)
		m.attach(process)
		return nil
	}
	m.host.counts.launchFailures.Add(1)
	r.Live, r.End = false, End{Exit: cloud.ExitFailed, Error: brief(err)}
	m.record = r // also when it cannot be written: then a restart of the agent finds a start without a process
	return fmt.Errorf("%w: %w", errEnded, errors.Join(err, m.write(r)))
}

// errEnded wraps a failure that is on record as the end of a start, and not a thing to be tried again.
var errEnded = errors.New("the start failed")

// patient is ctx with a deadline of its own, and a while longer than ctx when that is ended.
func patient(ctx context.Context) (context.Context, context.CancelFunc) {
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

func (m *Machine) launch(ctx context.Context, want *agentv1.AssignedVm) (*qemu.Process, error) {
	if err := m.hold(ctx, want); err != nil {
		return nil, err
	}
	files := qemu.Files{Disks: map[string]qemu.Layers{}}
	defer func() {
		for _, f := range []*os.File{files.Kernel, files.Initrd} {
			if f != nil {
				f.Close()
			}
		}
	}()
	for _, d := range want.GetDisks() {
		chain, err := disk.Open(m.host.o.Images, m.home.Disks(), d.GetId())
		if err != nil {
			return nil, err
		}
		defer chain.Close()
		files.Disks[d.GetId()] = qemu.Layers{Overlay: chain.Overlay, Base: chain.Base, Size: d.GetSizeBytes()}
	}
	var err error
	for img, f := range map[*agentv1.AssignedImage]**os.File{want.GetKernel(): &files.Kernel, want.GetInitrd(): &files.Initrd} {
		if img == nil {
			continue
		}
		if *f, err = m.host.o.Images.Open(image(img)); err != nil {
			return nil, err
		}
	}
	return m.host.o.QEMU.Launch(ctx, m.home, m.host.spec(want), files, want.GetGeneration(), m.record.Mark)
}

// cut ends whatever runs.
func (m *Machine) cut(ctx context.Context) error {
	if m.process != nil {
		return m.process.Cut(ctx)
	}
	if err := m.host.o.Cgroups.Kill(ctx, string(m.id)); err != nil {
		return err
	}
	m.ended(qemu.Exit{Reason: qemu.Asked})
	return m.host.o.Cgroups.Remove(ctx, string(m.id))
}

// reset records why, and presses the reset button. A guest that was held waits afterwards: the next look lets it run.
func (m *Machine) reset(ctx context.Context, note func(*Record)) error {
	r := m.record
	note(&r)
	if err := m.write(r); err != nil {
		return err
	}
	m.pressedAt = time.Time{}
	return m.process.Reset(ctx)
}

// destroy ends everything and removes it. What names the VM goes last, so that one half destroyed is found again.
func (m *Machine) destroy(ctx context.Context) error {
	if m.process != nil {
		if err := m.process.Kill(ctx); err != nil {
			return err
		}
		m.attach(nil)
		m.guest, m.pid = None, 0
	}
	if err := m.host.o.Cgroups.Kill(ctx, string(m.id)); err != nil {
		return err
	}
	if err := m.host.o.Cgroups.Remove(ctx, string(m.id)); err != nil {
		return err
	}
	home, err := m.host.o.Homes.Claim(string(m.id)) // also one that was never finished
	if err != nil {
		return err
	}
	if err := disk.Remove(home.Disks()); err != nil {
		return err
	}
	if err := home.Remove(); err != nil {
		return err
	}
	path := m.host.recordPath(m.id)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record: %w", err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return err
	}
	m.home, m.exists, m.refused, m.record = nil, false, false, Record{Version: recordVersion}
	m.exit, m.trouble = 0, ""
	return nil
}
