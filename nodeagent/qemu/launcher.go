package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	signals "os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// plan describes how the launcher confines and executes a program, which is QEMU or swtpm. The agent sends it as JSON
// over a pipe.
type plan struct {
	Cgroups   []string // cgroup.procs files of the control groups that the launcher enters
	UID       int      // also the gid
	Root      string   // the directory to mount the new root on, in the launcher's own mount namespace
	RootFS    rootFS   // the part of the host's file system that QEMU sees, read-only
	KVM       bool
	Tasks     int               // limit of processes and threads of the uid
	FileBytes uint64            // limit of a file's size, in bytes
	Files     map[string]string // read-only files: QEMU's path to the host's path
	Dirs      map[string]string // read-only directories, without code: QEMU's path to the host's path, which may be in Root
	Texts     map[string]string // read-only files: QEMU's path to the content
	Writable  map[string]string // writable directories: the program's path to the host's path, which is outside of Root
	KeepFDs   int               // descriptors below this number are passed to QEMU
	Argv      []string
}

// oomScore is the oom_score_adj of each QEMU. With it the kernel kills VMs before the agent and the control plane when
// the host runs out of memory.
const oomScore = 200

// LauncherMain is the main function of the process that Launcher.LauncherCommand starts, with the numbers of two
// descriptors as its last two arguments. It executes QEMU and does not return. On failure it writes the reason to the
// second descriptor, which execve of QEMU closes.
//
// The process starts as root in its own namespaces. It enters the VM's control group, replaces the root file system,
// sets resource limits, changes to the VM's uid without groups, and drops all capabilities for good.
func LauncherMain() {
	// Privileges and namespaces belong to a thread, so all steps must run on the thread that calls execve.
	runtime.LockOSThread()
	n := len(os.Args)
	if n < 4 {
		_, _ = os.Stderr.WriteString("this command is the agent's own\n")
		os.Exit(2)
	}
	in, err1 := strconv.Atoi(os.Args[n-2])
	out, err2 := strconv.Atoi(os.Args[n-1])
	if err := errors.Join(err1, err2); err != nil {
		os.Exit(2)
	}
	status := os.NewFile(uintptr(out), "status")
	if err := launch(os.NewFile(uintptr(in), "plan")); err != nil {
		_, _ = status.WriteString(err.Error())
	}
	os.Exit(1)
}

func launch(in *os.File) error {
	var p plan
	if err := json.NewDecoder(in).Decode(&p); err != nil {
		return fmt.Errorf("read plan: %w", err)
	}
	// Entering the control groups is the first step, so that the agent finds this process there if a later step hangs.
	for _, file := range p.Cgroups {
		if err := enter(file); err != nil {
			return fmt.Errorf("enter cgroup: %w", err)
		}
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(oomScore)), 0); err != nil {
		return fmt.Errorf("set OOM score: %w", err)
	}
	if err := p.mountRoot(); err != nil {
		return err
	}
	for _, l := range []struct {
		what  int
		limit uint64
	}{{unix.RLIMIT_CORE, 0}, {unix.RLIMIT_NOFILE, 4096}, {unix.RLIMIT_MSGQUEUE, 0}, {unix.RLIMIT_NPROC, uint64(p.Tasks)},
		{unix.RLIMIT_FSIZE, p.FileBytes}} {
		if err := unix.Setrlimit(l.what, &unix.Rlimit{Cur: l.limit, Max: l.limit}); err != nil {
			return os.NewSyscallError("setrlimit", err)
		}
	}
	// A write beyond the file size limit then fails with EFBIG instead of killing QEMU: after a write to a disk the
	// guest is paused, and a write to a log is lost.
	signals.Ignore(unix.SIGXFSZ)
	unix.Umask(0o077)
	// execve closes the descriptors that are not QEMU's. The end of the status pipe tells the agent that QEMU has
	// started.
	if err := unix.CloseRange(uint(p.KeepFDs), math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return os.NewSyscallError("close_range", err)
	}
	if err := dropPrivileges(p.UID); err != nil {
		return err
	}
	return os.NewSyscallError("execve", syscall.Exec(p.Argv[0], p.Argv, []string{}))
}

// enter moves this process to the control group whose cgroup.procs is file.
func enter(file string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString("0")
	return err
}

// dropPrivileges changes this thread to uid without capabilities. It uses raw system calls, because the Go functions
// change all threads. execve ends the other threads.
func dropPrivileges(uid int) error {
	// With an empty bounding set no executable can gain capabilities, even if no_new_privs were not set. An agent
	// without CAP_SETPCAP, as under an older unit file, skips this step.
	for c := uintptr(0); !mutant.On(mutant.GuestKeepsCaps); c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) && c > 0 || errors.Is(err, unix.EPERM) {
			break // There are no more capabilities, or CAP_SETPCAP is missing.
		}
		if err != nil {
			return os.NewSyscallError("prctl", err)
		}
	}
	id := uintptr(uid)
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); e != 0 {
		return os.NewSyscallError("setgroups", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, id, id, id); e != 0 {
		return os.NewSyscallError("setresgid", e)
	}
	// Leaving uid 0 empties the effective, permitted and ambient sets; execve under no_new_privs leaves them empty.
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, id, id, id); e != 0 {
		return os.NewSyscallError("setresuid", e)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	return nil
}

// mountRoot replaces the root file system of this process by a small tmpfs with only the files that QEMU needs. The
// tmpfs ends with the process.
func (p *plan) mountRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", os.NewSyscallError("mount", err))
	}
	// The tmpfs hides the directories of Dirs that are in Root. They are therefore opened before.
	dirs := map[string]*os.File{}
	for to, from := range p.Dirs {
		dir, err := os.Open(from)
		if err != nil {
			return fmt.Errorf("show %s: %w", to, err)
		}
		defer dir.Close()
		dirs[to] = dir
	}
	if err := unix.Mount("guest", p.Root, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "size=64k,nr_inodes=64,mode=755"); err != nil {
		return fmt.Errorf("mount root: %w", os.NewSyscallError("mount", err))
	}
	if err := p.RootFS.mount(p.Root); err != nil {
		return err
	}
	if err := p.devices(); err != nil {
		return err
	}
	for to, from := range p.Files {
		if err := bind(from, filepath.Join(p.Root, to), false, false); err != nil {
			return fmt.Errorf("show %s: %w", to, err)
		}
	}
	for to, from := range dirs {
		if err := bind(fmt.Sprintf("/proc/self/fd/%d", from.Fd()), filepath.Join(p.Root, to), true, false); err != nil {
			return fmt.Errorf("show %s: %w", to, err)
		}
	}
	for to, from := range p.Writable {
		if err := bindWritable(from, filepath.Join(p.Root, to)); err != nil {
			return fmt.Errorf("show %s: %w", to, err)
		}
	}
	for to, text := range p.Texts {
		path := filepath.Join(p.Root, to)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make %s: %w", to, err)
		}
		if err := os.WriteFile(path, []byte(text), 0o444); err != nil {
			return fmt.Errorf("make %s: %w", to, err)
		}
	}
	// pivot_root(2) mounts the new root over the old one, which is then unmounted.
	if err := os.Chdir(p.Root); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change root: %w", os.NewSyscallError("pivot_root", err))
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("change root: %w", os.NewSyscallError("umount", err))
	}
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	flags := uintptr(unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NOEXEC)
	if err := unix.Mount("", "/", "", flags, ""); err != nil {
		return fmt.Errorf("make root read-only: %w", os.NewSyscallError("mount", err))
	}
	return nil
}

// bind makes a read-only bind mount of a directory or file of the host. If code is false, the mount is also noexec.
func bind(from, to string, dir, code bool) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	var err error
	if dir {
		err = os.Mkdir(to, 0o755)
	} else {
		err = os.WriteFile(to, nil, 0o444)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return os.NewSyscallError("mount", err)
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if !code {
		attr.Attr_set |= unix.MOUNT_ATTR_NOEXEC
	}
	return os.NewSyscallError("mount_setattr", unix.MountSetattr(-1, to, unix.AT_RECURSIVE, &attr))
}

// bindWritable makes a bind mount of a directory of the host. The program can write files there, but not execute them.
func bindWritable(from, to string) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return os.NewSyscallError("mount", err)
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	return os.NewSyscallError("mount_setattr", unix.MountSetattr(-1, to, 0, &attr))
}

// devices creates the device nodes that QEMU opens by name, owned by the VM's uid.
func (p *plan) devices() error {
	dir := filepath.Join(p.Root, "dev")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("make devices: %w", err)
	}
	nodes := []struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"urandom", 1, 9}}
	if p.KVM {
		var st unix.Stat_t
		if err := unix.Stat("/dev/kvm", &st); err != nil {
			return fmt.Errorf("make devices: /dev/kvm: %w", err)
		}
		nodes = append(nodes, struct {
			name         string
			major, minor uint32
		}{"kvm", unix.Major(st.Rdev), unix.Minor(st.Rdev)})
	}
	for _, n := range nodes {
		path := filepath.Join(dir, n.name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(n.major, n.minor))); err != nil {
			return fmt.Errorf("make device %s: %w", n.name, err)
		}
		if err := os.Chown(path, p.UID, p.UID); err != nil {
			return fmt.Errorf("make device %s: %w", n.name, err)
		}
	}
	return nil
}
