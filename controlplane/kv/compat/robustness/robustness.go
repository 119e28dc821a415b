// Package robustness injects faults into a cluster while the traffic of etcd's robustness suite runs on it. etcd's own
// model then checks the responses and events that clients received. It checks that all reads and writes are
// linearizable, and that watches and reads of old revisions agree with the log. In addition, all members must have
// equal hashes at the end.
//
// A Round is one run: a new cluster of three real processes, some seconds of traffic of one kind, faults chosen by a
// seed, and the check. Rounds are short because the check needs the whole log and its cost grows with the history.
//
// The package can test two kinds of server, etcd and Trivet. The test of etcd shows that the suite itself is correct.
// The package does not depend on how either server works, except for ../export, which reads Trivet's log.
//
// # Environment
//
// Everything runs in the test's own network and mount namespaces, so that nothing is left behind however the test ends.
// Each member has its own network namespace. Clients connect from the test's namespace. The test's namespace also
// forwards the traffic between members, and can drop packets. Each member has its own file system, which can be frozen.
// Delay and random packet loss are not tested: they need netem, which not every kernel has.
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

// EnterNamespaces runs the test binary again, in new network and mount namespaces, and returns the exit code of that
// second process. In the second process, EnterNamespaces prepares the namespaces and returns inside as true. It
// requires root.
func EnterNamespaces() (inside bool, code int, err error) {
	if !lab.Inside() {
		return false, lab.Again(unix.CLONE_NEWNS), nil
	}
	if err := lab.Loopback(); err != nil {
		return true, 1, err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return true, 1, fmt.Errorf("make mounts private: %w", err)
	}
	// The test needs its own /run, because ip stores the names of network namespaces there, and iptables stores its
	// lock there.
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return true, 1, fmt.Errorf("mount /run: %w", err)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return true, 1, fmt.Errorf("enable packet forwarding: %w", err)
	}
	return true, 0, nil
}

// tool runs a program of the host, for at most 20 seconds.
func tool(name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// tools runs command lines, with words separated by blanks, until one fails.
func tools(lines ...string) error {
	for _, line := range lines {
		words := strings.Fields(line)
		if err := tool(words[0], words[1:]...); err != nil {
			return err
		}
	}
	return nil
}
