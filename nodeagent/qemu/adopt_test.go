package qemu

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
)

func (l *lab) adopt() *Process {
	l.Helper()
	began := time.Now()
	p, err := l.launcher.Adopt(l.ctx, l.home)
	require.NoError(l, err)
	l.Logf("adopted in %v", time.Since(began))
	l.Cleanup(p.Close)
	return p
}

func (l *lab) gone() Exit {
	l.Helper()
	var gone *GoneError
	_, err := l.launcher.Adopt(l.ctx, l.home)
	require.ErrorAs(l, err, &gone)
	_, err = l.launcher.Adopt(l.ctx, l.home)
	require.ErrorAs(l, err, &gone)
	names, err := l.launcher.Cgroups.List()
	require.NoError(l, err)
	require.Empty(l, names)
	return gone.Exit
}

func TestAdoptRunning(t *testing.T) {
	l := newLab(t)
	before := l.boot()
	before.Close()
	p := l.adopt()
	require.Equal(t, before.Record(), p.Record())
	require.EqualValues(t, 7, p.Record().Generation)
	status, err := p.Status(l.ctx)
	require.NoError(t, err)
	require.True(t, status.Running)
	l.types("I am")
	l.says("GUEST UP\nI am")
	require.NoError(t, p.PressPowerButton(l.ctx))
	require.Equal(t, exitRequested, l.exited(p))
}

// TestAdoptAfterTheEnd checks that Adopt returns the right Exit for a guest or QEMU that ended while no agent ran.
func TestAdoptAfterTheEnd(t *testing.T) {
	for _, tc := range []struct {
		name string
		how  func(l *lab, p *Process)
		want Exit
	}{
		{"guest powered off", func(l *lab, p *Process) { p.Close(); l.types("o") }, Exit{Guest, "the guest powered itself off"}},
		{"power button pressed before the agent ended", func(l *lab, p *Process) {
			require.NoError(l, p.Pause(l.ctx)) // Adopt resumes the guest. Only then it can react to the button.
			require.NoError(l, p.PressPowerButton(l.ctx))
			p.Close()
		}, exitRequested},
		{"guest panicked", func(l *lab, p *Process) { p.Close(); l.types("p") }, Exit{Crashed, "the guest's kernel panicked"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := newLab(t)
			tc.how(l, l.boot())
			// QEMU stays in the run state of the ended guest. The next agent may adopt it before the guest has ended.
			p := l.adopt()
			require.Equal(t, tc.want, l.exited(p))
			require.Equal(t, tc.want, l.gone())
		})
	}
	t.Run("QEMU died", func(t *testing.T) {
		l := newLab(t)
		p := l.boot()
		p.Close()
		signal(t, p, unix.SIGTERM)
		l.eventually(func() bool { _, err := startTime(p.record.PID); return err != nil }, "QEMU ends")
		exit := l.gone()
		require.Equal(t, Crashed, exit.Reason)
		require.Contains(t, exit.Text, "QEMU ended while the agent was away: terminating on signal 15")
	})
	t.Run("powered off, and the agent ended before it recorded the exit", func(t *testing.T) {
		l := newLab(t)
		p := l.boot()
		p.Close()
		require.NoError(t, l.home.setRequested(requestedPowerOff))
		signal(t, p, unix.SIGKILL)
		l.eventually(func() bool { _, err := startTime(p.record.PID); return err != nil }, "QEMU ends")
		require.Equal(t, exitRequested, l.gone())
	})
}

// TestAdoptUnresponsive checks that a QEMU that does not respond is adopted within the caller's deadline, that Status
// then fails, and that PowerOff kills it.
func TestAdoptUnresponsive(t *testing.T) {
	l := newLab(t)
	p := l.boot()
	p.Close()
	signal(t, p, unix.SIGSTOP)
	// The deadline may pass at any point: Adopt ignores the error, and Status returns DeadlineExceeded in any case.
	brief := func() context.Context {
		ctx, cancel := context.WithTimeout(l.ctx, 50*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	p, err := l.launcher.Adopt(brief(), l.home)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	_, err = p.Status(brief())
	require.ErrorIs(t, err, context.DeadlineExceeded)
	p.quitWithin = time.Millisecond
	require.NoError(t, p.PowerOff(l.ctx), "PowerOff kills QEMU, since it does not quit")
	require.Equal(t, exitRequested, l.exited(p))
}

// TestAdoptAfterRecordedExit checks that Adopt ends a QEMU if the exit of its guest is recorded already, and keeps that
// exit. This is the case if an agent was killed after it recorded the exit and before it ended QEMU.
func TestAdoptAfterRecordedExit(t *testing.T) {
	l := newLab(t)
	p := l.boot()
	p.Close()
	want := Exit{Guest, "the guest powered itself off"}
	require.NoError(t, l.home.write("exit.json", want))
	require.Equal(t, want, l.exited(l.adopt()))
}

func TestAdoptNothing(t *testing.T) {
	l := newLab(t)
	_, err := l.launcher.Adopt(l.ctx, l.home)
	require.ErrorIs(t, err, ErrNotStarted)
}

// TestAdoptRefusesOtherProcesses checks that Adopt treats a recorded process as ended if its pid now belongs to another
// process or to none, and that it does not kill that other process if it is outside of the VM's control group.
func TestAdoptRefusesOtherProcesses(t *testing.T) {
	boot, err := bootID()
	require.NoError(t, err)
	record := func(pid int, start uint64) Record {
		return Record{Spec: spec(), BootID: boot, PID: pid, StartTime: start}
	}
	// member starts a process of root in the VM's control group.
	member := func(l *lab) (pid int, start uint64) {
		require.NoError(l, l.launcher.Cgroups.Create(vmID, cgroup.Limits{CPUs: 1, Memory: 64 << 20}))
		cmd := exec.CommandContext(l.ctx, "/bin/sleep", "60")
		require.NoError(l, cmd.Start())
		ended := make(chan struct{})
		go func() { defer close(ended); _ = cmd.Wait() }()
		l.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
		for _, file := range l.launcher.Cgroups.Entries(vmID) {
			f, err := os.OpenFile(file, os.O_WRONLY, 0)
			require.NoError(l, err)
			_, err = f.WriteString(itoa(cmd.Process.Pid))
			require.NoError(l, err)
			require.NoError(l, f.Close())
		}
		start, err := startTime(cmd.Process.Pid)
		require.NoError(l, err)
		return cmd.Process.Pid, start
	}
	for _, tc := range []struct {
		name string
		left func(l *lab) Record
		want Exit
	}{
		{"agent ended before it forked", func(*lab) Record { return record(0, 0) }, exitLaunchLost},
		{"agent ended while the launcher waited", func(l *lab) Record { return record(member(l)) }, exitLaunchLost},
		{"pid that another member of the group has now", func(l *lab) Record {
			pid, start := member(l)
			return record(pid, start-1)
		}, Exit{Crashed, "QEMU ended while the agent was away"}},
		{"pid that a process outside of the group has now", func(l *lab) Record {
			start, err := startTime(os.Getpid())
			require.NoError(l, err)
			return record(os.Getpid(), start-1) // if Adopt killed this pid, the test would end
		}, Exit{Crashed, "QEMU ended while the agent was away"}},
		{"host restarted", func(l *lab) Record {
			r := record(os.Getpid(), 1)
			r.BootID = "before"
			return r
		}, exitHostRestarted},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := newLab(t)
			require.NoError(t, l.home.begin(tc.left(l)))
			require.Equal(t, tc.want, l.gone())
		})
	}
}

// TestAdoptOutsideCgroup checks that Adopt and Launch fail with errOutsideCgroup if the recorded process runs outside
// of its control group, and that the process is not ended.
func TestAdoptOutsideCgroup(t *testing.T) {
	l := newLab(t)
	boot, err := bootID()
	require.NoError(t, err)
	cmd := exec.CommandContext(l.ctx, "/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(l.home.UID()), Gid: uint32(l.home.UID())}}
	require.NoError(t, cmd.Start())
	start, err := startTime(cmd.Process.Pid)
	require.NoError(t, err)
	require.NoError(t, l.home.begin(Record{Spec: spec(), BootID: boot, PID: cmd.Process.Pid, StartTime: start}))
	_, err = l.launcher.Adopt(l.ctx, l.home)
	require.ErrorIs(t, err, errOutsideCgroup)
	_, err = l.launcher.Launch(l.ctx, l.home, spec(), Files{}, 1, "")
	require.ErrorIs(t, err, errOutsideCgroup)
	_, err = startTime(cmd.Process.Pid)
	require.NoError(t, err, "the connection stays open")
	_, known, err := l.home.Exit()
	require.NoError(t, err)
	require.False(t, known)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Equal(t, Crashed, l.gone().Reason)
}

// agentCommand is the argument that makes the test program an agent. It launches a guest, prints a line, and then waits
// to be killed.
const agentCommand = "be-an-agent"

func beAgent(program, root, dir string) error {
	tree, err := cgroup.Open(root)
	if err != nil {
		return err
	}
	homes, err := OpenHomes(dir, FirstUID, LastUID)
	if err != nil {
		return err
	}
	home, err := homes.Open(vmID)
	if err != nil {
		return err
	}
	h := &Launcher{Program: program, LauncherCommand: []string{"/proc/self/exe", launcherCommand}, Cgroups: tree, CPUModels: []string{"qemu64"}}
	p, err := h.Launch(context.Background(), home, spec(), Files{}, 1, "first agent")
	if err != nil {
		return err
	}
	if err := p.Resume(context.Background()); err != nil {
		return err
	}
	_, _ = os.Stdout.WriteString("launched\n")
	select {}
}

func TestAgentIsKilled(t *testing.T) {
	l := newLab(t)
	agent := exec.CommandContext(l.ctx, "/proc/self/exe", agentCommand, l.launcher.Program, l.root, filepath.Dir(l.home.dir))
	agent.Stderr = os.Stderr
	out, err := agent.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, agent.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "launched\n", line)
	before, err := l.home.Record()
	require.NoError(t, err)
	require.NoError(t, agent.Process.Kill())
	require.ErrorContains(t, agent.Wait(), "killed")

	p := l.adopt()
	require.Equal(t, before, p.Record())
	require.Equal(t, "first agent", p.Record().Owner)
	status, err := p.Status(l.ctx)
	require.NoError(t, err)
	require.True(t, status.Running)
	// QEMU is not a child of this process: its end is noticed, but its exit status is not known.
	signal(t, p, unix.SIGKILL)
	require.Equal(t, Exit{Crashed, "QEMU ended without an error message, as when it is killed"}, l.exited(p))
}
