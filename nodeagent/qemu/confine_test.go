package qemu

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestConfinement checks the confinement of a running QEMU with a network interface: its user, capabilities, limits, control groups, namespaces,
// mounts and open files, as /proc shows them.
func TestConfinement(t *testing.T) {
	l := newLab(t)
	leak, err := os.Open("/etc/hostname") // a file of the agent that QEMU must not inherit
	require.NoError(t, err)
	defer leak.Close()
	s, files := l.bootable()
	s.NICs = []NIC{virtioNIC("a", 1)}
	files.Taps = map[string]*os.File{"a": newNetwork(t).tap("tap0")}
	p := l.launch(s, files)
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")
	pid := p.record.PID
	// If QEMU is not in its control group, the removal of the group does not end it.
	t.Cleanup(func() { _ = unix.PidfdSendSignal(int(p.pidfd.Fd()), unix.SIGKILL, nil, 0) })

	status := map[string]string{}
	for line := range strings.Lines(proc(t, pid, "status")) {
		key, value, _ := strings.Cut(line, ":")
		status[key] = strings.Join(strings.Fields(value), " ")
	}
	uid := fmt.Sprint(l.home.UID())
	require.GreaterOrEqual(t, l.home.UID(), FirstUID)
	four := strings.Join([]string{uid, uid, uid, uid}, " ")
	none := "0000000000000000"
	for key, want := range map[string]string{"Uid": four, "Gid": four, "Groups": "", "CapInh": none, "CapPrm": none, "CapEff": none,
		"CapAmb": none, "CapBnd": none, "NoNewPrivs": "1", "Seccomp": "2", "NSsid": fmt.Sprint(pid)} {
		require.Equal(t, want, status[key], key)
	}
	ignored, err := strconv.ParseUint(status["SigIgn"], 16, 64)
	require.NoError(t, err)
	require.NotZero(t, ignored&(1<<(unix.SIGXFSZ-1)), "a write beyond the file size limit must not end QEMU")
	require.Empty(t, proc(t, pid, "environ"))
	require.Contains(t, proc(t, pid, "limits"), "Max core file size        0                    0")
	require.Regexp(t, `Max open files +4096 +4096 +files`, proc(t, pid, "limits"))
	require.Regexp(t, `Max processes +201 +201 +processes`, proc(t, pid, "limits"))
	require.Regexp(t, `Max file size +1207959552 +1207959552 +bytes`, proc(t, pid, "limits")) // the disk's 1 GiB, its 16th and 64 MiB
	require.Equal(t, "200\n", proc(t, pid, "oom_score_adj"))

	// QEMU is in the VM's control groups with their limits, and has its own mount, network, IPC and UTS namespaces.
	groups := 0
	for line := range strings.Lines(proc(t, pid, "cgroup")) {
		if strings.HasSuffix(strings.TrimSpace(line), "/"+vmID) {
			groups++
		}
	}
	require.GreaterOrEqual(t, groups, len(l.launcher.Cgroups.Entries(vmID)))
	limits := 0
	for _, entry := range l.launcher.Cgroups.Entries(vmID) {
		for file, want := range map[string]uint64{"memory.limit_in_bytes": 64<<20 + spec().Overhead(), "memory.max": 64<<20 + spec().Overhead(),
			"cpu.cfs_quota_us": 100_000, "pids.max": 201} {
			text, err := os.ReadFile(filepath.Join(filepath.Dir(entry), file))
			if err == nil {
				limits++
				require.Equal(t, fmt.Sprint(want), strings.TrimSpace(string(text)), file)
			}
		}
	}
	require.GreaterOrEqual(t, limits, 2)
	for _, ns := range []string{"mnt", "net", "ipc", "uts"} {
		own, err := os.Readlink("/proc/thread-self/ns/" + ns)
		require.NoError(t, err)
		qemus, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		require.NoError(t, err)
		require.NotEqual(t, own, qemus)
	}
	devices := strings.Split(strings.TrimSpace(proc(t, pid, "net/dev")), "\n")
	require.Len(t, devices, 3, "the network namespace must have no device except lo")
	require.NoError(t, dialFrom(t, "thread-self"))
	require.ErrorIs(t, dialFrom(t, strconv.Itoa(pid)), unix.ENETUNREACH, "QEMU must not reach a service on the host's loopback address")

	// QEMU sees only the files of the host that it needs. None is writable, and only code is executable.
	for line := range strings.Lines(proc(t, pid, "mountinfo")) {
		fields := strings.Fields(line)
		at, options := fields[4], strings.Split(fields[5], ",")
		require.Subset(t, options, []string{"ro", "nosuid"}, line)
		if at != "/" {
			require.Contains(t, options, "nodev", line)
		}
		if code := strings.HasPrefix(at, "/usr/lib") || strings.HasPrefix(at, "/lib") || at == l.launcher.Program; !code {
			require.Contains(t, options, "noexec", line)
		}
	}
	var seen []string
	root := fmt.Sprintf("/proc/%d/root", pid)
	for _, dir := range []string{"/", "/dev", "/usr", "/usr/bin"} {
		entries, err := os.ReadDir(root + dir)
		require.NoError(t, err)
		for _, e := range entries {
			seen = append(seen, filepath.Join(dir, e.Name()))
		}
	}
	require.Subset(t, []string{"/dev", "/dev/null", "/dev/urandom", "/dev/zero", "/lib", "/lib64", socketsDir, "/usr", "/usr/bin", "/usr/lib", "/usr/lib64",
		"/usr/share", "/usr/bin/" + filepath.Base(l.launcher.Program)}, seen)
	shared, err := os.ReadDir(root + "/usr/share")
	require.NoError(t, err)
	for _, e := range shared {
		require.Contains(t, dataDirs, "/usr/share/"+e.Name())
	}
	for _, file := range []string{"/new-file", "/usr/new-file", "/usr/lib/new-file", "/usr/share/qemu/new-file", socketsDir + "/new-file"} {
		require.ErrorIs(t, os.WriteFile(root+file, nil, 0o600), unix.EROFS, file)
	}

	require.Equal(t, 1, openTaps(t, pid))

	// QEMU has only those files open that the agent passed to it.
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(t, err)
	for _, fd := range fds {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		require.NoError(t, err)
		known := to == "/dev/null" || to == "/dev/net/tun" || strings.HasPrefix(to, "anon_inode:") || strings.HasPrefix(to, "socket:") ||
			slices.Contains([]string{"console.log", "stderr.log", "image", "overlay"}, filepath.Base(to))
		require.True(t, known, "%s -> %s", fd.Name(), to)
	}

	st, err := os.Stat(l.home.dir)
	require.NoError(t, err)
	require.EqualValues(t, 0o700, st.Mode().Perm())
	require.NoError(t, p.PowerOff(l.ctx))
}

// dialFrom connects to a service on the host's loopback address from the network namespace of a process or thread. from
// is the name of its directory in /proc. The namespace of the test is that of thread-self, not of self: self is the
// main thread, which is left in another namespace if the goroutine of an earlier call ran on it.
func dialFrom(t *testing.T, from string) error {
	t.Helper()
	service, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer service.Close()
	space, err := os.Open(filepath.Join("/proc", from, "ns/net"))
	require.NoError(t, err)
	defer space.Close()
	ended := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // it is never unlocked, so the thread ends with the goroutine
		if err := unix.Setns(int(space.Fd()), unix.CLONE_NEWNET); err != nil {
			ended <- fmt.Errorf("enter the namespace: %w", err)
			return
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			ended <- fmt.Errorf("make a socket: %w", err)
			return
		}
		defer unix.Close(fd)
		ended <- unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: service.Addr().(*net.TCPAddr).Port})
	}()
	return <-ended
}

// TestVMUsersAreIsolated checks that a shell with the uid of one VM cannot access another VM or the agent. The shell
// runs in the host's namespaces, like an intruder who escaped from those of QEMU.
func TestVMUsersAreIsolated(t *testing.T) {
	l := newLab(t)
	p := l.boot()
	next, err := l.homes.Claim("00000000-0000-4000-8000-00000000000b")
	require.NoError(t, err)
	pid, agent := p.record.PID, os.Getpid()
	as := func(uid int, command string) error {
		c := exec.CommandContext(l.ctx, "/bin/sh", "-c", command)
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
		return c.Run()
	}
	// The test's own directories above the homes are made searchable, so that the mode of the home itself refuses
	// access.
	vms := filepath.Dir(l.home.dir)
	for dir := vms; strings.HasPrefix(dir, filepath.Clean(os.TempDir())+"/"); dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	require.NoError(t, as(next.UID(), "ls "+vms), "the VM's user must be able to search the directories above the home")
	for name, command := range map[string]string{
		"list the VM's home":           fmt.Sprintf("ls %s", l.home.dir),
		"read the VM's console":        fmt.Sprintf("cat %s", l.home.Console().Path()),
		"write to the VM's console":    fmt.Sprintf("echo x >> %s", l.home.Console().Path()),
		"list QEMU's open files":       fmt.Sprintf("ls /proc/%d/fd", pid),
		"read QEMU's memory map":       fmt.Sprintf("cat /proc/%d/maps", pid),
		"read QEMU's environment":      fmt.Sprintf("cat /proc/%d/environ", pid),
		"list QEMU's root directory":   fmt.Sprintf("ls /proc/%d/root/", pid),
		"signal QEMU":                  fmt.Sprintf("kill -0 %d", pid),
		"list the agent's files":       fmt.Sprintf("ls /proc/%d/fd", agent),
		"read the agent's environment": fmt.Sprintf("cat /proc/%d/environ", agent),
		"signal the agent":             fmt.Sprintf("kill -0 %d", agent),
	} {
		require.NoError(t, as(0, command), "root can %s", name)
		require.Error(t, as(next.UID(), command), "the user of another VM can %s", name)
	}
	require.NoError(t, p.PowerOff(l.ctx))
}
