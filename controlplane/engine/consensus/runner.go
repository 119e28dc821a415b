package consensus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// RunnerOptions start a Runner. Zero fields mean their default.
type RunnerOptions struct {
	TickInterval time.Duration // default 100 ms
	Envelopes    int           // of peers that wait, beyond which they are dropped; default 8192
	Calls        int           // of callers that wait, beyond which they get ErrOverloaded; default 100,000
}

// Runner drives a host with goroutines of its own (threads.go) and makes it safe to use by many. What arrives while the
// host works is taken up together, and so is what has to be written while the disk works: batches form by themselves, and
// nothing ever waits for one.
type Runner struct {
	host *Host
	opts RunnerOptions
	wake chan struct{} // capacity 1
	quit chan struct{}
	done chan struct{}

	mu       sync.Mutex
	in       inbox
	stopped  error // why nothing is accepted any more
	leaders  map[uint64]Leadership
	watchers map[*watcher]bool

	waiters sync.Pool
	work    map[uint64]*work // of each group; the map does not change
}

// work counts what callers of this member have asked of a group since Start.
type work struct{ proposals, proposedBytes, readIndexes atomic.Int64 }

// Work is how much callers of this member have asked of a group since Start.
type Work struct {
	Proposals     int64
	ProposedBytes int64 // data of these proposals
	ReadIndexes   int64 // calls of ReadIndex; concurrent ones share a round
}

// Work returns what callers of this member have asked of a group since Start; zero for an unknown group.
func (r *Runner) Work(group uint64) Work {
	w := r.work[group]
	if w == nil {
		return Work{}
	}
	return Work{w.proposals.Load(), w.proposedBytes.Load(), w.readIndexes.Load()}
}

// inbox is what waits for the goroutine.
type inbox struct {
	envelopes []message.Envelope
	calls     []func()
}

type watcher struct {
	group uint64
	ch    chan Leadership // capacity 1; holds the newest
}

// waiter is the end of one blocking call.
type waiter struct {
	ch     chan struct{} // capacity 1
	result Result
	err    error
	finish func(Result, error)
	read   func(uint64, error)
}

// Start drives the host, which is the Runner's from here on, until Stop or the end of the host. All groups must have
// been added.
func Start(h *Host, opts RunnerOptions) *Runner {
	opts.TickInterval = cmp.Or(opts.TickInterval, 100*time.Millisecond)
	opts.Envelopes = cmp.Or(opts.Envelopes, 8192)
	opts.Calls = cmp.Or(opts.Calls, 100_000)
	r := &Runner{
		host: h, opts: opts,
		wake: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
		leaders: map[uint64]Leadership{}, watchers: map[*watcher]bool{}, work: map[uint64]*work{},
	}
	r.waiters.New = func() any {
		w := &waiter{ch: make(chan struct{}, 1)}
		w.finish = func(result Result, err error) { w.result, w.err = result, err; w.ch <- struct{}{} }
		w.read = func(index uint64, err error) { w.finish(Result{Index: index}, err) }
		return w
	}
	for _, g := range h.groups {
		r.work[g.id] = &work{}
		r.leaders[g.id] = Leadership{Group: g.id, Leader: g.leader, Term: g.term}
	}
	h.onLeader = r.observe
	h.threads = startThreads(r)
	go r.run()
	return r
}

func (r *Runner) run() {
	defer close(r.done)
	tick := time.NewTicker(r.opts.TickInterval)
	defer tick.Stop()
	var taken inbox
	for r.host.Err() == nil {
		if r.host.Idle() && !r.pending() {
			select {
			case <-r.quit:
				r.end()
				return
			case <-tick.C:
				_ = r.host.Tick() // a host that stops says so by Err
			case <-r.wake:
			}
		} else {
			select {
			case <-r.quit:
				r.end()
				return
			case <-tick.C:
				_ = r.host.Tick() // as above
			default:
			}
		}
		taken = r.take(taken)
		for i := range taken.envelopes {
			_ = r.host.Step(taken.envelopes[i]) // as above
		}
		for _, call := range taken.calls {
			call()
		}
		_ = r.host.Process() // as above
	}
	r.end()
}

// end refuses new work and answers what is left.
func (r *Runner) end() {
	r.mu.Lock()
	r.stopped = cmp.Or(r.host.Err(), ErrStopped)
	r.mu.Unlock()
	r.host.threads.stop()
	err := r.host.Close()
	if err != nil {
		r.host.opts.Log.Error("close consensus", "err", err)
	}
	for _, call := range r.take(inbox{}).calls {
		call() // each finds a host that has stopped
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.watchers {
		close(w.ch)
	}
	clear(r.watchers)
	if err != nil && errors.Is(r.stopped, ErrStopped) {
		r.stopped = errors.Join(r.stopped, err)
	}
}

func (r *Runner) pending() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.in.envelopes) > 0 || len(r.in.calls) > 0
}

// take exchanges the inbox for an emptied one.
func (r *Runner) take(old inbox) inbox {
	clear(old.envelopes)
	clear(old.calls)
	r.mu.Lock()
	defer r.mu.Unlock()
	full := r.in
	r.in = inbox{old.envelopes[:0], old.calls[:0]}
	return full
}

func (r *Runner) ring() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// call queues f for the goroutine. Unless it returns an error, f is called, if need be with a host that has stopped.
func (r *Runner) call(f func(), always bool) error {
	r.mu.Lock()
	switch {
	case r.stopped != nil:
		defer r.mu.Unlock()
		return r.stopped
	case !always && len(r.in.calls) >= r.opts.Calls:
		defer r.mu.Unlock()
		return fmt.Errorf("%w: %d calls wait", ErrOverloaded, r.opts.Calls)
	}
	r.in.calls = append(r.in.calls, f)
	first := len(r.in.calls)+len(r.in.envelopes) == 1
	r.mu.Unlock()
	if first {
		r.ring()
	}
	return nil
}

// Deliver takes an envelope from another member; false says that it was dropped because too many wait.
func (r *Runner) Deliver(e message.Envelope) bool {
	r.mu.Lock()
	ok := r.stopped == nil && len(r.in.envelopes) < r.opts.Envelopes
	if ok {
		r.in.envelopes = append(r.in.envelopes, e)
	}
	first := len(r.in.calls)+len(r.in.envelopes) == 1
	r.mu.Unlock()
	if ok && first {
		r.ring()
	}
	return ok
}

// DeliverSnapshot takes an envelope with the files that came with it; see Host.StepSnapshot. The transport bounds how
// many it receives at a time.
func (r *Runner) DeliverSnapshot(e message.Envelope, dir string) error {
	return r.call(func() { _ = r.host.StepSnapshot(e, dir) }, true)
}

// SnapshotDir is where the transport makes directories for what it receives.
func (r *Runner) SnapshotDir() string { return r.host.SnapshotDir() }

// ReportSnapshot says how a Transport.SendSnapshot ended; see Host.ReportSnapshot.
func (r *Runner) ReportSnapshot(group, to uint64, delivered bool) {
	_ = r.call(func() { _ = r.host.ReportSnapshot(group, to, delivered) }, true)
}

// ReportUnreachable says that messages to a member were lost.
func (r *Runner) ReportUnreachable(member uint64) {
	_ = r.call(func() { _ = r.host.ReportUnreachable(member) }, false)
}

// Propose returns the state machine's answer to data. The errors are those of Group.Propose and ErrNoGroup; when the
// context ends first, ErrUncertain with the context's error.
func (r *Runner) Propose(ctx context.Context, group uint64, id [16]byte, data []byte) (any, error) {
	if n := r.work[group]; n != nil {
		n.proposals.Add(1)
		n.proposedBytes.Add(int64(len(data)))
	}
	w := r.waiters.Get().(*waiter)
	err := r.call(func() {
		if g := r.host.Group(group); g != nil {
			g.Propose(id, data, w.finish)
		} else {
			w.finish(Result{}, ErrNoGroup)
		}
	}, false)
	if err != nil {
		r.waiters.Put(w)
		return nil, err
	}
	select {
	case <-w.ch:
		answer, err := w.result.Answer, w.err
		w.result, w.err = Result{}, nil
		r.waiters.Put(w)
		return answer, err
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: %w", ErrUncertain, context.Cause(ctx))
	}
}

// ReadIndex returns when reads of the group's state machine are linearizable as of the call. The errors are those of
// Group.ReadIndex, ErrNoGroup and the context's.
func (r *Runner) ReadIndex(ctx context.Context, group uint64) error {
	if n := r.work[group]; n != nil {
		n.readIndexes.Add(1)
	}
	w := r.waiters.Get().(*waiter)
	var read *Read
	err := r.call(func() {
		if g := r.host.Group(group); g != nil {
			read = g.ReadIndex(w.read)
		} else {
			w.finish(Result{}, ErrNoGroup)
		}
	}, false)
	if err != nil {
		r.waiters.Put(w)
		return err
	}
	select {
	case <-w.ch:
		err := w.err
		w.result, w.err = Result{}, nil
		r.waiters.Put(w)
		return err
	case <-ctx.Done():
		_ = r.call(func() {
			if read != nil {
				read.Cancel()
			}
		}, true)
		return context.Cause(ctx)
	}
}

// TransferLeader returns when the member leads the group; see Group.TransferLeader.
func (r *Runner) TransferLeader(ctx context.Context, group, to uint64) error {
	ended := make(chan error, 1)
	err := r.call(func() {
		if g := r.host.Group(group); g != nil {
			g.TransferLeader(to, func(err error) { ended <- err })
		} else {
			ended <- ErrNoGroup
		}
	}, false)
	if err != nil {
		return err
	}
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Status describes the host.
func (r *Runner) Status(ctx context.Context) (Status, error) {
	ch := make(chan Status, 1)
	if err := r.call(func() { ch <- r.host.Status() }, false); err != nil {
		return Status{}, err
	}
	select {
	case s := <-ch:
		return s, nil
	case <-ctx.Done():
		return Status{}, context.Cause(ctx)
	}
}

// Leader returns who leads the group as far as this member knows.
func (r *Runner) Leader(group uint64) Leadership {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.leaders[group]
}

// Leads is Leader and, from then on, its changes: the channel holds the newest that was not received yet, and is closed
// when the runner has stopped or stop is called.
func (r *Runner) Leads(group uint64) (changes <-chan Leadership, stop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := &watcher{group, make(chan Leadership, 1)}
	if r.stopped != nil {
		close(w.ch)
		return w.ch, func() {}
	}
	w.ch <- r.leaders[group]
	r.watchers[w] = true
	return w.ch, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.watchers[w] {
			delete(r.watchers, w)
			close(w.ch)
		}
	}
}

// observe is the host's callback.
func (r *Runner) observe(l Leadership) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leaders[l.Group] = l
	for w := range r.watchers {
		if w.group != l.Group {
			continue
		}
		select {
		case <-w.ch:
		default:
		}
		w.ch <- l
	}
}

// Done is closed when the goroutine has ended and the host is closed.
func (r *Runner) Done() <-chan struct{} { return r.done }

// Err returns why the runner has stopped, nil while it has not. After Stop it is ErrStopped.
func (r *Runner) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stopped
}

// Stop hands the leadership of this member's groups to others as far as that goes before the context ends, and where
// others are left, then stops and closes the host. It returns what went wrong with the host, also earlier.
func (r *Runner) Stop(ctx context.Context) error {
	r.mu.Lock()
	var led []uint64
	for id, l := range r.leaders {
		if l.Leader == r.host.opts.ID {
			led = append(led, id)
		}
	}
	r.mu.Unlock()
	var wg sync.WaitGroup
	for _, id := range led {
		wg.Go(func() {
			err := r.TransferLeader(ctx, id, 0)
			var elsewhere *NotLeaderError
			if err != nil && !errors.Is(err, ErrAlone) && !errors.As(err, &elsewhere) {
				r.host.opts.Log.Info("kept the leadership until the end", "id", id, "err", err)
			}
		})
	}
	wg.Wait()
	r.mu.Lock()
	select {
	case <-r.quit:
	default:
		close(r.quit)
	}
	r.mu.Unlock()
	<-r.done
	if err := r.Err(); err != nil && err != ErrStopped {
		return err
	}
	return nil
}
