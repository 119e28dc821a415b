// Package cgrouptest ends what tests have left in control groups because the test process was killed, or was ended by its
// timeout. The processes of guests do not end with the test process.
package cgrouptest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
)

// endTimeout is the maximum time for the processes of one control group to end.
const endTimeout = 30 * time.Second

// RemoveLeft removes the control group trees named PREFIX-PID or PREFIX-PID-… whose process PID is the caller or has
// ended. It first kills all processes in these trees. The caller must be in the PID namespace to which the PIDs belong.
func RemoveLeft(prefix string) error {
	name := regexp.MustCompile(`^` + regexp.QuoteMeta(prefix) + `-(\d+)(-.*)?$`)
	trees := map[string]bool{}
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		found, err := filepath.Glob(pattern + prefix + "-*")
		if err != nil {
			return err
		}
		for _, path := range found {
			trees[filepath.Base(path)] = true
		}
	}
	var errs []error
	for tree := range trees {
		match := name.FindStringSubmatch(tree)
		if match == nil {
			continue
		}
		if pid, err := strconv.Atoi(match[1]); err == nil && (pid == os.Getpid() || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)) {
			errs = append(errs, remove(tree))
		}
	}
	return errors.Join(errs...)
}

func remove(name string) error {
	tree, err := cgroup.Open(name)
	if err != nil {
		return err
	}
	if err := errors.Join(End(tree), tree.Close()); err != nil {
		return fmt.Errorf("remove the control groups %s of a test that was killed: %w", name, err)
	}
	return nil
}

// End kills all processes in the control groups of a tree, and removes these control groups. After an error it continues
// with the others.
func End(tree *cgroup.Tree) error {
	names, err := tree.List()
	errs := []error{err}
	for _, name := range names {
		ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
		errs = append(errs, tree.Kill(ctx, name), tree.Remove(ctx, name))
		cancel()
	}
	return errors.Join(errs...)
}
