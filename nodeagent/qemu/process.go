package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// Maximum durations of single steps. A step also ends when the caller's context ends.
const (
	commandTimeout = 10 * time.Second // one QMP command
	greetTimeout   = time.Minute      // from QEMU's start to its first response, on a loaded host
	quitTimeout    = 5 * time.Second  // from quit to the end of the process, which flushes its disks
	killTimeout    = 10 * time.Second // from SIGKILL to the end of the process
	retryPause     = time.Second      // between attempts to connect to a monitor that does not respond
	trimEvery      = 5 * time.Second
)

// ErrExited is wrapped by the errors of commands when the process has ended. See [Process.Exit].
var ErrExited = errors.New("QEMU has ended")

// Process is a QEMU process, running or ended. Its methods may be called concurrently. Until Close, a Process reads
// QEMU's events and limits the size of QEMU's logs. When the guest has ended, it records the reason and ends QEMU. The
// caller must close the Process, also after QEMU has ended.
type Process struct {
	launcher *Launcher
	home     *Home
	record   Record // mu guards record.Spec.NICs and record.Spec.Disks; the other fields do not change
	pidfd    *os.File
	tpm      *os.File // pidfd of the TPM's process; nil if the VM has no TPM, or if the process had ended before
	dir      *os.File // the home's directory, for socketPath

	work, inspect *qmp.Socket
	keys          map[string]Keys // by disk id, until configure has passed them to QEMU

	life       context.Context // ends with Close, or when the process ends
	end        context.CancelFunc
	tasks      sync.WaitGroup
	tpmLost    atomic.Bool // see TPMLost
	statsAsked atomic.Bool // QEMU asks the guest's balloon driver for statistics; see GuestMemory
	gone       atomic.Bool // the process has ended, but its exit may not be recorded yet
	configured atomic.Bool // QEMU has created the machine; see configure
	exited     chan struct{}
	wake       chan struct{} // capacity 1; see Wake

	copies     sync.Mutex    // held while disks are copied or a step of FlattenDisk is in progress
	copying    atomic.Bool   // CopyDisks or endEarlierCopies is in progress
	copiesLeft chan struct{} // capacity 1; has a value if a copy may have left something in QEMU or a frozen guest
	layout     sync.Mutex    // held while the disks in the record change, and while QEMU begins copies

	guestPort chan struct{} // capacity 1; full while a client is connected to the guest agent's port

	fdSets    sync.Mutex // guards nextFDSet; held while newFDSets queries QEMU
	nextFDSet int        // see newFDSets; 0 until the first call

	vncClients  atomic.Uint64 // number of descriptors that OpenVNC has passed to QEMU
	screenshots sync.Mutex    // held while QEMU makes a picture of the display

	mu        sync.Mutex
	exit      Exit   // how the process ended; Reason is "" while that is unknown
	lastError string // the disk error that LastError returns
	// flattenErrors has the errors of failed jobs of FlattenDisk, by job id, until FlattenDisk returns them.
	flattenErrors map[string]string

	quitWithin        time.Duration // how long quit waits for QEMU's end: quitTimeout, less in tests
	thawWithin        time.Duration // how long CopyDisks tries to thaw the guest: thawTimeout, less in tests
	diskReleaseWithin time.Duration // how long UnplugDisk waits for the guest: diskReleaseTimeout, less in tests
	// agentPortOpen is guestHasAgent. Tests with a fake guest agent replace it.
	agentPortOpen func(context.Context) (bool, error)
}

// newProcess returns a Process for the running process with that pidfd, and starts to wait for its end and to limit its
// logs. It takes ownership of pidfd and closes it on error.
func newProcess(l *Launcher, home *Home, r Record, pidfd int) (*Process, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil {
		_ = unix.Close(pidfd)
		return nil, err
	}
	p := &Process{launcher: l, home: home, record: r, pidfd: os.NewFile(uintptr(pidfd), "pidfd"),
		exited: make(chan struct{}), wake: make(chan struct{}, 1), quitWithin: quitTimeout,
		diskReleaseWithin: diskReleaseTimeout, thawWithin: thawTimeout, copiesLeft: make(chan struct{}, 1),
		guestPort: make(chan struct{}, 1)}
	p.agentPortOpen = p.guestHasAgent
	var err error
	if p.dir, err = os.Open(home.dir); err != nil {
		_ = p.pidfd.Close()
		return nil, err
	}
	if r.Spec.TPM && r.TPM != nil {
		if p.tpm, err = home.openTPM(r.TPM); err != nil && !errors.Is(err, fs.ErrNotExist) {
			closeAll(p.pidfd, p.dir)
			return nil, err
		}
	}
	p.life, p.end = context.WithCancel(context.Background())
	p.work = qmp.NewSocket(socketPath(p.dir, workSocket))
	p.inspect = qmp.NewSocket(socketPath(p.dir, inspectSocket))
	p.tasks.Go(p.waitExit)
	if r.Spec.TPM {
		p.tasks.Go(p.watchTPM)
	}
	p.tasks.Go(p.trimLogs)
	p.tasks.Go(p.endEarlierCopies)
	return p, nil
}

// waitReady waits until QEMU responds on both monitors, then calls configure and starts to read QEMU's events.
func (p *Process) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	defer context.AfterFunc(p.life, cancel)()
	p.awaitIdle(ctx)
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
	if err == nil && (len(p.record.Spec.CPUs) > 0 || len(p.launcher.SharedCPUs) > 0) {
		err = p.setAffinity()
	}
	if err == nil {
		p.tasks.Go(p.followEvents)
		return nil
	}
	// The cause of err may be that QEMU ends. If QEMU ends within endingTimeout, the text of its exit is returned,
	// because it explains more than err.
	late, stop := context.WithTimeout(context.Background(), endingTimeout)
	defer stop()
	select {
	case <-p.exited:
		return errors.New(p.Exit().Text)
	case <-late.Done():
		return fmt.Errorf("wait for QEMU: %w", err)
	}
}

// Record returns the Record of the start of this process. The network interfaces and disks in the Record are the
// current ones of the VM.
func (p *Process) Record() Record {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.record
}

// Exited returns a channel that is closed when the process has ended and its exit is recorded.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Exit returns how the process ended. Before Exited is closed it returns the zero Exit, or the exit of a guest that has
// ended while QEMU still runs.
func (p *Process) Exit() Exit {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exit
}

// Wake returns a channel that receives a value when the result of Status, LastError, Exit or Exited may have changed.
// Several changes may give only one value.
func (p *Process) Wake() <-chan struct{} { return p.wake }

// LastError returns the disk error that has paused the guest, or "". Resume clears it.
func (p *Process) LastError() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lastError
}

// Close closes the connections to QEMU and ends the goroutines of p. QEMU and its guest continue to run.
func (p *Process) Close() {
	p.end()
	_ = p.pidfd.SetReadDeadline(time.Unix(1, 0))
	if p.tpm != nil {
		_ = p.tpm.SetReadDeadline(time.Unix(1, 0))
	}
	p.tasks.Wait()
	_ = p.work.Close()
	_ = p.inspect.Close()
	closeAll(p.pidfd, p.tpm, p.dir)
}

func (p *Process) notify() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// awaitEnd waits until the process of pidfd has ended, without blocking a thread. It returns an error if pidfd is
// closed or its read deadline passes.
func awaitEnd(pidfd *os.File) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 && err == nil
	})
}

// waitExit waits for the end of the process. Then it records the exit and removes the control group.
func (p *Process) waitExit() {
	if awaitEnd(p.pidfd) != nil {
		return // p was closed; the process continues to run.
	}
	p.gone.Store(true)
	p.end()
	status, known := reap(p.record.PID)
	p.recordExit(status, known)
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	if err := p.launcher.Cgroups.Kill(ctx, p.home.id); err == nil {
		p.reapTPM()
		_ = p.launcher.Cgroups.Remove(ctx, p.home.id)
	}
	close(p.exited)
	p.notify()
}

// recordExit records how the process ended. It does nothing if an exit of the guest is recorded already. status is the
// exit status of the process, and is valid only if known is true.
func (p *Process) recordExit(status unix.WaitStatus, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exit.Reason != "" {
		return
	}
	if p.home.requested() == requestedPowerOff {
		p.exit = exitRequested
	} else {
		p.exit = Exit{Crashed, p.describeExit(status, known)}
	}
	// If the write fails, the next Adopt determines the exit again.
	_ = p.home.write("exit.json", p.exit)
}

// describeExit returns the text of an unexpected exit. status is the exit status of the process, and is valid only if
// known is true. The caller must hold mu.
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
		// Only the parent of a process can read its exit status. This agent adopted the process, so it is not the
		// parent.
		text = "QEMU ended without an error message, as when it is killed"
	}
	return withStderr(text, p.home.stderr())
}

// reap collects the exit status of an ended process. It returns false if the process is not an ended child of this
// agent.
func reap(pid int) (unix.WaitStatus, bool) {
	var status unix.WaitStatus
	got, err := unix.Wait4(pid, &status, unix.WNOHANG, nil)
	return status, err == nil && got == pid
}

// reapPIDFD collects the exit status of an ended child of this agent. Unlike with a pid, no other process can be meant,
// also if the exit status was collected before.
func reapPIDFD(pidfd int) { _ = unix.Waitid(unix.P_PIDFD, pidfd, nil, unix.WEXITED|unix.WNOHANG, nil) }

// reapTPM collects the exit status of the TPM's process if it has ended.
func (p *Process) reapTPM() {
	if p.tpm == nil {
		return
	}
	if raw, err := p.tpm.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { reapPIDFD(int(fd)) })
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

// call calls f with the open connection of the monitor m. If there is none, call connects first. The context of f ends
// when ctx ends, after commandTimeout, or when the process ends or p is closed. The error wraps ErrExited when the
// process has ended.
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

// do runs a command of go-qemu that has no result, such as (*raw.Monitor).Cont, on the monitor m. It has the timeout
// and the errors of call.
func (p *Process) do(ctx context.Context, m *qmp.Socket, command func(*raw.Monitor) error) error {
	return p.call(ctx, m, func(ctx context.Context, conn *qmp.Conn) error { return command(raw.NewMonitor(conn.With(ctx))) })
}

// query runs a command of go-qemu that has a result, such as (*raw.Monitor).QueryStatus, on the monitor p.inspect. It
// has the timeout and the errors of call.
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

// Resume starts the guest's CPUs: for the first time, or again after a disk error or Pause.
//
// It returns ErrMigrating if the guest must not run because of a migration.
func (p *Process) Resume(ctx context.Context) error {
	if migrating, err := p.home.migrating(); migrating || err != nil {
		return errors.Join(ErrMigrating, err)
	}
	return p.resume(ctx)
}

// resume is Resume without the check for a migration.
func (p *Process) resume(ctx context.Context) error {
	// The agent that started this QEMU may have ended before it called configure.
	if err := p.configure(ctx); err != nil {
		return err
	}
	// The error is cleared before the command, because the next disk error may happen immediately.
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

// Copying reports whether CopyDisks is in progress, or endEarlierCopies. In this time, they may stop the guest's CPUs
// for a moment.
func (p *Process) Copying() bool { return p.copying.Load() }

// Pause stops the guest's CPUs until Resume.
func (p *Process) Pause(ctx context.Context) error { return p.do(ctx, p.work, (*raw.Monitor).Stop) }

// Reset resets the guest like its reset button. QEMU keeps running.
func (p *Process) Reset(ctx context.Context) error {
	return p.do(ctx, p.work, (*raw.Monitor).SystemReset)
}

// DiskStats are the I/O counters of one disk since QEMU was started, or since the disk was attached.
type DiskStats struct {
	ID                    string // of the disk
	Volume                string // the same value as in the Spec
	ReadBytes, WriteBytes uint64
	Reads, Writes         uint64
}

// DiskStats queries the I/O counters of all disks, and returns them in the order of the Spec.
func (p *Process) DiskStats(ctx context.Context) ([]DiskStats, error) {
	blocks, err := query(ctx, p, func(m *raw.Monitor) ([]raw.BlockStats, error) { return m.QueryBlockstats(nil) })
	if err != nil {
		return nil, err
	}
	var out []DiskStats
	for _, d := range p.Record().Spec.Disks {
		for _, b := range blocks {
			if b.NodeName == nil || *b.NodeName != d.node() {
				continue
			}
			out = append(out, DiskStats{ID: d.ID, Volume: d.Volume, ReadBytes: uint64(b.Stats.RdBytes), WriteBytes: uint64(b.Stats.WrBytes),
				Reads: uint64(b.Stats.RdOperations), Writes: uint64(b.Stats.WrOperations)})
		}
	}
	return out, nil
}

// Usage returns the resource usage of the VM's control group, as the host's kernel measures it.
func (p *Process) Usage() (cgroup.Usage, error) { return p.launcher.Cgroups.Usage(p.home.id) }
