// Package robustness breaks a cluster on purpose while etcd's own robustness traffic runs on it, and has etcd's own model
// judge what the clients saw: linearizability of everything that was read and written, watches against the log, reads of
// old revisions against the log, and equal hashes on all members at the end.
//
// The unit is a Round: a new cluster of three real processes, some seconds of traffic of one kind, faults drawn from a
// seed, the check. Rounds are short because the check wants the whole log, and what it costs grows with the history.
//
// It knows how to run two kinds of server, etcd and ours: etcd shows that the suite itself is sound. It knows nothing of
// how either works, but for ../export, which reads our log.
//
// # The world
//
// Everything happens in a network and a mount namespace of the test's own, so that nothing is left behind however it
// ends. Each member has a network namespace, routed through the test's: clients reach it from there, and what two
// members say to each other is forwarded, where it can be dropped. Each member has a file system of its own, which can be
// frozen. Delay and loss would need netem, which not every kernel has; freezing and dropping are what there is.
package robustness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// Enter runs the test binary again in namespaces of its own and returns its exit code, or prepares them when it already
// runs there. It needs root.
func Enter() (inside bool, code int, err error) {
	if !lab.Inside() {
		return false, lab.Again(unix.CLONE_NEWNS), nil
	}
	if err := lab.Loopback(); err != nil {
		return true, 1, err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return true, 1, fmt.Errorf("make mounts private: %w", err)
	}
	// Where ip keeps the names of namespaces, and iptables its lock.
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return true, 1, fmt.Errorf("mount /run: %w", err)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return true, 1, fmt.Errorf("let packets be forwarded: %w", err)
	}
	return true, 0, nil
}

// tool runs a program of the host, for at most a while.
func tool(name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// tools runs lines of tool, words apart by blanks, until one fails.
func tools(lines ...string) error {
	for _, line := range lines {
		words := strings.Fields(line)
		if err := tool(words[0], words[1:]...); err != nil {
			return err
		}
	}
	return nil
}
