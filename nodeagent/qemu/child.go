package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// launchTimeout is the maximum time from the fork of the launcher until it has executed QEMU or swtpm.
const launchTimeout = 20 * time.Second

// child describes a process that startLauncher starts.
type child struct {
	log      *console.Log // receives the standard error of the process
	isolated bool         // the process gets a network namespace of its own, without any device
	// record writes the pid and the start time (see Record.StartTime) of the process to the VM's record.
	record func(pid int, start uint64) error
}

// startLauncher starts the launcher with the plan pl, waits until the launcher has executed its program, and returns
// the pidfd of the process. It calls c.record before it sends the plan. If the agent ends before the plan is sent, the
// launcher therefore ends too. If the agent ends later, the next agent finds the process in the record. If
// startLauncher fails, it kills the process.
func (l *Launcher) startLauncher(ctx context.Context, c child, pl plan, keep []*os.File) (pidfd int, err error) {
	planRead, planWrite, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer closeAll(planRead, planWrite)
	statusRead, statusWrite, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer closeAll(statusRead, statusWrite)

	pl.KeepFDs = 3 + len(keep)
	// opened is a separate variable for the deferred function. A return statement with an error sets the result pidfd to
	// 0 before the deferred function runs.
	opened, pid, err := l.fork(c, pl.KeepFDs, append(keep, planRead, statusWrite))
	if err != nil {
		return 0, fmt.Errorf("start launcher: %w", err)
	}
	defer func() {
		if err != nil {
			_ = unix.PidfdSendSignal(opened, unix.SIGKILL, nil, 0)
			_, _ = unix.Wait4(pid, nil, 0, nil)
			_ = unix.Close(opened)
		}
	}()
	closeAll(planRead, statusWrite)
	started, err := startTime(pid)
	if err != nil {
		return 0, err
	}
	if err = c.record(pid, started); err != nil {
		return 0, fmt.Errorf("write record: %w", err)
	}

	deadline := time.Now().Add(launchTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = planWrite.SetDeadline(deadline)
	_ = statusRead.SetDeadline(deadline)
	defer context.AfterFunc(ctx, func() { _ = statusRead.SetDeadline(time.Unix(1, 0)) })()
	err = json.NewEncoder(planWrite).Encode(pl)
	_ = planWrite.Close()
	text, readErr := io.ReadAll(io.LimitReader(statusRead, 4096))
	if len(text) > 0 {
		err = errors.New(string(text))
	} else {
		err = errors.Join(err, readErr)
	}
	if err != nil {
		return 0, fmt.Errorf("launcher: %w", err)
	}
	return opened, nil
}

// fork starts the launcher. The launcher inherits the files in pass as descriptors 3 and higher. The parameter in is
// the number of the descriptor from which the launcher reads its plan. The launcher writes an error to descriptor in+1.
func (l *Launcher) fork(c child, in int, pass []*os.File) (pidfd, pid int, err error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, 0, err
	}
	defer null.Close()
	stderr, err := c.log.Writer()
	if err != nil {
		return 0, 0, err
	}
	defer stderr.Close()
	flags := uintptr(unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS)
	if c.isolated {
		flags |= unix.CLONE_NEWNET
	}
	proc, err := os.StartProcess(l.LauncherCommand[0], append(slices.Clone(l.LauncherCommand), strconv.Itoa(in), strconv.Itoa(in+1)), &os.ProcAttr{
		Dir:   "/",
		Env:   append(mutant.Environ(), "GOMAXPROCS=1"), // for the launcher; QEMU's environment is empty
		Files: append([]*os.File{null, stderr, stderr}, pass...),
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Cloneflags: flags,
			PidFD:      &pidfd,
		},
	})
	if err != nil {
		return 0, 0, err
	}
	pid = proc.Pid
	// The os.Process is not needed: Process waits for the end of QEMU with the pidfd. os.Process.Wait would block a
	// thread for each VM.
	return pidfd, pid, proc.Release()
}
