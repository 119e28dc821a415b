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
)

// Limits of the interval at which a group is polled until it is empty. Only version 2 offers notifications, and they
// are not needed there.
const (
	minPoll = time.Millisecond
	maxPoll = 50 * time.Millisecond
)

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
	for pause := minPoll; ; pause = min(2*pause, maxPoll) {
		left, err := t.Procs(name)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			return nil
		}
		if err := t.signal(name, left); err != nil {
			return fmt.Errorf("kill cgroup %s: %w", name, err)
		}
		if err := sleep(ctx, pause); err != nil {
			return fmt.Errorf("kill cgroup %s: %d processes left: %w", name, len(left), err)
		}
	}
}

// signal kills the current processes of a group. It never hits another process that has reused a pid.
func (t *Tree) signal(name string, procs []int) error {
	if t.version == 2 {
		err := write(filepath.Join(t.dirs[cpu], name, "cgroup.kill"), "1")
		if !errors.Is(err, fs.ErrNotExist) { // kernels before 5.14
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
		// If the pid is in the group now, the process of the descriptor is the one in the group.
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

// Remove removes a group without processes. It waits until the kernel has removed exited processes from the group, at
// most until ctx ends. A group that does not exist is no error.
func (t *Tree) Remove(ctx context.Context, name string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("remove cgroup: %q is not a name", name)
	}
	for _, dir := range t.paths(name) {
		for pause := minPoll; ; pause = min(2*pause, maxPoll) {
			err := t.sys.rmdir(dir)
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				break
			}
			if !errors.Is(err, syscall.EBUSY) {
				return fmt.Errorf("remove cgroup %s: %w", name, err)
			}
			if procs, err := t.Procs(name); err != nil || len(procs) > 0 {
				return fmt.Errorf("remove cgroup %s: it has processes %v: %w", name, procs, errors.Join(err, syscall.EBUSY))
			}
			if err := sleep(ctx, pause); err != nil {
				return fmt.Errorf("remove cgroup %s: %w", name, err)
			}
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
