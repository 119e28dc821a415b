package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// Deadlines. Each bounds one step, whatever context the caller has.
const (
	commandTimeout = 10 * time.Second // a command that changes nothing slow
	greetTimeout   = time.Minute      // from QEMU's start to its first answer, on a host that is full
	quitTimeout    = 5 * time.Second  // from quit to the end of the process, which flushes its disks
	killTimeout    = 10 * time.Second // from SIGKILL to the end
	retryPause     = time.Second      // between attempts to reach a monitor that does not answer
	trimEvery      = 5 * time.Second
)

// ErrExited is the answer to commands when the process is gone: see [Process.Exit].
var ErrExited = errors.New("QEMU has ended")

// Process is a QEMU that runs, or did. Its methods may be called at the same time. While it is open it follows QEMU's
// events, bounds its logs, and when the guest has ended by itself writes down why and ends QEMU. Close it in any case.
type Process struct {
	launcher *Launcher
	home     *Home
	record   Record
	pidfd    *os.File
	dir      *os.File // the home, for the sockets' paths

	work, inspect *qmp.Socket

	life       context.Context // ends with Close and with the process
	end        context.CancelFunc
	tasks      sync.WaitGroup
	gone       atomic.Bool // the process is, though its end may not be settled yet
	configured atomic.Bool // QEMU has made the machine; see configure
	exited     chan struct{}
	wake       chan struct{} // capacity 1

	mu        sync.Mutex
	exit      Exit   // how it ended; Reason "" while unknown
	lastError string // of its disks

	quitWithin time.Duration // with quit: quitTimeout but in tests
}

// newProcess begins to watch a process. It owns pidfd, also when it fails.
func newProcess(l *Launcher, home *Home, r Record, pidfd int) (*Process, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil {
		_ = unix.Close(pidfd)
		return nil, err
	}
	p := &Process{launcher: l, home: home, record: r, pidfd: os.NewFile(uintptr(pidfd), "pidfd"),
		exited: make(chan struct{}), wake: make(chan struct{}, 1), quitWithin: quitTimeout}
	var err error
	if p.dir, err = os.Open(home.dir); err != nil {
		_ = p.pidfd.Close()
		return nil, err
	}
	p.life, p.end = context.WithCancel(context.Background())
	p.work = qmp.NewSocket(socketPath(p.dir, workSocket))
	p.inspect = qmp.NewSocket(socketPath(p.dir, inspectSocket))
	p.tasks.Go(p.waitExit)
	p.tasks.Go(p.trimLogs)
	return p, nil
}

// waitReady waits until QEMU answers for the first time, on both monitors.
func (p *Process) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	defer context.AfterFunc(p.life, cancel)()
	connect := func(m *qmp.Socket) error {
		_, err := m.Conn(ctx)
		return err
	}
	err := connect(p.inspect)
	if err == nil {
		err = connect(p.work)
	}
	if err == nil {
		err = p.configure(ctx)
	}
	if err == nil {
		p.tasks.Go(p.followEvents)
		return nil
	}
	// When the monitor closes, QEMU is ending: wait a moment for its exit status.
	late, stop := context.WithTimeout(context.Background(), endingTimeout)
	defer stop()
	select {
	case <-p.exited:
		return errors.New(p.Exit().Text)
	case <-late.Done():
		return fmt.Errorf("wait for QEMU: %w", err)
	}
}

// Record is what was started.
func (p *Process) Record() Record { return p.record }

// Exited is closed when the process is gone, and its end is written down.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Exit is how it ended, once Exited is closed; before that the zero Exit, or what is known already.
func (p *Process) Exit() Exit {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exit
}

// Wake gets a value after something has happened, one for any number of things: look at Status, LastError and Exited.
func (p *Process) Wake() <-chan struct{} { return p.wake }

// LastError says what stopped the guest: an error of a disk. It is empty again after Cont.
func (p *Process) LastError() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lastError
}

// Close stops watching and lets go. QEMU and its guest live on.
func (p *Process) Close() {
	p.end()
	_ = p.pidfd.SetReadDeadline(time.Unix(1, 0))
	p.tasks.Wait()
	_ = p.work.Close()
	_ = p.inspect.Close()
	closeAll(p.pidfd, p.dir)
}

func (p *Process) notify() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// waitExit waits for the end of the process, without a thread of its own, and settles it.
func (p *Process) waitExit() {
	raw, err := p.pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0 && err == nil
		})
	}
	if err != nil {
		return // closed: the process lives on, watched by nobody
	}
	p.gone.Store(true)
	p.end()
	status, known := reap(p.record.PID)
	p.recordExit(status, known)
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	if err := p.launcher.Cgroups.Kill(ctx, p.home.id); err == nil {
		_ = p.launcher.Cgroups.Remove(ctx, p.home.id)
	}
	close(p.exited)
	p.notify()
}

// recordExit decides how the process ended, unless its last state said so already.
func (p *Process) recordExit(status unix.WaitStatus, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exit.Reason != "" {
		return
	}
	if p.home.asked() == askedPowerOff {
		p.exit = exitAsked
	} else {
		p.exit = Exit{Crashed, p.describeExit(status, known)}
	}
	// Should this fail, the next Adopt comes to a conclusion of its own.
	_ = p.home.write("exit.json", p.exit)
}

// describeExit says what killed a process. Called with mu held.
func (p *Process) describeExit(status unix.WaitStatus, known bool) string {
	var text string
	usage, err := p.launcher.Cgroups.Usage(p.home.id)
	switch {
	case err == nil && usage.OOMKills > 0:
		return outOfMemory
	case known && status.Signaled():
		text = fmt.Sprintf("QEMU was ended by signal %d (%v)", status.Signal(), status.Signal())
	case known:
		text = fmt.Sprintf("QEMU ended with exit code %d", status.ExitStatus())
	default:
		// Only its parent learns the status of a process, and this agent took it over.
		text = "QEMU ended without a word, as it does when it is killed"
	}
	return withStderr(text, p.home.stderr())
}

// reap takes the exit status of a process that ended, if it is a child of ours.
func reap(pid int) (unix.WaitStatus, bool) {
	var status unix.WaitStatus
	got, err := unix.Wait4(pid, &status, unix.WNOHANG, nil)
	return status, err == nil && got == pid
}

// trimLogs bounds the logs of guest and QEMU, and kills a QEMU that writes its logs faster than a guest's console can.
func (p *Process) trimLogs() {
	logs := []*console.Log{p.home.Console(), p.home.stderr()}
	seen := []growth{lengthOf(logs[0]), lengthOf(logs[1])}
	t := time.NewTicker(trimEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-p.life.Done():
			return
		}
		for i, l := range logs {
			now := lengthOf(l)
			if seen[i].floods(now) {
				p.killFlooding()
				return
			}
			// A file system that has no room for a hole has room for the next attempt, or for nobody.
			_ = l.Trim()
			seen[i] = lengthOf(l)
		}
	}
}

// A log that grows between two measurements by more than floodBytes, and faster than floodRate bytes a second, is not a
// guest's console output: an emulated serial port carries less than 1 MB a second.
const (
	floodBytes = 32 << 20
	floodRate  = 4 << 20
)

// growth is the measured length of a log and its time; zero if the length could not be read. Data written while no
// agent ran is not used to compute a rate.
type growth struct {
	length int64
	at     time.Time
}

func lengthOf(l *console.Log) growth {
	n, err := l.Length()
	if err != nil {
		return growth{}
	}
	return growth{n, time.Now()}
}

func (g growth) floods(now growth) bool {
	grown := now.length - g.length
	return !g.at.IsZero() && !now.at.IsZero() && grown > floodBytes && float64(grown) > floodRate*now.at.Sub(g.at).Seconds()
}

// killFlooding ends QEMU at once.
func (p *Process) killFlooding() {
	p.mu.Lock()
	if p.exit.Reason == "" {
		p.exit = exitFlooded
		// If the write fails, the next Adopt determines the reason of the exit again.
		_ = p.home.write("exit.json", p.exit)
	}
	p.mu.Unlock()
	_ = p.killNow(p.life)
}

// eventRate and eventBurst bound how many of QEMU's events are handled, per second: each may cause a QMP query and
// wakes the VM's reconcile loop. A normal QEMU sends a few a minute. Excess events are dropped from the connection's
// log, and QEMU is queried for its state once instead.
const eventRate, eventBurst = 20, 200

// followEvents reads QEMU's events, for as long as there is a QEMU, and asks for its state when it may have missed some.
func (p *Process) followEvents() {
	for p.life.Err() == nil {
		conn, err := p.inspect.Conn(p.life)
		if err == nil {
			err = p.readEvents(conn)
		}
		if err != nil && p.life.Err() == nil {
			pause(p.life, retryPause)
		}
	}
}

func (p *Process) readEvents(conn *qmp.Conn) error {
	events := conn.Subscribe(conn.Mark())
	if err := p.handleRunState(conn); err != nil {
		return err
	}
	pace := rate.NewLimiter(eventRate, eventBurst)
	for {
		if err := pace.Wait(p.life); err != nil {
			return err
		}
		e, err := events.Next(p.life)
		if err != nil {
			return err
		}
		again := e.Dropped > 0
		switch e.Name {
		case "SHUTDOWN", "STOP", "GUEST_PANICKED":
			again = true
		case "BLOCK_IO_ERROR":
			p.recordDiskError(e)
		}
		if again {
			if err := p.handleRunState(conn); err != nil {
				return err
			}
		}
		p.notify()
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// Status is QEMU's run state.
type Status struct {
	// State is RunState of QEMU's qapi/run-state.json: prelaunch (has never run), running, paused, io-error, shutdown,
	// guest-panicked and others.
	State   string
	Running bool // guest CPUs run
}

// call runs f with the connection of m, which it opens if need be. The context of f ends with ctx, after
// commandTimeout, and with the process. The error wraps ErrExited when the process has ended.
func (p *Process) call(ctx context.Context, m *qmp.Socket, f func(context.Context, *qmp.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	defer context.AfterFunc(p.life, cancel)()
	conn, err := m.Conn(ctx)
	if err == nil {
		err = f(ctx, conn)
	}
	if err == nil {
		return nil
	}
	if p.gone.Load() {
		err = errors.Join(ErrExited, err)
	}
	return fmt.Errorf("VM %s: %w", p.home.id, err)
}

// do runs one of go-qemu's commands that has no result, such as (*raw.Monitor).Cont, by call.
func (p *Process) do(ctx context.Context, m *qmp.Socket, command func(*raw.Monitor) error) error {
	return p.call(ctx, m, func(ctx context.Context, conn *qmp.Conn) error { return command(raw.NewMonitor(conn.With(ctx))) })
}

// query runs one of go-qemu's commands that has a result, such as (*raw.Monitor).QueryStatus, by call on the inspection
// monitor.
func query[T any](ctx context.Context, p *Process, command func(*raw.Monitor) (T, error)) (result T, err error) {
	err = p.do(ctx, p.inspect, func(m *raw.Monitor) error {
		result, err = command(m)
		return err
	})
	return result, err
}

// Status queries QEMU's run state. It fails for a run state that go-qemu does not know.
func (p *Process) Status(ctx context.Context) (Status, error) {
	info, err := query(ctx, p, (*raw.Monitor).QueryStatus)
	if err != nil {
		return Status{}, err
	}
	return Status{State: info.Status.String(), Running: info.Running}, nil
}

// Resume lets the guest run: for the first time, or after an error of a disk.
func (p *Process) Resume(ctx context.Context) error {
	// The agent that started this QEMU may have ended before it called configure.
	if err := p.configure(ctx); err != nil {
		return err
	}
	// Forgotten before, not after: the next error may come at once.
	p.mu.Lock()
	last := p.lastError
	p.lastError = ""
	p.mu.Unlock()
	err := p.do(ctx, p.work, (*raw.Monitor).Cont)
	if err != nil {
		p.mu.Lock()
		if p.lastError == "" {
			p.lastError = last
		}
		p.mu.Unlock()
	}
	return err
}

// Pause stops the guest's CPUs until Cont.
func (p *Process) Pause(ctx context.Context) error { return p.do(ctx, p.work, (*raw.Monitor).Stop) }

// Reset presses the reset button.
func (p *Process) Reset(ctx context.Context) error {
	return p.do(ctx, p.work, (*raw.Monitor).SystemReset)
}

// DiskStats counts what a guest did with one disk since QEMU was started.
type DiskStats struct {
	ID                    string // the disk's
	ReadBytes, WriteBytes uint64
	Reads, Writes         uint64
}

// DiskStats queries the counters of all disks, in the order of the spec.
func (p *Process) DiskStats(ctx context.Context) ([]DiskStats, error) {
	blocks, err := query(ctx, p, func(m *raw.Monitor) ([]raw.BlockStats, error) { return m.QueryBlockstats(nil) })
	if err != nil {
		return nil, err
	}
	var out []DiskStats
	for _, d := range p.record.Spec.Disks {
		for _, b := range blocks {
			if b.NodeName == nil || *b.NodeName != d.node() {
				continue
			}
			out = append(out, DiskStats{ID: d.ID, ReadBytes: uint64(b.Stats.RdBytes), WriteBytes: uint64(b.Stats.WrBytes),
				Reads: uint64(b.Stats.RdOperations), Writes: uint64(b.Stats.WrOperations)})
		}
	}
	return out, nil
}

// Usage is what the whole process has used, by the host's count.
func (p *Process) Usage() (cgroup.Usage, error) { return p.launcher.Cgroups.Usage(p.home.id) }
