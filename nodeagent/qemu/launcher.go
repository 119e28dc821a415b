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
)

// plan is what the launcher is to do, in order. It comes as JSON over a pipe.
type plan struct {
	Cgroups   []string // files to enter by
	UID       int      // and gid
	Root      string   // a directory to mount the new root on, in a namespace where nobody else sees that
	RootFS    rootFS   // what QEMU sees of the host's file system, read-only
	KVM       bool
	Tasks     int               // processes and threads that the uid may have
	FileBytes uint64            // size that no file may be made larger than
	Files     map[string]string // files of the host by the path that QEMU sees them at, read-only
	KeepFDs   int               // descriptors below this one are QEMU's
	Argv      []string
}

// oomScore makes guests end before the agent and the control plane when the host runs out of memory.
const oomScore = 200

// LauncherMain is what the agent's program does when it is started as Host.Launcher says, with the numbers of two
// descriptors as its last two arguments. It becomes QEMU and does not return. On failure it writes the reason to the
// second descriptor, which closes when QEMU begins.
//
// It is started as root in namespaces of its own, and gives away: its groups, its view of the file system, its limits,
// its uid and every capability with it, and the right to gain any of that again.
func LauncherMain() {
	// What follows belongs to the thread that calls execve.
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
	// First into the group, so that whatever goes wrong from here on is found there.
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
	// A write beyond the file size limit then fails with EFBIG instead of killing QEMU: for a disk the guest is paused,
	// and a log loses the write.
	signals.Ignore(unix.SIGXFSZ)
	unix.Umask(0o077)
	// Those that are not QEMU's close when it begins; the status pipe among them tells the agent so.
	if err := unix.CloseRange(uint(p.KeepFDs), math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return os.NewSyscallError("close_range", err)
	}
	if err := dropPrivileges(p.UID); err != nil {
		return err
	}
	return os.NewSyscallError("execve", syscall.Exec(p.Argv[0], p.Argv, []string{}))
}

func enter(file string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString("0")
	return err
}

// dropPrivileges acts on this thread alone, by raw system calls: the others end with execve.
func dropPrivileges(uid int) error {
	// With an empty bounding set no executable can gain capabilities, even if no_new_privs were not set. An agent
	// without CAP_SETPCAP, as under an older unit file, skips this step.
	for c := uintptr(0); ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) && c > 0 || errors.Is(err, unix.EPERM) {
			break // the kernel knows no more, or allows none
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

// mountRoot replaces the root by a small one in memory that ends with the process.
func (p *plan) mountRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", os.NewSyscallError("mount", err))
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
	// The new root on the old one's place, and the old one gone from beneath it: pivot_root(2).
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

// bind bind-mounts a directory or file of the host read-only and, unless code is set, noexec.
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

// devices makes the few device nodes that QEMU opens by name.
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
