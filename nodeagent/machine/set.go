package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/pinning"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/reconcile"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Options are the dependencies of a MachineSet. All but Taps, Volumes and Migration are required, unless they say that
// they are optional.
type Options struct {
	QEMU    *qemu.Launcher
	Homes   *qemu.Homes
	Cgroups *cgroup.Tree
	Images  *disk.Images
	// Records is the directory of the record files, one [Record] for each VM. New creates the directory if needed.
	Records string
	Accel   qemu.Accel
	// Cluster returns the id of the host's cluster, or "" if the host has not joined one. It must not block.
	Cluster func() string
	// MachineType is the versioned machine type with which VMs are started. CPUModel is the CPU model of VMs that
	// specify none.
	MachineType, CPUModel string
	// Taps is the host's network. If it is nil, VMs with network interfaces cannot be started on this host.
	Taps Taps
	// Volumes opens the volumes of the host. If it is nil, VMs with volumes cannot be started on this host.
	Volumes Volumes
	// CPUs are the dedicated CPUs of the host. If it is nil, VMs with dedicated CPUs cannot be started on this host.
	CPUs *pinning.Pool
	// Migration is nil if the host does not take part in migrations.
	Migration *MigrationOptions
	// OnLaunch, OnBuild and OnStop are called with the duration of each successful start of QEMU, each successful creation
	// of a VM's disks, and each stop of a VM: from when this agent first observed that the VM should be off until its
	// process has ended. They must not block. Optional.
	OnLaunch, OnBuild, OnStop func(time.Duration)
	// GuardNeeded is called when a VM begins to need the guard process (NeedsGuard). It must not block. Optional.
	GuardNeeded func()
}

// MachineSet is the set of VMs on this host.
type MachineSet struct {
	o      Options
	counts counts
	// leaseEnded is true after the host's lease has ended.
	leaseEnded atomic.Bool
	// guarded is true while a second process can power off VMs after the lease has ended.
	guarded atomic.Bool

	mu   sync.Mutex // guards open and writers
	open map[cloud.VMID]*VM
	// writers are the sessions that may write to the serial ports of VMs.
	writers map[cloud.VMID]*consoleWriter
}

type counts struct{ launches, launchFailures, builds, buildFailures, deaths atomic.Uint64 }

// Counts holds how often each event happened since the agent started.
type Counts struct{ Launches, LaunchFailures, Builds, BuildFailures, Deaths uint64 }

// New returns the MachineSet of a host.
func New(o Options) (*MachineSet, error) {
	for _, f := range []*func(time.Duration){&o.OnLaunch, &o.OnBuild, &o.OnStop} {
		if *f == nil {
			*f = func(time.Duration) {}
		}
	}
	if err := os.MkdirAll(o.Records, 0o700); err != nil {
		return nil, fmt.Errorf("open records: %w", err)
	}
	if err := atomicfile.RemoveLeftovers(o.Records); err != nil {
		return nil, fmt.Errorf("open records: %w", err)
	}
	if err := useCPUs(o); err != nil {
		return nil, err
	}
	return &MachineSet{o: o, open: map[cloud.VMID]*VM{}, writers: map[cloud.VMID]*consoleWriter{}}, nil
}

// useCPUs records which dedicated CPUs the VMs use that an earlier agent started. CPUs of VMs without a process are
// released when the VM is first observed.
func useCPUs(o Options) error {
	if o.CPUs == nil {
		return nil
	}
	ids, err := o.Homes.List()
	if err != nil {
		return err
	}
	for _, id := range ids {
		home, err := o.Homes.Open(id)
		if err != nil {
			continue // The error is returned when the VM is loaded.
		}
		r, err := home.Record()
		if _, ended, exitErr := home.Exit(); err == nil && (exitErr != nil || !ended) {
			o.CPUs.Use(id, r.Spec.CPUs)
		}
	}
	return nil
}

// List returns the ids of all VMs that have a record, a directory of package qemu (qemu.Home) or a control group on
// this host.
func (s *MachineSet) List() ([]cloud.VMID, error) {
	entries, err := os.ReadDir(s.o.Records)
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), ".json"); ok {
			ids = append(ids, id)
		}
	}
	homes, err := s.o.Homes.List()
	if err != nil {
		return nil, err
	}
	groups, err := s.o.Cgroups.List()
	if err != nil {
		return nil, err
	}
	ids = slices.Concat(ids, homes, groups)
	slices.Sort(ids)
	var out []cloud.VMID
	for _, id := range slices.Compact(ids) {
		if cloud.CheckUUID("id", id) == nil {
			out = append(out, cloud.VMID(id))
		}
	}
	return out, nil
}

// present reports whether a VM has a control group or a directory of package qemu (qemu.Home), even one whose creation
// was interrupted.
func (s *MachineSet) present(id cloud.VMID) (bool, error) {
	homes, err := s.o.Homes.List()
	if err != nil {
		return false, err
	}
	groups, err := s.o.Cgroups.List()
	if err != nil {
		return false, err
	}
	return slices.Contains(homes, string(id)) || slices.Contains(groups, string(id)), nil
}

// Open returns the VM with that id. The caller must close the VM before it opens the same id again.
func (s *MachineSet) Open(id cloud.VMID) reconcile.Reconciled {
	v := &VM{set: s, id: id}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[id] = v
	return v
}

func (s *MachineSet) close(v *VM) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[v.id] == v {
		delete(s.open, v.id)
	}
}

func (s *MachineSet) machines() []*VM {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*VM, 0, len(s.open))
	for _, v := range s.open {
		out = append(out, v)
	}
	return out
}

// SetLeaseEnded sets whether the host's lease has ended. VMs that need a lease (Record.needsLease) are then not
// started, and are powered off at their next observation.
func (s *MachineSet) SetLeaseEnded(ended bool) (changed bool) {
	return s.leaseEnded.Swap(ended) != ended
}

// SetGuarded sets whether the guard process runs, which powers off the VMs that need a lease even if the agent has
// ended. Only while it runs, the agent reports StopsWithLease of VMs, and reports the target of a migration as
// prepared.
func (s *MachineSet) SetGuarded(guarded bool) (changed bool) {
	return s.guarded.Swap(guarded) != guarded
}

// NeedsGuard reports whether a VM that may have a process needs a lease (Record.needsLease).
func (s *MachineSet) NeedsGuard() bool {
	for _, v := range s.machines() {
		v.mu.Lock()
		leased := v.stopsWithLease
		v.mu.Unlock()
		if leased {
			return true
		}
	}
	return false
}

// KillWithoutLease kills the processes of the VMs that need a lease (Record.needsLease), at once and without QMP. It
// does not wait for steps in progress.
func (s *MachineSet) KillWithoutLease(ctx context.Context) error {
	var group errgroup.Group
	for _, v := range s.machines() {
		v.mu.Lock()
		leased := v.stopsWithLease
		v.mu.Unlock()
		if leased {
			group.Go(func() error { return s.o.Cgroups.Kill(ctx, string(v.id)) })
		}
	}
	return group.Wait()
}

// Counts returns how often each event happened since the agent started.
func (s *MachineSet) Counts() Counts {
	c := &s.counts
	return Counts{c.launches.Load(), c.launchFailures.Load(), c.builds.Load(), c.buildFailures.Load(), c.deaths.Load()}
}

// countLaunch counts a successful start of QEMU that began at the time began.
func (s *MachineSet) countLaunch(began time.Time) {
	s.counts.launches.Add(1)
	s.o.OnLaunch(time.Since(began))
}

// UsedImages returns the SHA-256 sums of the images that are base images of disks on this host.
func (s *MachineSet) UsedImages() (map[string]bool, error) {
	ids, err := s.o.Homes.List()
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, id := range ids {
		home, err := s.o.Homes.Open(id)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		disks, err := disk.List(home.Disks())
		if err != nil {
			return nil, err
		}
		for _, d := range disks {
			if d.Image != nil {
				used[d.Image.SHA256] = true
			}
		}
	}
	return used, nil
}

// errNoConsole is the error of Console for a VM without a console log. Tenants see it.
var errNoConsole = errors.New("the VM has no console log on this host")

// Console writes the last tail bytes of a VM's console log to w, or all of the log if tail is 0. If follow is set, it
// then writes new output until ctx ends.
func (s *MachineSet) Console(ctx context.Context, vm cloud.VMID, tail uint64, follow bool, w io.Writer) error {
	home, err := s.o.Homes.Open(string(vm))
	if err != nil {
		return errNoConsole
	}
	log := home.Console()
	n := int64(min(tail, console.KeepConsole))
	if n == 0 {
		n = console.KeepConsole
	}
	if follow {
		err = log.Follow(ctx, n, func(c console.Chunk) error {
			if c.Skipped > 0 {
				if _, err := fmt.Fprintf(w, "\r\n[%d bytes are missing here]\r\n", c.Skipped); err != nil {
					return err
				}
			}
			_, err := w.Write(c.Data)
			return err
		})
	} else {
		var data []byte
		if data, err = log.Tail(n); err == nil {
			_, err = w.Write(data)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return errNoConsole
	}
	return err
}

func (s *MachineSet) recordPath(id cloud.VMID) string {
	return filepath.Join(s.o.Records, string(id)+".json")
}
