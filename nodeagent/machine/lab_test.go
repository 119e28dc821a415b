package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/cgroup/cgrouptest"
	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/pinning"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	"github.com/trivet-cloud/trivet/nodeagent/reconcile"
	"github.com/trivet-cloud/trivet/nodeagent/storage"
	"github.com/trivet-cloud/trivet/nodeagent/tunnel"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

const launcherCommand = "launch-guest"

// TestMain runs the launcher of QEMU instead of the tests if the first argument requests it, as the agent's main does.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == launcherCommand {
		qemu.LauncherMain()
	}
	if len(os.Args) > 1 && os.Args[1] == tunnelCommand {
		os.Exit(tunnel.Main())
	}
	if err := cgrouptest.RemoveLeft("trivet-test-machine"); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(m.Run())
}

// within is the longest time that a test waits for something. It elapses only if the test fails.
const within = 60 * time.Second

// lab is a host on which a test runs the agent's machines and loop with real QEMU. At the end of the test, all
// processes, control groups and files are removed.
type lab struct {
	*testing.T
	dir     string
	program string
	cluster string // id of the host's cluster; changed only while no agent runs
	tree    *cgroup.Tree
	image   []byte // the only image that fetch provides: package qemu's boot sector

	more map[string][]byte // further images that fetch provides, by SHA-256

	fetchErr  atomic.Pointer[error]
	migration *MigrationOptions // nil if the host takes part in no migrations; changed only while no agent runs
	taps      Taps              // nil if the host has no network; changed only while no agent runs

	pool        string           // directory of the storage pool "local"; changed only before an agent uses it
	shared      string           // directory of the shared pool "shared", or "" if there is none; changed only while no agent runs
	storage     *storage.Storage // the host's volumes
	stopStorage func()
	dedicated   []int         // dedicated CPUs of the host; changed only while no agent runs
	uefi        qemu.Firmware // empty if the host serves no UEFI; changed only while no agent runs
	swtpm       string        // path of swtpm, or "" if the host serves no TPMs; changed only while no agent runs
	rbdHelper   string        // path of trivet-rbd, or "" if the host serves no RBD; changed only while no agent runs

	volumeMu sync.Mutex
	volumes  map[cloud.VolumeID]cloud.VolumeObservation // the last reports

	*MachineSet
	loop   *reconcile.Loop
	images *disk.Images

	mu    sync.Mutex
	seen  map[cloud.VMID]cloud.Observation
	moved chan struct{} // closed and replaced by each report
	// durations has the durations of steps, by step. The function took stores them.
	durations map[string][]time.Duration
}

var labs atomic.Int64

func newLab(t *testing.T) *lab {
	t.Helper()
	testenv.NeedRoot(t)
	program, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		testenv.Skip(t, err.Error())
	}
	sector, err := os.ReadFile("../qemu/testdata/guest.bin")
	require.NoError(t, err)
	l := &lab{T: t, dir: t.TempDir(), program: program, cluster: "11", image: append(sector, make([]byte, 1<<20-len(sector))...), moved: make(chan struct{}), more: map[string][]byte{},
		volumes: map[cloud.VolumeID]cloud.VolumeObservation{}}
	l.pool = filepath.Join(l.dir, "pool")
	require.NoError(t, os.Mkdir(l.pool, 0o700))
	l.tree, err = cgroup.Open(fmt.Sprintf("trivet-test-machine-%d-%d", os.Getpid(), labs.Add(1)))
	require.NoError(t, err)
	t.Cleanup(l.clear)
	l.start()
	t.Cleanup(l.stop)
	return l
}

// clear ends all guests.
func (l *lab) clear() {
	require.NoError(l, errors.Join(cgrouptest.End(l.tree), l.tree.Close()))
}

// took returns a function that stores the duration of a step.
func (l *lab) took(step string) func(time.Duration) {
	return func(d time.Duration) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.durations == nil {
			l.durations = map[string][]time.Duration{}
		}
		l.durations[step] = append(l.durations[step], d)
	}
}

// start starts an agent on the host, which adopts the VMs.
func (l *lab) start() {
	homes, err := qemu.OpenHomes(filepath.Join(l.dir, "vms"), qemu.FirstUID, qemu.LastUID)
	require.NoError(l, err)
	l.images, err = disk.OpenImages(filepath.Join(l.dir, "images"), l.fetch)
	require.NoError(l, err)
	launcher := &qemu.Launcher{Program: l.program, LauncherCommand: []string{"/proc/self/exe", launcherCommand}, Cgroups: l.tree,
		CPUModels: []string{"qemu64", "max"}, LargestDisk: 1 << 40, RBD: l.rbdHelper != "", SWTPM: l.swtpm, UEFI: l.uefi}
	l.startStorage(func(ctx context.Context, id string, size uint64, key []byte) (*os.File, error) {
		return launcher.Format(ctx, homes, id, size, key)
	})
	l.MachineSet, err = New(Options{
		QEMU:  launcher,
		Homes: homes, Cgroups: l.tree, Images: l.images, Records: filepath.Join(l.dir, "records"), Accel: qemu.TCG,
		Cluster: func() string { return l.cluster }, MachineType: "pc-q35-7.2", CPUModel: "qemu64",
		Taps: l.taps, Volumes: l.storage, Migration: l.migration, CPUs: pinning.NewPool(nil, l.dedicated),
		OnLaunch: l.took("launch"), OnBuild: l.took("build"), OnStop: l.took("stop"),
	})
	require.NoError(l, err)
	l.mu.Lock()
	l.seen = map[cloud.VMID]cloud.Observation{}
	l.mu.Unlock()
	l.loop = reconcile.New(reconcile.Options{
		Open: l.MachineSet.Open, Report: l.report, Removed: func(cloud.VMID) {}, Log: slog.New(slog.NewTextHandler(testLog{l.T}, nil)),
		Launches: 4, Builds: 4,
	})
	ids, err := l.List()
	require.NoError(l, err)
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	require.NoError(l, l.loop.Adopt(ctx, ids))
}

// stop stops the agent. The guests continue to run.
func (l *lab) stop() {
	l.loop.Close()
	l.stopStorage()
	l.images.Close()
}

// startStorage opens the storage pool of the host and keeps its volumes as assigned.
func (l *lab) startStorage(format func(context.Context, string, uint64, []byte) (*os.File, error)) {
	pools := []volume.Options{{
		Name: "local", Path: l.pool, State: filepath.Join(l.dir, "local.json"), Images: l.images, Format: format,
	}}
	if l.shared != "" {
		pools = append(pools, volume.Options{
			Name: "shared", Path: l.shared, Shared: true, Host: filepath.Base(l.dir), State: filepath.Join(l.dir, "shared.json"), Images: l.images,
			Format: format,
		})
	}
	l.storage = storage.New(l.Context(), storage.Options{
		Pools:  pools,
		RBD:    rbd.Options{Program: l.rbdHelper, UID: 65534, GID: 65534, Log: slog.New(slog.NewTextHandler(testLog{l.T}, nil))},
		Images: l.images,
		Report: l.reportVolume, Forget: func(cloud.VolumeID) {}, Log: slog.New(slog.NewTextHandler(testLog{l.T}, nil)),
		Copy: func(ctx context.Context, vm cloud.VMID, targets []volume.CopyTarget) (volume.Copied, error) {
			return l.CopyVolumes(ctx, vm, targets)
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = l.storage.Run(ctx) }()
	l.stopStorage = func() { cancel(); <-done; l.storage.Close() }
}

func (l *lab) reportVolume(o cloud.VolumeObservation) {
	l.volumeMu.Lock()
	defer l.volumeMu.Unlock()
	l.volumes[o.Volume] = o
}

func (l *lab) fetch(_ context.Context, sum string, offset int64) (io.ReadCloser, error) {
	if err := l.fetchErr.Load(); err != nil {
		return nil, *err
	}
	if data, ok := l.more[sum]; ok {
		return io.NopCloser(bytes.NewReader(data[offset:])), nil
	}
	if sum != l.sum() {
		return nil, errors.New("no member provides the image")
	}
	return io.NopCloser(bytes.NewReader(l.image[offset:])), nil
}

func (l *lab) sum() string {
	sum := sha256.Sum256(l.image)
	return hex.EncodeToString(sum[:])
}

func (l *lab) report(o cloud.Observation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen[o.VM] = o
	close(l.moved)
	l.moved = make(chan struct{})
}

// until waits until the function ok returns true for the last report of the VM, and returns that report. The failure
// message contains what, a description of the awaited report.
func (l *lab) until(id cloud.VMID, what string, ok func(cloud.Observation) bool) cloud.Observation {
	l.Helper()
	deadline := time.After(within)
	for {
		l.mu.Lock()
		o, moved := l.seen[id], l.moved
		l.mu.Unlock()
		if ok(o) {
			return o
		}
		select {
		case <-moved:
		case <-deadline:
			require.FailNow(l, "the VM was not reported as awaited in time", "%s; last %+v", what, o)
		}
	}
}

// sees waits until the VM is reported with the state level and the generation of want. It returns that report.
func (l *lab) sees(want *agentv1.AssignedVm, level cloud.Observed) cloud.Observation {
	l.Helper()
	return l.until(cloud.VMID(want.GetVmId()), fmt.Sprintf("level %d of generation %d", level, want.GetGeneration()), func(o cloud.Observation) bool {
		return o.Observed == level && o.Generation == want.GetGeneration()
	})
}

func vmID(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }

// vm returns the assignment of a small VM that is off, with the boot sector on its disk.
func (l *lab) vm(n int) *agentv1.AssignedVm {
	return &agentv1.AssignedVm{
		VmId: vmID(n), Generation: 1, Power: agentv1.Power_POWER_OFF, Vcpus: 1, Sockets: 1, CoresPerSocket: 1, MemoryMib: 64,
		Disks: []*agentv1.AssignedDisk{{
			Id: "root", SizeBytes: 1 << 30, Bus: vmv1.DiskBus_DISK_BUS_VIRTIO, Cache: vmv1.DiskCache_DISK_CACHE_WRITEBACK,
			Image: &agentv1.AssignedImage{ImageId: "i", Sha256: l.sum(), SizeBytes: uint64(len(l.image)), Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW},
		}},
	}
}

// blank returns the assignment of a VM without an image: its firmware runs, but finds nothing to boot.
func (l *lab) blank(n int) *agentv1.AssignedVm {
	want := l.vm(n)
	want.Disks[0].Image = nil
	return want
}

// with returns a copy of the assignment want that the function change has modified. The copy has the next generation.
func with(want *agentv1.AssignedVm, change func(*agentv1.AssignedVm)) *agentv1.AssignedVm {
	next := &agentv1.AssignedVm{
		VmId: want.VmId, Generation: want.Generation + 1, Power: want.Power, StopGraceMs: want.StopGraceMs, Reboots: want.Reboots,
		Resets: want.Resets, Starts: want.Starts, Vcpus: want.Vcpus, Sockets: want.Sockets, CoresPerSocket: want.CoresPerSocket,
		MemoryMib: want.MemoryMib, Disks: want.Disks, Nics: want.Nics, Seed: want.Seed,
		Kernel: want.Kernel, Initrd: want.Initrd, Cmdline: want.Cmdline, Firmware: want.Firmware, SecureBoot: want.SecureBoot,
		Tpm: want.Tpm, Cdrom: want.Cdrom, Rescue: want.Rescue, OsType: want.OsType, RtcLocalTime: want.RtcLocalTime,
		Hugepages: want.Hugepages, DedicatedCpus: want.DedicatedCpus,
	}
	change(next)
	return next
}

func on(want *agentv1.AssignedVm) *agentv1.AssignedVm {
	return with(want, func(w *agentv1.AssignedVm) { w.Power = agentv1.Power_POWER_ON; w.Starts++ })
}

func off(want *agentv1.AssignedVm, grace time.Duration) *agentv1.AssignedVm {
	return with(want, func(w *agentv1.AssignedVm) {
		w.Power, w.StopGraceMs = agentv1.Power_POWER_OFF, uint64(grace.Milliseconds())
	})
}

func destroyed(want *agentv1.AssignedVm) *agentv1.AssignedVm {
	return with(want, func(w *agentv1.AssignedVm) { w.Power = agentv1.Power_POWER_DESTROYED })
}

// assign replaces the assignments of the host by those in wants.
func (l *lab) assign(wants ...*agentv1.AssignedVm) {
	all := map[cloud.VMID]*agentv1.AssignedVm{}
	for _, w := range wants {
		all[cloud.VMID(w.GetVmId())] = w
	}
	l.loop.Assign(all, nil, false)
}

// says waits until the console log of the VM contains text at least as often as the parameter times.
func (l *lab) says(id, text string, times int) {
	l.Helper()
	require.Eventually(l, func() bool {
		var out bytes.Buffer
		return l.Console(l.Context(), cloud.VMID(id), 0, false, &out) == nil && bytes.Count(out.Bytes(), []byte(text)) >= times
	}, within, 5*time.Millisecond, "the guest says %q", text)
}

type testLog struct{ t *testing.T }

func (w testLog) Write(p []byte) (int, error) {
	w.t.Logf("%s", bytes.TrimSpace(p))
	return len(p), nil
}

var limits = cgroup.Limits{CPUs: 1, Memory: 64 << 20}

func itoa(n int) string { return strconv.Itoa(n) }

// dialConsole connects to the serial port of the VM whose home is dir. It uses a path in /proc/self/fd, because the
// socket's own path is too long for a socket address.
func dialConsole(t *testing.T, dir string) net.Conn {
	d, err := os.Open(dir)
	require.NoError(t, err)
	defer d.Close()
	var c net.Conn
	for end := time.Now().Add(within); ; time.Sleep(20 * time.Millisecond) {
		c, err = net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/console.sock", d.Fd()))
		// EAGAIN: QEMU is busy and has not accepted the last client.
		if !errors.Is(err, syscall.EAGAIN) || time.Now().After(end) {
			break
		}
	}
	require.NoError(t, err)
	return c
}
