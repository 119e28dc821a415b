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

// GoneError is Adopt's answer when what was started has ended.
type GoneError struct {
	Exit Exit
}

func (e *GoneError) Error() string { return "VM has no process: " + e.Exit.Text }

// Adopt takes over the QEMU that runs in home, whoever started it: normally an agent before this one. It fails with
// [*GoneError] when that has ended, each time with the same Exit until the next Launch, and with [ErrNotStarted] when
// there never was one.
//
// A process is recognised by pid and start time and by its control group, never by its name. One that does not answer
// is adopted all the same: then [Process.Status] fails, and [Process.Kill] ends it. ctx bounds only the wait for its
// first answer, which comes within milliseconds.
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
	p.tasks.Go(p.followEvents)
	exit, known, err := home.Exit()
	if err != nil {
		p.Close()
		return nil, err
	}
	if known {
		// An agent had come to this conclusion, and ended before QEMU did.
		p.setExitAndQuit(exit)
	}
	return p, nil
}

// endingTimeout is how long an end may take from leaving the group on, which is when memory is given back. Who calls
// again after that gets another chance.
const endingTimeout = 500 * time.Millisecond

var (
	// errLaunchUnfinished: what is there is not QEMU yet, or nothing was forked. Whoever was to see to it is gone.
	errLaunchUnfinished = fmt.Errorf("launcher: %w", fs.ErrNotExist)

	// errOutsideCgroup: it runs, but where its limits do not hold and nobody would look for it. That is for an operator to solve;
	// a second one must not be started.
	errOutsideCgroup = errors.New("it is not in its control group: was the tree of control groups given another name?")
)

// findProcess returns a descriptor of the recorded process. The error wraps fs.ErrNotExist when it is not there any more.
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
	pidfd, err = unix.PidfdOpen(r.PID, 0)
	if errors.Is(err, syscall.ESRCH) {
		return 0, fs.ErrNotExist
	}
	if err != nil {
		return 0, os.NewSyscallError("pidfd_open", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(pidfd)
		}
	}()
	// Looked at after the descriptor was there, so that both mean the same process.
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
		return pidfd, nil
	}
	// A process that is ending has left its group already.
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(endingTimeout.Milliseconds()))
	if err == nil && n > 0 {
		return 0, fs.ErrNotExist
	}
	return 0, fmt.Errorf("pid %d: %w", r.PID, errOutsideCgroup)
}

// exitOfEnded says how a start ended that has no process, and makes sure that nothing else of it is left.
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
	_, _ = reap(r.PID) // a child of ours, when the agent is still the one that started it
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

// inferExit concludes from what is left how a QEMU ended that nobody watched.
func (l *Launcher) inferExit(home *Home, r Record, halfway bool) (Exit, error) {
	boot, err := bootID()
	if err != nil {
		return Exit{}, err
	}
	usage, err := l.Cgroups.Usage(home.id)
	switch {
	case home.asked() == askedPowerOff:
		return exitAsked, nil
	case boot != r.BootID:
		return exitHostRestarted, nil
	case halfway:
		return exitLaunchLost, nil
	case err == nil && usage.OOMKills > 0:
		return Exit{Crashed, outOfMemory}, nil
	}
	return Exit{Crashed, withStderr("QEMU ended while the agent was away", home.stderr())}, nil
}

// checkUUID makes sure that the process is the VM's, if it answers.
func (p *Process) checkUUID(ctx context.Context) error {
	info, err := query(ctx, p, (*raw.Monitor).QueryUUID)
	if err == nil && info.UUID != p.home.id {
		return fmt.Errorf("pid %d says it is VM %q", p.record.PID, info.UUID)
	}
	// Not answering is not being somebody else.
	return nil
}
