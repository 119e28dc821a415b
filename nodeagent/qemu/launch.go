package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Launcher starts QEMU processes on a host, and finds running ones again after a restart of the agent. All fields but
// LargestDisk are required. A Launcher has no state.
type Launcher struct {
	Program         string       // absolute path of QEMU, under /usr
	LauncherCommand []string     // a command that calls LauncherMain, such as /proc/self/exe launch-guest
	Cgroups         *cgroup.Tree // a VM's group is named by its id
	CPUModels       []string     // CPU models that the accelerator offers
	// SharedCPUs are the CPUs of the host on which all threads of QEMU run, except vCPUs with dedicated CPUs. Empty means
	// all CPUs. Optional.
	SharedCPUs []int
	// LargestDisk is the size in bytes of the largest disk that can be attached to a running QEMU. It is used only if
	// the agent cannot raise the file size limit of a running process: each QEMU is then started with a limit for a
	// disk of this size. Optional.
	LargestDisk uint64
	// RBD means that disks may have RBD images. Each QEMU is then started in the network namespace of the agent, so
	// that librbd reaches Ceph clusters, and may have the threads and the memory that librbd needs. The caller must
	// install a packet filter that limits the addresses and ports that QEMU can reach. Optional.
	RBD bool
	// UEFI is the firmware of VMs with UEFI and without secure boot. SecureUEFI is the firmware of VMs with secure
	// boot. SWTPM is the absolute path of swtpm, which emulates TPMs. It must be under /usr. If one of the three is
	// empty, the host does not serve the VMs that need it. Optional.
	UEFI, SecureUEFI Firmware
	SWTPM            string
}

// tasks returns the maximum number of QEMU's threads: one for each vCPU, and 200 others. QEMU's I/O thread pool has up
// to 64. If rbd is true, librbd may have 40 more for each of the maxDisks disks that a VM can have.
func (s Spec) tasks(rbd bool) int {
	n := s.VCPUs + 200
	if rbd {
		n += 40 * maxDisks
	}
	if s.TPM {
		n += tpmTasks
	}
	return n
}

// rbdMemory is the memory in bytes that librbd may need for each disk, in addition to Spec.Overhead. It includes
// librbd's cache of 32 MiB for each image.
const rbdMemory = 80 << 20

// limits returns the limits of the VM's control group. They are higher if rbd is true, because QEMU may use librbd.
func (s Spec) limits(rbd bool) cgroup.Limits {
	cpus := s.VCPUs
	if s.DedicatedCPUs {
		cpus++ // so that QEMU's other threads take no time from the vCPUs
	}
	limits := cgroup.Limits{CPUs: cpus, Memory: s.Overhead(), Tasks: s.tasks(rbd)}
	if !s.Hugepages { // The kernel does not count huge pages as memory of the group.
		limits.Memory += s.MemoryMiB << 20
	}
	if rbd {
		limits.Memory += maxDisks * rbdMemory
	}
	if s.TPM {
		limits.Memory += tpmMemory
	}
	return limits
}

// Launch starts QEMU for the VM that s describes; home is the VM's directory. The guest is paused before its first
// instruction until [Process.Resume]. Launch returns when QEMU responds on both monitors. After an error, the process
// that Launch started has been ended. The error wraps [ErrInvalid] if another attempt would fail the same way, and
// [ErrRunning] if the VM has a process.
//
// A disk with slot -1 gets the slot that it had at the last start, or else a free one. The parameters generation and
// owner are stored in the Record.
func (l *Launcher) Launch(ctx context.Context, home *Home, s Spec, files Files, generation uint64, owner string) (*Process, error) {
	p, err := l.launch(ctx, home, s, files, Record{Generation: generation, Owner: owner})
	if err != nil {
		return nil, fmt.Errorf("start VM %s: %w", home.id, err)
	}
	return p, nil
}

func (l *Launcher) launch(ctx context.Context, home *Home, s Spec, files Files, r Record) (*Process, error) {
	if s.ID != home.id {
		return nil, invalid("the spec is of VM %q", s.ID)
	}
	if err := l.CheckHost(s); err != nil {
		return nil, err
	}
	procs, err := l.Cgroups.Procs(home.id)
	if err != nil {
		return nil, err
	}
	if len(procs) > 0 {
		return nil, fmt.Errorf("%w: pid %d", ErrRunning, procs[0])
	}
	before, err := home.Record()
	if err != nil && !errors.Is(err, ErrNotStarted) {
		return nil, err
	}
	if err == nil {
		if err := l.checkNotRunning(home, before); err != nil {
			return nil, err
		}
	}
	if r.Spec, err = s.KeepSlots(before.Spec); err != nil {
		return nil, err
	}
	if r.Argv, err = Argv(l.Program, r.Spec); err != nil {
		return nil, err
	}
	if r.Incoming {
		r.Argv = append(r.Argv, "-incoming", "defer")
	}
	pass, err := files.inOrder(r.Spec)
	if err != nil {
		return nil, err
	}
	if hasRBD(r.Spec.Disks) && !l.RBD {
		return nil, invalid("this host does not serve RBD")
	}
	r.HostNetwork, r.Sockets = l.RBD, true
	if r.BootID, err = bootID(); err != nil {
		return nil, err
	}
	if err := home.beginFirmware(r); err != nil {
		return nil, err
	}
	firmware, err := l.openFirmware(home, &r)
	if err != nil {
		return nil, err
	}
	defer closeAll(firmware...)
	pass = append(pass, firmware...)
	if err := home.begin(r); err != nil {
		return nil, fmt.Errorf("write record: %w", err)
	}
	if err = l.Cgroups.Create(home.id, s.limits(l.RBD)); err == nil {
		var p *Process
		if p, err = l.start(ctx, home, r, files, pass); err == nil {
			return p, nil
		}
	}
	l.removeCgroup(ctx, home)
	// If QEMU ended by itself, that exit stays recorded. Otherwise exitNotStarted is recorded, and only the caller gets
	// the reason.
	if exit, known, readErr := home.Exit(); readErr != nil || !known || exit == exitRequested {
		err = errors.Join(err, home.write("exit.json", exitNotStarted))
	}
	return nil, err
}

// checkNotRunning returns an error if the process of the VM's last start still runs, also if it runs outside of its
// control group. The parameter before is the Record of that start.
func (l *Launcher) checkNotRunning(home *Home, before Record) error {
	pidfd, err := l.findProcess(home, before)
	if err == nil {
		_ = unix.Close(pidfd)
		return fmt.Errorf("%w: pid %d", ErrRunning, before.PID)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// start starts the process, writes its pid to the record and waits until QEMU responds. The parameter pass contains the
// files that QEMU inherits after its own.
func (l *Launcher) start(ctx context.Context, home *Home, r Record, files Files, pass []*os.File) (*Process, error) {
	started := false // QEMU runs and answers
	own, err := home.open()
	defer closeAll(own...)
	if err != nil {
		return nil, err
	}
	pl := plan{Cgroups: l.Cgroups.Entries(home.id), UID: home.uid, Root: home.dir, KVM: r.Spec.Accel == KVM, Tasks: r.Spec.tasks(l.RBD),
		FileBytes: l.fileLimit(files), Files: map[string]string{}, Argv: r.Argv}
	if mutant.On(mutant.GuestAsRoot) {
		pl.UID = 0
	}
	if mutant.On(mutant.GuestOutsideCgroup) {
		pl.Cgroups = nil
	}
	if pl.RootFS, err = findRootFS(l.Program); err != nil {
		return nil, err
	}
	for to, f := range map[string]*os.File{kernelPath: files.Kernel, initrdPath: files.Initrd} {
		if f == nil {
			continue
		}
		if pl.Files[to], err = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd())); err != nil {
			return nil, err
		}
	}
	if r.Sockets {
		pl.Dirs = map[string]string{socketsDir: home.Sockets()}
	}
	if l.RBD {
		pl.Texts = map[string]string{cephConfPath: cephConf}
	}
	keep := append(own, pass...)
	if r.Spec.TPM {
		tpm, tpmPIDFD, err := l.startTPM(ctx, home, &r)
		if err != nil {
			return nil, err
		}
		defer func() {
			closeAll(tpm)
			if !started {
				endTPM(tpmPIDFD)
			} else {
				reapPIDFD(tpmPIDFD) // swtpm may have ended already.
				_ = unix.Close(tpmPIDFD)
			}
		}()
		keep = append(keep, tpm)
	}
	pidfd, err := l.startLauncher(ctx, l.guest(home, &r), pl, keep)
	if err != nil {
		return nil, err
	}
	p, err := newProcess(l, home, r, pidfd)
	if err != nil {
		return nil, err
	}
	p.keys = files.keys()
	err = p.waitReady(ctx)
	p.keys = nil
	if err != nil {
		_ = p.Kill(context.WithoutCancel(ctx))
		p.Close()
		return nil, err
	}
	started = true
	return p, nil
}

// guest describes the process of a VM's QEMU for startLauncher. Its pid is written to r and to the VM's record.
func (l *Launcher) guest(home *Home, r *Record) child {
	return child{log: home.stderr(), isolated: !l.RBD, record: func(pid int, start uint64) error {
		r.PID, r.StartTime, r.Started = pid, start, time.Now().UTC().Truncate(time.Millisecond)
		return home.write("record.json", r)
	}}
}

// open creates the files that every QEMU gets, in the order of their descriptors: three listening sockets, the console
// log, and the listening socket of the guest's agent.
func (h *Home) open() ([]*os.File, error) {
	dir, err := os.Open(h.dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var out []*os.File
	for _, name := range []string{workSocket, inspectSocket, consoleSocket} {
		f, err := listen(dir, name)
		if err != nil {
			return out, fmt.Errorf("listen at %s: %w", name, err)
		}
		out = append(out, f)
	}
	log, err := h.Console().Writer()
	if err != nil {
		return out, err
	}
	out = append(out, log)
	agent, err := listen(dir, agentSocket)
	if err != nil {
		return out, fmt.Errorf("listen at %s: %w", agentSocket, err)
	}
	return append(out, agent), nil
}

// socketPath returns a path of the socket with that name in the directory dir. The path is short enough for a unix
// socket address, even if the directory's own path is too long.
func socketPath(dir *os.File, name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
}

func listen(dir *os.File, name string) (*os.File, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: socketPath(dir, name)})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	return l.File()
}

// removeCgroup kills all processes of the VM's control group and removes the group.
func (l *Launcher) removeCgroup(ctx context.Context, home *Home) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	// If Kill or Remove fails, the next Launch or Adopt finds the group and its processes.
	if err := l.Cgroups.Kill(ctx, home.id); err == nil {
		_ = l.Cgroups.Remove(ctx, home.id)
	}
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

func bootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}

// startTime returns when a process started, in clock ticks since the host's boot (proc(5), field 22 of stat). The error
// wraps fs.ErrNotExist if there is no such process, or only a zombie.
func startTime(pid int) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, syscall.ESRCH) {
		err = os.ErrNotExist
	}
	if err != nil {
		return 0, err
	}
	// The process name in parentheses may contain any character, also a parenthesis. So the other fields are those
	// after the last one.
	_, rest, ok := strings.Cut(string(text[strings.LastIndexByte(string(text), ')')+1:]), " ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, fmt.Errorf("read /proc/%d/stat: it is not one", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, fmt.Errorf("process %d is dead: %w", pid, os.ErrNotExist)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
