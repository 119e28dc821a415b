package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/retry"
)

// pollPauses are the pauses between checks whether a group is empty. Notifications are not used, because only version 2
// has them.
var pollPauses = retry.Pauses{First: time.Millisecond, Last: 50 * time.Millisecond}

// Procs returns the processes of a group, sorted; none if there is no such group.
func (t *Tree) Procs(name string) ([]int, error) {
	var all []int
	for _, file := range t.Entries(name) {
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list processes of cgroup %s: %w", name, err)
		}
		for f := range strings.FieldsSeq(string(text)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return nil, fmt.Errorf("list processes of cgroup %s: %w", name, err)
			}
			// 0 denotes a process outside the agent's pid namespace.
			if pid > 0 {
				all = append(all, pid)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// Kill kills all processes of a group and waits until none is left or ctx ends. A group without processes, or one that
// does not exist, is no error.
func (t *Tree) Kill(ctx context.Context, name string) error {
	err := retry.Do(ctx, pollPauses, func() error {
		left, err := t.Procs(name)
		if err != nil || len(left) == 0 {
			return retry.Permanent(err)
		}
		if err := t.signal(name, left); err != nil {
			return retry.Permanent(err)
		}
		return fmt.Errorf("%d processes left", len(left))
	})
	if err != nil {
		return fmt.Errorf("kill cgroup %s: %w", name, err)
	}
	return nil
}

// signal sends SIGKILL to the processes of a group, whose pids are procs. If a process has left the group and another
// process outside of the group has the same pid now, signal does not kill that other process.
func (t *Tree) signal(name string, procs []int) error {
	if t.version == 2 {
		err := write(filepath.Join(t.dirs[cpu], name, "cgroup.kill"), "1")
		if !errors.Is(err, fs.ErrNotExist) { // kernels before 5.14 have no cgroup.kill
			return err
		}
	}
	for _, pid := range procs {
		fd, err := unix.PidfdOpen(pid, 0)
		if errors.Is(err, syscall.ESRCH) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("pidfd_open", err)
		}
		// The pid is checked again after pidfd_open. If the group still contains the pid, the pidfd refers to a process
		// of the group, not to a later process with the same pid.
		still, err := t.Procs(name)
		if err == nil && slices.Contains(still, pid) {
			err = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		_ = unix.Close(fd)
		if err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return nil
}

// Remove removes a group, which must have no processes. It waits until the kernel has removed exited processes from the
// group, at most until ctx ends. A group that does not exist is no error.
func (t *Tree) Remove(ctx context.Context, name string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("remove cgroup: %q is not a name", name)
	}
	for _, dir := range t.paths(name) {
		err := retry.Do(ctx, pollPauses, func() error {
			err := t.sys.rmdir(dir)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if !errors.Is(err, syscall.EBUSY) {
				return retry.Permanent(err)
			}
			if procs, err := t.Procs(name); err != nil || len(procs) > 0 {
				return retry.Permanent(fmt.Errorf("it has processes %v: %w", procs, errors.Join(err, syscall.EBUSY)))
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("remove cgroup %s: %w", name, err)
		}
	}
	return nil
}
