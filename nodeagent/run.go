package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/nodeagent/lease"
	"github.com/trivet-cloud/trivet/nodeagent/machine"
	"github.com/trivet-cloud/trivet/nodeagent/metrics"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/reconcile"
	"github.com/trivet-cloud/trivet/nodeagent/storage"
	"github.com/trivet-cloud/trivet/nodeagent/uplink"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	"github.com/trivet-cloud/trivet/nodeagent/vpc"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/filelock"
	"github.com/trivet-cloud/trivet/shared/version"
)

const (
	// formatVersion is the format of the data directory. The agent refuses to start if the directory has another
	// format.
	formatVersion = "1"
	// adoptWithin is the maximum time that the agent waits at its start for the first observation of all VMs. After
	// that it continues to start, even if it has not observed all VMs.
	adoptWithin = 5 * time.Second
	// launches and builds are the maximum numbers of concurrent launches and builds. A build mostly waits for an image,
	// and package disk fetches four images at a time.
	launches, builds = 8, 16
	measureEvery     = 10 * time.Second
	// trimEvery is the interval at which unused images are removed. They are also removed before each fetch.
	trimEvery = 10 * time.Minute
)

// run runs the agent until ctx ends.
func run(ctx context.Context, c Config, log *slog.Logger) error {
	unlock, err := claim(c.DataDir, claimWithin)
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.MkdirAll(filepath.Join(c.DataDir, "identity"), 0o700); err != nil {
		return fmt.Errorf("open data directory: %w", err)
	}

	accel, err := facts.Accel(ctx, c.Accel)
	if err != nil {
		return fmt.Errorf("find accelerator: %w", err)
	}
	log.Info("accelerator", "accel", accel.Kind, "why", accel.Reason)
	host, err := facts.Read(ctx, facts.Options{DataDir: c.DataDir, Accel: accel.Kind, QEMU: c.QEMU})
	if err != nil {
		return err
	}
	cpus, err := readCPUs(c.DedicatedCPUs, "/sys/devices/system")
	if err != nil {
		return err
	}
	self := describe(c, host, accel, cpus)
	if !self.ready {
		log.Warn("this host runs no guests: KVM does not work here, and allow_tcg is not set")
	}

	self.machines = facts.ReadMachines(host.QEMU.Machine, host.Arch, accel.Kind)
	log.Info("firmware", "uefi", self.machines.UEFI, "secure boot", self.machines.SecureUEFI, "tpm", self.machines.SWTPM)

	a := &agent{config: c, log: log, firmware: self.machines, cpus: cpus}
	self.metricsURL = a.metricsURL
	if a.lease, err = lease.Open(a.dir("lease")); err != nil {
		return err
	}
	rbdErr := a.checkRBD(ctx, &host)
	a.servesRBD, self.rbdProblem = rbdErr == nil, rbdProblem(rbdErr)
	log.Info("RBD volumes", "served", a.servesRBD, "why not", self.rbdProblem)
	a.nets = openNetworks(ctx, &a.config, networkCalls{
		ack:     func(ack cloud.NetworkAck) { a.link.AcknowledgeNetworks(ack) },
		report:  func(all []cloud.BackendHealth) { a.link.ReportBackends(all) },
		guest:   a.guest,
		contact: func() (time.Time, bool) { return a.link.Contact() },
	}, log)
	defer a.nets.close()
	if a.link, err = uplink.Open(a.uplinkOptions(self)); err != nil {
		return err
	}
	fetch := func(ctx context.Context, sum string, offset int64) (io.ReadCloser, error) {
		return a.link.FetchImage(ctx, sum, uint64(offset))
	}
	if a.images, err = disk.OpenImages(a.dir("images"), fetch); err != nil {
		return err
	}
	defer a.images.Close()
	a.images.SetLimit(disk.Limit{Bytes: a.imageCacheLimit, Used: a.usedImages})
	if err := a.openStorage(ctx); err != nil {
		return err
	}
	defer a.storage.Close()
	self.pools = a.pools
	a.guardProcess = newGuardProcess(a)
	if a.machines, err = a.openMachines(ctx, &host, accel); err != nil {
		return err
	}
	a.loop = reconcile.New(reconcile.Options{
		Open: a.machines.Open, Report: a.link.Observe, Removed: a.link.Forget, Log: log, Launches: launches, Builds: builds,
	})
	defer a.loop.Close()
	a.guard = newLeaseGuard(a.lease, a.setLeaseEnded, a.killWithoutLease, log)
	if err := adopt(ctx, a.machines, a.loop, log); err != nil {
		return err
	}
	if err := a.work(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	log.Info("stopped; guests keep running")
	return nil
}

// agent has the parts of the agent. Some parts call others through functions that use agent. These functions are not
// called before run has set all parts.
type agent struct {
	config   Config
	log      *slog.Logger
	nets     *networks
	link     *uplink.Link
	images   *disk.Images
	storage  *storage.Storage
	qemu     *qemu.Launcher
	homes    *qemu.Homes
	machines *machine.MachineSet
	loop     *reconcile.Loop
	lease    *lease.Lease
	guard    *leaseGuard
	// guardProcess starts a second process, which kills VMs after the end of the lease even if the agent has ended.
	guardProcess *guardProcess
	assigned     atomic.Pointer[uplink.Assignment] // nil before the first assignment
	durations    *metrics.Durations

	servesRBD bool // guests of the host can use RBD images
	cpus      hostCPUs
	firmware  facts.Machines
}

// dir returns the path of a directory in the data directory.
func (a *agent) dir(name string) string { return filepath.Join(a.config.DataDir, name) }

// guest returns what the metadata service sends to the guest of a VM. It returns known false before the first
// assignment.
func (a *agent) guest(vm string) (data vpc.GuestData, known bool) {
	assigned := a.assigned.Load()
	if assigned == nil {
		return vpc.GuestData{}, false
	}
	one := assigned.VMs[cloud.VMID(vm)]
	return vpc.GuestData{
		SSHKeys: one.GetSeed().GetSshKeys(), UserData: one.GetSeed().GetUserData(),
		TokensOptional: one.GetMetadataTokensOptional(),
	}, true
}

// uplinkOptions returns the options of the connection to the control plane.
func (a *agent) uplinkOptions(self *node) uplink.Options {
	c := &a.config
	options := uplink.Options{
		Dir: a.dir("identity"), Seeds: c.ControlPlane, Token: c.token, Leave: c.LeaveCluster, Name: c.Name,
		Version: version.Version(), Facts: self.facts, Heartbeat: self.heartbeat,
		Present: func() []cloud.VMID { return a.loop.Present() },
		Assign: func(assigned uplink.Assignment) {
			assigned.VMs = storage.WithNewestVolumes(assigned.VMs, assigned.Volumes)
			a.assigned.Store(&assigned)
			a.storage.Assign(assigned.Volumes, assigned.Stored) // before the VMs that use the volumes
			a.loop.Assign(assigned.VMs, assigned.Released, assigned.Stored)
			if !assigned.Stored && assigned.Term > 0 {
				a.guard.assigned()
			}
		},
		Connected: func() { a.guard.connected() }, Lease: a.lease,
		Console: func(ctx context.Context, vm cloud.VMID, tail uint64, follow bool, w io.Writer) error {
			return a.machines.Console(ctx, vm, tail, follow, w)
		},
		OpenConsole: func(ctx context.Context, r *agentv1.OpenConsoleRequest, pipe console.Pipe) error {
			return a.machines.OpenConsole(ctx, r, pipe)
		},
		Snapshot: func(ctx context.Context, r *agentv1.SnapshotRequest, w uplink.SnapshotWriter) error {
			return a.storage.ExportSnapshot(ctx, cloud.VolumeID(r.GetVolumeId()), volume.Export{
				Snapshot: volume.SnapshotRef{Volume: r.GetVolumeId(), ID: r.GetSnapshotId()},
				Since:    r.GetSinceSnapshotId(), Offset: r.GetOffset(), Scanned: w.Scanned,
			}, w)
		},
		Guest: func(ctx context.Context, r *agentv1.GuestRequest) (*agentv1.GuestResult, error) {
			return a.machines.CallGuest(ctx, r)
		},
		Log: a.log,
	}
	if a.nets.description != nil {
		options.Networks, options.HostNetwork = a.nets, a.nets.description
	}
	return options
}

// openMachines opens the VMs of this host.
func (a *agent) openMachines(ctx context.Context, host *facts.Host, accel facts.Accelerator) (*machine.MachineSet, error) {
	tree, err := cgroup.Open(a.config.Cgroup)
	if err != nil {
		return nil, err
	}
	first, last, err := a.config.uids()
	if err != nil {
		return nil, err
	}
	if a.homes, err = qemu.OpenHomes(a.dir("vms"), first, last); err != nil {
		return nil, err
	}
	a.qemu = &qemu.Launcher{
		Program: host.QEMU.Path, LauncherCommand: []string{"/proc/self/exe", launchGuest}, Cgroups: tree,
		CPUModels: host.QEMU.CPUModels, LargestDisk: largestVolume,
		RBD: a.servesRBD, SWTPM: a.firmware.SWTPM, SharedCPUs: a.cpus.shared,
		UEFI:       qemu.Firmware{Code: a.firmware.UEFI.Code, Variables: a.firmware.UEFI.Variables},
		SecureUEFI: qemu.Firmware{Code: a.firmware.SecureUEFI.Code, Variables: a.firmware.SecureUEFI.Variables},
	}
	if err := a.qemu.RemoveFormats(ctx, a.homes); err != nil {
		a.log.Warn("cannot remove the files of an interrupted creation of an encrypted volume", "err", err)
	}
	a.durations = metrics.NewDurations()
	observe := func(h prometheus.Histogram) func(time.Duration) {
		return func(took time.Duration) { h.Observe(took.Seconds()) }
	}
	return machine.New(machine.Options{
		QEMU: a.qemu, Homes: a.homes, Cgroups: tree, Images: a.images, Records: a.dir("records"), Accel: qemu.Accel(accel.Kind),
		Cluster: a.link.Cluster, MachineType: host.QEMU.Machine, CPUModel: defaultModel(host.QEMU.CPUModels),
		Taps: a.nets.taps(), Volumes: a.storage, Migration: a.migrationOptions(),
		CPUs: a.cpus.pool(), GuardNeeded: a.guardProcess.check,
		OnLaunch: observe(a.durations.Launch), OnBuild: observe(a.durations.Build), OnStop: observe(a.durations.Stop),
	})
}

// work runs the agent's goroutines until ctx ends or one of them fails.
func (a *agent) work(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.link.Run(ctx) })
	group.Go(func() error { return a.guard.run(ctx) })
	group.Go(func() error { return a.guardProcess.run(ctx) })
	group.Go(func() error { return a.nets.watch.run(ctx) })
	if a.nets.encryption != nil {
		group.Go(func() error { return a.nets.encryption.run(ctx) })
	}
	group.Go(func() error { return a.storage.Run(ctx) })
	group.Go(func() error {
		return every(ctx, measureEvery, func() { a.link.Usage(a.machines.Measure(ctx)) })
	})
	group.Go(func() error {
		return every(ctx, measureEvery, func() { a.machines.ReadGuestAddresses(ctx) })
	})
	group.Go(func() error {
		return every(ctx, trimEvery, func() {
			if err := a.images.Trim(); err != nil {
				a.log.Warn("cannot remove unused images", "err", err)
			}
		})
	})
	if a.config.MetricsListen != "" {
		group.Go(func() error { a.serveMetrics(ctx); return nil })
	}
	return group.Wait()
}

// setLeaseEnded tells the VMs whether the host's lease has ended.
func (a *agent) setLeaseEnded(ended bool) {
	if a.machines.SetLeaseEnded(ended) {
		a.loop.ObserveAll()
	}
}

// killWithoutLeaseTime is the maximum time for killing the processes of VMs after the lease has ended.
const killWithoutLeaseTime = 5 * time.Second

func (a *agent) killWithoutLease(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, killWithoutLeaseTime)
	defer cancel()
	if err := a.machines.KillWithoutLease(ctx); err != nil && ctx.Err() == nil {
		a.log.Error("cannot kill VMs that must not run without a lease", "err", err)
	}
}

// claimWithin is how long the agent waits for the lock of the data directory. An agent that was killed keeps the lock
// until the last of its threads has ended.
const claimWithin = 10 * time.Second

// claim creates the data directory, locks it against other agents, removes temporary files that a crash left, and
// checks the format. If another agent has the lock, claim waits for it until the time within has passed.
func claim(dir string, within time.Duration) (release func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open data directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open data directory: %w", err)
	}
	if err := filelock.Lock(f, within); err != nil {
		f.Close()
		return nil, fmt.Errorf("another agent uses the data directory %s: %w", dir, err)
	}
	if err := atomicfile.RemoveLeftovers(dir); err != nil {
		f.Close()
		return nil, fmt.Errorf("open data directory: %w", err)
	}
	path := filepath.Join(dir, "format")
	switch text, err := os.ReadFile(path); {
	case errors.Is(err, fs.ErrNotExist):
		if err := atomicfile.WriteFile(path, []byte(formatVersion+"\n"), 0o600); err != nil {
			f.Close()
			return nil, fmt.Errorf("open data directory: %w", err)
		}
	case err != nil:
		f.Close()
		return nil, fmt.Errorf("open data directory: %w", err)
	case strings.TrimSpace(string(text)) != formatVersion:
		f.Close()
		return nil, fmt.Errorf("the data directory %s has format %q, and this agent knows %s", dir, strings.TrimSpace(string(text)), formatVersion)
	}
	return func() { f.Close() }, nil
}

// adopt adds the VMs that exist on the host to loop, before the agent connects to the control plane.
func adopt(ctx context.Context, machines *machine.MachineSet, loop *reconcile.Loop, log *slog.Logger) error {
	ids, err := machines.List()
	if err != nil {
		return err
	}
	started := time.Now()
	bounded, cancel := context.WithTimeout(ctx, adoptWithin)
	defer cancel()
	if err := loop.Adopt(bounded, ids); err != nil && ctx.Err() == nil {
		log.Warn("not every VM has been observed yet", "err", err)
	}
	if len(ids) > 0 {
		log.Info("adopted what is on this host", "vms", len(ids), "took", time.Since(started).Round(time.Millisecond))
	}
	return ctx.Err()
}

// every calls f each time the duration pause has passed, until ctx ends. It returns the error of ctx.
func every(ctx context.Context, pause time.Duration, f func()) error {
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			f()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sources returns the functions that supply the values of /metrics.
func (a *agent) sources() metrics.Sources {
	link, machines := a.link, a.machines
	return metrics.Sources{
		Version: version.Version(),
		Uplink: func() metrics.Uplink {
			s := link.Status()
			u := metrics.Uplink{Connected: s.Connected, Term: s.Term, Revision: s.Revision, Sessions: s.Sessions, Failures: s.Failures}
			if until, ok := link.Lease(); ok {
				u.Lease = time.Until(until)
			}
			u.Certificate = link.CertificateExpiry()
			return u
		},
		VMs: func() []metrics.VM {
			var out []metrics.VM
			for _, s := range machines.LastReports() {
				vm := metrics.VM{ID: s.ID, Observed: s.Observed, Usage: s.Usage, CPU: s.CPU}
				if s.Guest != nil {
					vm.Guest = &metrics.GuestMemory{Total: s.Guest.Total, Available: s.Guest.Available}
				}
				out = append(out, vm)
			}
			return out
		},
		Counts:    func() metrics.Counts { return metrics.Counts(machines.Counts()) },
		Durations: a.durations,
		Networks:  a.nets.metrics,
		Host: func() facts.Load {
			load, err := facts.ReadLoad()
			if err != nil {
				a.log.Warn("cannot read the load of the host for the metrics", "err", err)
			}
			return load
		},
		Storage: func() metrics.Storage { return storageMetrics(a.storage, machines) },
		Images:  func() metrics.Images { return imageMetrics(a.images) },
	}
}

// defaultModel returns the CPU model of a VM that requests none: the one with the most features that the host offers.
func defaultModel(offered []string) string {
	for _, name := range []string{"host", "max", "qemu64"} {
		if slices.Contains(offered, name) {
			return name
		}
	}
	if len(offered) > 0 {
		return offered[0]
	}
	return "qemu64"
}
