package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/lease"
	"github.com/trivet-cloud/trivet/nodeagent/machine"
	"github.com/trivet-cloud/trivet/nodeagent/watchdog"
	"github.com/trivet-cloud/trivet/shared/filelock"
)

// guardLease is the first argument that makes this program act as the guard process. The other arguments are the data
// directory of the agent, the parent of the control groups of the guests, and the watchdog device, which is empty
// without a watchdog.
const guardLease = "guard-lease"

const (
	// guardEvery is the interval at which the agent checks that the guard process runs, and the minimum time between two
	// starts of it.
	guardEvery = time.Second
	// guardStartEvery is that interval while the guard process starts. The target of a migration waits for the process
	// before the source begins to send.
	guardStartEvery = 10 * time.Millisecond
	// guardDelay is how long after the end of the lease the guard process kills VMs. An agent that runs does it earlier.
	guardDelay = 3 * time.Second
	// watchdogTimeout is the time without a call of Pet after which the watchdog resets the host. The remaining time of
	// the lease, guardDelay and watchdogTimeout must together be less than 45 s. This is the time after the last
	// heartbeat after which the control plane considers the host lost.
	watchdogTimeout = 10 * time.Second
)

// guardProcess starts the guard process, a second process that powers off the VMs that must not run without a lease.
// The guard process survives the agent. Without it, such a VM would run on after the lease of a host whose agent has
// crashed, while the control plane starts the VM on another host. The guard process ends when no VM needs it any more.
//
// With a watchdog device, the guard process arms the watchdog and pets it while the lease is valid. The watchdog
// therefore resets the host if a VM cannot be killed after the lease has ended, or if the guard process itself is
// killed. The guard process disarms the watchdog when it ends because no VM needs it any more.
type guardProcess struct {
	dataDir, cgroup, watchdog string
	// needed reports whether a VM needs the process. ensure calls guarded with true if the process runs.
	needed  func() bool
	guarded func(bool)
	log     *slog.Logger
	// wake makes run check at once. It has a buffer of one element.
	wake    chan struct{}
	started time.Time   // the last start of the process
	failed  atomic.Bool // the process has failed since the agent started
}

// newGuardProcess returns the guardProcess of an agent. Its machines must be open before run is called.
func newGuardProcess(a *agent) *guardProcess {
	return &guardProcess{
		dataDir: a.config.DataDir, cgroup: a.config.Cgroup, watchdog: a.config.Watchdog, log: a.log, wake: make(chan struct{}, 1),
		needed: func() bool { return a.machines.NeedsGuard() },
		guarded: func(guarded bool) {
			if a.machines.SetGuarded(guarded) {
				a.loop.ObserveAll()
			}
		},
	}
}

// check makes run check at once whether a VM needs the guard process. It does not block.
func (g *guardProcess) check() {
	select {
	case g.wake <- struct{}{}:
	default: // a check is due already
	}
}

// lockPath is the file that the guard process has locked while it runs.
func (g *guardProcess) lockPath() string { return filepath.Join(g.dataDir, "guard.lock") }

// run starts the guard process when a VM needs it, and starts it again after it has ended, until ctx ends. The process
// runs on then.
func (g *guardProcess) run(ctx context.Context) error {
	for {
		starting, err := g.ensure()
		if err != nil {
			g.log.Error("cannot start the guard process", "err", err)
		}
		wait := guardEvery
		if starting {
			wait = guardStartEvery
		}
		select {
		case <-time.After(wait):
		case <-g.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ensure starts the guard process if a VM needs it and it does not run. starting is true if the process was started less
// than guardEvery ago and does not have the lock yet.
func (g *guardProcess) ensure() (starting bool, err error) {
	if !g.needed() {
		g.guarded(false)
		return false, nil
	}
	locked, err := isLocked(g.lockPath())
	g.guarded(locked)
	switch {
	case err != nil || locked:
		return false, err
	case time.Since(g.started) < guardEvery:
		return true, nil
	}
	g.started = time.Now()
	c := exec.Command("/proc/self/exe", guardLease, g.dataDir, g.cgroup, g.watchdog)
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := c.Start(); err != nil {
		return false, err
	}
	go func() {
		if c.Wait() != nil && !g.failed.Swap(true) {
			g.log.Error("the guard process has failed and is restarted every second",
				"log", filepath.Join(g.dataDir, "guard.log"))
		}
	}()
	return true, nil
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
	if len(args) != 3 {
		fmt.Fprintln(os.Stderr, "trivet-nodeagent: usage: trivet-nodeagent "+guardLease+" DATA_DIR CGROUP WATCHDOG")
		return 2
	}
	dir, root, device := args[0], args[1], args[2]
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
	tree, err := cgroup.Open(root)
	if err != nil {
		log.Error("cannot open the control groups of the VMs", "err", err)
		return 1
	}
	w := guardedVMs{dir: dir, kill: tree.Kill, pet: func() error { return nil }}
	if device != "" {
		dog, err := watchdog.Open(device, watchdogTimeout)
		if err != nil {
			log.Error("cannot arm the watchdog", "err", err)
			return 1
		}
		defer func() {
			if err := dog.Disarm(); err != nil {
				log.Error("cannot disarm the watchdog: the watchdog will reset the host", "err", err)
			}
		}()
		w.pet = dog.Pet
	}
	changes := guardLog{log: log}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for ; ; <-tick.C {
		done, err := w.check(context.Background(), lease.Now())
		changes.write(err)
		if done {
			return 0
		}
	}
}

// guardLog writes the results of check to the log of the guard process. A result that is the same as the last one is not
// written again, because check runs once a second.
type guardLog struct {
	log  *slog.Logger
	last string
}

func (g *guardLog) write(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	switch {
	case text == g.last:
	case err != nil:
		g.log.Error("cannot check the VMs that need the lease; trying again every second", "err", err)
	default:
		g.log.Info("the VMs that need the lease can be checked again")
	}
	g.last = text
}

// guardedVMs is the state of the guard process.
type guardedVMs struct {
	dir  string // data directory of the agent
	kill func(ctx context.Context, vm string) error
	// pet restarts the timeout of the watchdog. Without a watchdog it does nothing.
	pet func() error
	// ended is when the process noticed the end of the lease. It is 0 while the lease is valid.
	ended time.Duration
}

// check pets the watchdog if the lease is valid. If the lease ended at least guardDelay ago, check kills the VMs that
// must not run without it. A VM whose record cannot be read counts as one of them. The parameter now is the result of
// lease.Now. check returns true when no VM needs the guard process any more. After an error a VM may still run, so the
// caller must call check again.
func (g *guardedVMs) check(ctx context.Context, now time.Duration) (done bool, err error) {
	leased, err := machine.StoppedWithLease(filepath.Join(g.dir, "records"))
	if errors.Is(err, fs.ErrNotExist) { // The data directory was removed.
		return true, nil
	}
	if err == nil && len(leased) == 0 {
		return true, nil
	}
	l, leaseErr := lease.Open(filepath.Join(g.dir, "lease")) // The agent writes a new file with each heartbeat.
	if leaseErr != nil {
		return false, errors.Join(err, leaseErr)
	}
	switch {
	case l.Valid():
		g.ended = 0
		return false, errors.Join(err, g.pet())
	case g.ended == 0:
		g.ended = now
	}
	if now-g.ended < guardDelay {
		return false, err
	}
	// At the same time: a QEMU that cannot be killed must not delay the end of the others.
	attempt, cancel := context.WithTimeout(ctx, killWithoutLeaseTime)
	defer cancel()
	var kills errgroup.Group
	for _, id := range leased {
		kills.Go(func() error { return g.kill(attempt, string(id)) })
	}
	err = errors.Join(err, kills.Wait())
	return err == nil, err
}
