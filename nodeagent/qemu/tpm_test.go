package qemu

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// tpmLab returns a lab whose host serves TPMs, and the spec of a VM with a TPM.
func tpmLab(t *testing.T) (*lab, Spec) {
	t.Helper()
	l := newLab(t)
	var err error
	if l.launcher.SWTPM, err = exec.LookPath("swtpm"); err != nil {
		skip(t, err.Error())
	}
	s := spec()
	s.TPM = true
	return l, s
}

// TestTPMConfinement checks the confinement of a running swtpm: its user, capabilities, control groups, namespaces,
// mounts and open files, as /proc shows them.
func TestTPMConfinement(t *testing.T) {
	l, s := tpmLab(t)
	p := l.launch(s, Files{})
	pid := p.record.TPM.PID
	t.Cleanup(func() { _ = unix.PidfdSendSignal(int(p.pidfd.Fd()), unix.SIGKILL, nil, 0) })

	uid, err := l.home.tpmUID()
	require.NoError(t, err)
	require.NotEqual(t, l.home.UID(), uid)
	status := map[string]string{}
	for line := range strings.Lines(proc(t, pid, "status")) {
		key, value, _ := strings.Cut(line, ":")
		status[key] = strings.Join(strings.Fields(value), " ")
	}
	four := strings.Join([]string{fmt.Sprint(uid), fmt.Sprint(uid), fmt.Sprint(uid), fmt.Sprint(uid)}, " ")
	none := "0000000000000000"
	for key, want := range map[string]string{"Name": "swtpm", "Uid": four, "Gid": four, "Groups": "", "CapInh": none, "CapPrm": none,
		"CapEff": none, "CapAmb": none, "CapBnd": none, "NoNewPrivs": "1", "Seccomp": "2", "NSsid": fmt.Sprint(pid)} {
		require.Equal(t, want, status[key], "%s of the TPM", key)
	}
	require.Empty(t, proc(t, pid, "environ"))
	procs, err := l.launcher.Cgroups.Procs(vmID)
	require.NoError(t, err)
	require.ElementsMatch(t, []int{p.record.PID, pid}, procs)
	require.ErrorIs(t, dialFrom(t, fmt.Sprint(pid)), unix.ENETUNREACH, "swtpm must not reach a service on the host's loopback address")

	for line := range strings.Lines(proc(t, pid, "mountinfo")) {
		fields := strings.Fields(line)
		options := strings.Split(fields[5], ",")
		require.Contains(t, options, "nosuid", line)
		if fields[4] == tpmStatePath {
			require.Subset(t, options, []string{"rw", "nodev", "noexec"}, line)
		} else {
			require.Contains(t, options, "ro", line)
		}
	}
	root := fmt.Sprintf("/proc/%d/root", pid)
	shown, err := filepath.Glob(root + "/*")
	require.NoError(t, err)
	for i := range shown {
		shown[i] = strings.TrimPrefix(shown[i], root)
	}
	require.Subset(t, []string{"/dev", "/lib", "/lib64", "/usr", tpmStatePath}, shown)
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(t, err)
	for _, fd := range fds {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		require.NoError(t, err)
		known := to == "/dev/null" || strings.HasPrefix(to, "socket:") || strings.HasPrefix(to, "pipe:") ||
			to == l.home.tpmDir("log") || strings.HasPrefix(to, tpmStatePath+"/")
		require.True(t, known, "%s -> %s", fd.Name(), to)
	}

	// The user of QEMU cannot read the state of the TPM.
	state, err := os.Stat(l.home.tpmDir("state"))
	require.NoError(t, err)
	require.EqualValues(t, 0o700, state.Mode().Perm())

	require.NoError(t, p.PowerOff(l.ctx))
	require.NoFileExists(t, fmt.Sprintf("/proc/%d/status", pid), "swtpm ends with the VM")
	require.FileExists(t, l.home.tpmDir("state", tpmStateFile))
	require.NoError(t, l.home.Remove())
}

// TestTPMEnds kills swtpm while QEMU runs. TPMLost must return true, also for a Process that adopts QEMU afterwards.
// Then the VM must not be migrated, and its guest must continue. The next start of the VM must have a TPM with the same
// state.
func TestTPMEnds(t *testing.T) {
	l, s := tpmLab(t)
	p := l.launch(s, Files{})
	require.NoError(t, p.Resume(l.ctx))
	require.False(t, p.TPMLost())
	uid, err := l.home.tpmUID()
	require.NoError(t, err)
	pid := p.record.TPM.PID
	require.NoError(t, unix.Kill(pid, unix.SIGKILL))
	l.eventually(p.TPMLost, "the end of swtpm is reported")
	_, err = p.Machine()
	require.ErrorIs(t, err, errTPMEnded, "the VM can be migrated without its TPM")
	require.ErrorIs(t, p.StopGuest(l.ctx), errTPMEnded)
	require.False(t, p.Migrating(), "the guest goes on")
	require.NoFileExists(t, fmt.Sprintf("/proc/%d/status", pid), "the agent collects the exit status of swtpm")
	p.Close()

	q := l.adopt()
	l.eventually(q.TPMLost, "the next agent reports it too")
	status, err := q.Status(l.ctx)
	require.NoError(t, err)
	require.True(t, status.Running)
	require.NoError(t, q.PowerOff(l.ctx))
	require.False(t, q.TPMLost(), "the TPM of a VM without a process is not lost")

	again := l.launch(s, Files{})
	same, err := l.home.tpmUID()
	require.NoError(t, err)
	require.Equal(t, uid, same)
	again.Close()
	adopted := l.adopt()
	require.False(t, adopted.TPMLost())
	require.NoError(t, adopted.PowerOff(l.ctx))
}

// TestTPMOfFailedStart checks that swtpm does not stay as a zombie if QEMU cannot be started: because its program cannot
// be executed, or because it ends at once.
func TestTPMOfFailedStart(t *testing.T) {
	for _, program := range []string{"/usr/share/doc", "/usr/bin/false"} {
		t.Run(program, func(t *testing.T) {
			l, s := tpmLab(t)
			l.launcher.Program = program
			_, err := l.launcher.Launch(l.ctx, l.home, s, Files{}, 1, "owner")
			require.Error(t, err)
			r, err := l.home.Record()
			require.NoError(t, err)
			require.NotNil(t, r.TPM, "the test must fail after the start of swtpm")
			require.NoFileExists(t, fmt.Sprintf("/proc/%d/status", r.TPM.PID), "the agent collects the exit status of swtpm")
		})
	}
}

// TestReapOnce checks that the exit status of a child is not collected by the pidfd of an earlier child.
func TestReapOnce(t *testing.T) {
	start := func() (*exec.Cmd, int) {
		c := exec.Command("true")
		require.NoError(t, c.Start())
		fd, err := unix.PidfdOpen(c.Process.Pid, 0)
		require.NoError(t, err)
		t.Cleanup(func() { _ = unix.Close(fd) })
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000)
		require.NoError(t, err)
		return c, fd
	}
	first, fd := start()
	reapPIDFD(fd)
	require.NoFileExists(t, fmt.Sprintf("/proc/%d/status", first.Process.Pid))
	second, _ := start()
	reapPIDFD(fd)
	require.NoError(t, second.Wait(), "its exit status was collected")
}
