package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"
	"golang.org/x/sys/unix"
)

// GoneError is the error of Adopt when the VM's last process has ended.
type GoneError struct {
	Exit Exit
}

func (e *GoneError) Error() string { return "VM has no process: " + e.Exit.Text }

// Adopt returns a Process for the VM's running QEMU, which normally an earlier agent started. If QEMU has ended, the
// error wraps a [*GoneError]; all calls until the next Launch return the same Exit. If the VM was never started, the
// error wraps [ErrNotStarted].
//
// A process is identified by its pid, start time and control group, never by its name. A QEMU that does not respond is
// adopted as well: then [Process.Status] fails, and [Process.Kill] ends it. ctx limits only the wait for QEMU's first
// response, which normally takes milliseconds.
func (l *Launcher) Adopt(ctx context.Context, home *Home) (*Process, error) {
	r, err := home.Record()
	if err != nil {
		return nil, fmt.Errorf("adopt VM: %w", err)
	}
	p, err := l.adopt(ctx, home, r)
	if err != nil {
		return nil, fmt.Errorf("adopt VM %s: %w", home.id, err)
	}
	return p, nil
}

func (l *Launcher) adopt(ctx context.Context, home *Home, r Record) (*Process, error) {
	pidfd, err := l.findProcess(home, r)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, l.exitOfEnded(ctx, home, r, errors.Is(err, errLaunchUnfinished))
	}
	if err != nil {
		return nil, err
	}
	p, err := newProcess(l, home, r, pidfd)
	if err != nil {
		return nil, err
	}
	if err := p.checkUUID(ctx); err != nil {
		p.Close()
		return nil, err
	}
	// The setting of the host may have changed. After an error, the guest runs on the CPUs that it had.
	_ = p.setAffinity()
	p.tasks.Go(p.followEvents)
	p.leaveCopies() // an earlier agent may have begun some
	exit, known, err := home.Exit()
	if err != nil {
		p.Close()
		return nil, err
	}
	if known {
		// An earlier agent recorded that the guest had ended, but the agent itself ended before it could end QEMU.
		p.setExitAndQuit(exit)
	}
	return p, nil
}

// endingTimeout is how long findProcess waits for the end of a process that has left its control group. Such a process
// is exiting and still frees its memory. If that takes longer, a later call of findProcess waits again.
const endingTimeout = 500 * time.Millisecond

var (
	// errLaunchUnfinished means that the agent ended before it forked the launcher, or before the launcher executed
	// QEMU.
	errLaunchUnfinished = fmt.Errorf("launcher: %w", fs.ErrNotExist)

	// errOutsideCgroup means that the recorded process runs outside of its control group, and so without its resource
	// limits. No second process is started for the VM. An operator must end the process.
	errOutsideCgroup = errors.New("it is not in its control group: was the setting cgroup changed?")
)

// findProcess returns a pidfd of the process that r records. The error wraps fs.ErrNotExist if the process has ended,
// and errOutsideCgroup if it runs outside of its control group.
func (l *Launcher) findProcess(home *Home, r Record) (pidfd int, err error) {
	boot, err := bootID()
	if err != nil {
		return 0, err
	}
	if boot != r.BootID {
		return 0, fs.ErrNotExist
	}
	if r.PID == 0 {
		return 0, errLaunchUnfinished
	}
	// opened is a separate variable for the deferred function. A return statement with an error sets the result pidfd
	// to 0 before the deferred function runs.
	opened, err := unix.PidfdOpen(r.PID, 0)
	if errors.Is(err, syscall.ESRCH) {
		return 0, fs.ErrNotExist
	}
	if err != nil {
		return 0, os.NewSyscallError("pidfd_open", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(opened)
		}
	}()
	// The start time is read after the pidfd was opened, so that both belong to the same process.
	began, err := startTime(r.PID)
	if err != nil {
		return 0, err
	}
	if began != r.StartTime {
		return 0, fs.ErrNotExist
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d", r.PID), &st); err != nil {
		return 0, fs.ErrNotExist
	}
	if int(st.Uid) != home.uid {
		return 0, errLaunchUnfinished
	}
	procs, err := l.Cgroups.Procs(home.id)
	if err != nil {
		return 0, err
	}
	if slices.Contains(procs, r.PID) {
		return opened, nil
	}
	// An exiting process may have left its group already. Wait for its end.
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(opened), Events: unix.POLLIN}}, int(endingTimeout.Milliseconds()))
	if err == nil && n > 0 {
		return 0, fs.ErrNotExist
	}
	return 0, fmt.Errorf("pid %d: %w", r.PID, errOutsideCgroup)
}

// exitOfEnded is called when the process of the last start has ended. It records the exit if none is recorded yet,
// removes the rest of the control group, and returns the [*GoneError]. halfway is true if the process ended before the
// launcher executed QEMU.
func (l *Launcher) exitOfEnded(ctx context.Context, home *Home, r Record, halfway bool) error {
	exit, known, err := home.Exit()
	if err != nil {
		return err
	}
	if !known {
		if exit, err = l.inferExit(home, r, halfway); err != nil {
			return err
		}
		if err := home.write("exit.json", exit); err != nil {
			return err
		}
	}
	_, _ = reap(r.PID) // If this agent started the process, it must collect the exit status.
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := l.Cgroups.Kill(ctx, home.id); err != nil {
		return err
	}
	if err := l.Cgroups.Remove(ctx, home.id); err != nil {
		return err
	}
	return &GoneError{Exit: exit}
}

// inferExit returns how a QEMU ended while no agent ran. It derives that from the record r, the agent's last request to
// end QEMU, the control group and QEMU's standard error. halfway is true if the process ended before the launcher
// executed QEMU.
func (l *Launcher) inferExit(home *Home, r Record, halfway bool) (Exit, error) {
	boot, err := bootID()
	if err != nil {
		return Exit{}, err
	}
	usage, err := l.Cgroups.Usage(home.id)
	switch {
	case home.requested() == requestedPowerOff:
		return exitRequested, nil
	case boot != r.BootID:
		return exitHostRestarted, nil
	case halfway:
		return exitLaunchLost, nil
	case err == nil && usage.OOMKills > 0:
		return Exit{Crashed, outOfMemory}, nil
	}
	return Exit{Crashed, withStderr("QEMU ended while the agent was away", home.stderr())}, nil
}

// checkUUID returns an error if QEMU reports the UUID of another VM. A QEMU that does not respond is no error.
func (p *Process) checkUUID(ctx context.Context) error {
	info, err := query(ctx, p, (*raw.Monitor).QueryUUID)
	if err == nil && info.UUID != p.home.id {
		return fmt.Errorf("the QEMU process %d has the UUID %q", p.record.PID, info.UUID)
	}
	return nil
}
