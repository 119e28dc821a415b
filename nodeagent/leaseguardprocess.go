package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/lease"
	"github.com/trivet-cloud/trivet/nodeagent/machine"
	"github.com/trivet-cloud/trivet/shared/filelock"
)

// guardLease is the first argument that makes this program act as the guard process. The other arguments are the data
// directory of the agent and the parent of the guests' control groups.
const guardLease = "guard-lease"

const (
	// guardEvery is the interval at which the agent checks that the guard process runs.
	guardEvery = time.Second
	// guardDelay is how long after the end of the lease the guard process kills VMs. An agent that runs does it earlier.
	guardDelay = 3 * time.Second
)

// guardProcess is a second process that powers off the VMs that must not run without a lease. It survives the agent:
// otherwise such a VM would run on after the lease of a host whose agent has crashed, while the control plane starts it
// on another host. The process ends when no VM needs it any more.
type guardProcess struct {
	dataDir, cgroup string
	// needed reports whether a VM needs the process. guarded is called with whether the process runs.
	needed  func() bool
	guarded func(bool)
	log     *slog.Logger
}

// lockPath is the file that the guard process has locked while it runs.
func (g *guardProcess) lockPath() string { return filepath.Join(g.dataDir, "guard.lock") }

// run starts the guard process when a VM needs it, and starts it again after it has ended, until ctx ends. The process
// runs on then.
func (g *guardProcess) run(ctx context.Context) error {
	return every(ctx, guardEvery, func() {
		if err := g.ensure(); err != nil {
			g.log.Error("cannot start the process that powers VMs off if the agent does not run", "err", err)
		}
	})
}

// ensure starts the guard process if a VM needs it and it does not run.
func (g *guardProcess) ensure() error {
	if !g.needed() {
		g.guarded(false)
		return nil
	}
	locked, err := isLocked(g.lockPath())
	g.guarded(locked)
	if err != nil || locked {
		return err
	}
	c := exec.Command("/proc/self/exe", guardLease, g.dataDir, g.cgroup)
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := c.Start(); err != nil {
		return err
	}
	go func() { _ = c.Wait() }()
	return nil
}

// isLocked reports whether a process has locked the file at path.
func isLocked(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return false, err
	}
	defer f.Close()
	err = filelock.Lock(f, 0)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

// guardMain runs the guard process and returns its exit code. It writes its log to the file guard.log in the data
// directory.
func guardMain(args []string) int {
	if len(args) != 2 {
		fmt.Fprintln(os.Stderr, "trivet-nodeagent: usage: trivet-nodeagent "+guardLease+" DATA_DIR CGROUP")
		return 2
	}
	dir, root := args[0], args[1]
	lock, err := os.OpenFile((&guardProcess{dataDir: dir}).lockPath(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return 1
	}
	if err := filelock.Lock(lock, 0); err != nil {
		return 0 // Another guard process runs.
	}
	defer lock.Close()
	out, err := os.OpenFile(filepath.Join(dir, "guard.log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return 1
	}
	defer out.Close()
	log := slog.New(slog.NewTextHandler(out, nil))
	if err := guardVMs(context.Background(), dir, root); err != nil {
		log.Error("the guard process ends", "err", err)
		return 1
	}
	return 0
}

// guardVMs waits until the lease has ended, and then kills the VMs that must not run without it. It returns when it has
// killed them, or when there is no such VM.
func guardVMs(ctx context.Context, dir, root string) error {
	tree, err := cgroup.Open(root)
	if err != nil {
		return err
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var ended time.Duration // when this process noticed the end of the lease; 0 while it is valid
	for ; ctx.Err() == nil; <-tick.C {
		leased, err := machine.StoppedWithLease(filepath.Join(dir, "records"))
		if err != nil || len(leased) == 0 {
			return err
		}
		l, err := lease.Open(filepath.Join(dir, "lease")) // The agent writes a new file with each heartbeat.
		if err != nil {
			return err
		}
		switch {
		case l.Valid():
			ended = 0
			continue
		case ended == 0:
			ended = lease.Now()
		}
		if lease.Now()-ended < guardDelay {
			continue
		}
		for _, id := range leased {
			attempt, cancel := context.WithTimeout(ctx, killWithoutLeaseTime)
			err = errors.Join(err, tree.Kill(attempt, string(id)))
			cancel()
		}
		return err
	}
	return ctx.Err()
}
