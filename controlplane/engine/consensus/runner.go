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

// RunnerOptions configures a Runner. Zero fields mean their default.
type RunnerOptions struct {
	TickInterval time.Duration // default 100 ms
	Envelopes    int           // limit of queued envelopes of other members; more are dropped; default 8192
	Calls        int           // limit of queued calls; more return ErrOverloaded; default 100,000
}

// Runner drives a Host with its own goroutines (threads.go) and has blocking methods that are safe for concurrent use.
// Calls and envelopes that arrive while the Host works are processed together afterwards, and entries that arrive while
// the log is written form the next write. So under load several entries share a write, without any added delay.
type Runner struct {
	host *Host
	opts RunnerOptions
	wake chan struct{} // capacity 1
	quit chan struct{}
	done chan struct{}

	mu       sync.Mutex
	in       inbox
	stopped  error // the error for refused calls and envelopes; nil while the Runner runs
	leaders  map[uint64]Leadership
	watchers map[*watcher]bool

	waiters sync.Pool
	work    map[uint64]*work // by group id; no element is added or removed after Start
}

// work counts the calls for one group on this member since Start.
type work struct{ proposals, proposedBytes, readIndexes atomic.Int64 }

// Work holds the counters of one group's calls on this member since Start.
type Work struct {
	Proposals     int64
	ProposedBytes int64 // total size of the data of these proposals
	ReadIndexes   int64 // number of calls of ReadIndex; concurrent calls share a request to the leader
}

// Work returns how many calls of a group this member has had since Start; zeros for an unknown group.
func (r *Runner) Work(group uint64) Work {
	w := r.work[group]
	if w == nil {
		return Work{}
	}
	return Work{w.proposals.Load(), w.proposedBytes.Load(), w.readIndexes.Load()}
}

// inbox holds the envelopes and calls that wait for the Host's goroutine.
type inbox struct {
	envelopes []message.Envelope
	calls     []func()
}

type watcher struct {
	group uint64
	ch    chan Leadership // capacity 1; contains the newest value
}

// waiter receives the result of one blocking call. finish and read are the callbacks that store it and signal ch.
type waiter struct {
	ch     chan struct{} // capacity 1
	result Result
	err    error
	finish func(Result, error)
	read   func(uint64, error)
}

// Start starts a Runner, which drives the host until Stop is called or the host fails. The Runner owns the host from
// then on. All groups must have been added before.
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
				_ = r.host.Tick() // the loop checks Host.Err
			case <-r.wake:
			}
		} else {
			select {
			case <-r.quit:
				r.end()
				return
			case <-tick.C:
				_ = r.host.Tick() // the loop checks Host.Err
			default:
			}
		}
		taken = r.take(taken)
		for i := range taken.envelopes {
			_ = r.host.Step(taken.envelopes[i]) // the loop checks Host.Err
		}
		for _, call := range taken.calls {
			call()
		}
		_ = r.host.Process() // the loop checks Host.Err
	}
	r.end()
}

// end refuses new calls, closes the host, calls the queued functions, which fail, and closes the watchers' channels.
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
		call() // fails, because the host has stopped
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

// take returns the inbox and replaces it with old, emptied, so that old's memory is reused.
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

// call queues f for the Host's goroutine. Unless call returns an error, f will be called, possibly when the host has
// already stopped. If always is set, the limit RunnerOptions.Calls does not apply.
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

// Deliver queues an envelope from another member. It returns false if it drops the envelope because the queue is full
// or the runner has stopped.
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

// DeliverSnapshot queues an envelope with the received files of its snapshot in dir; see Host.StepSnapshot. The
// transport must limit the number of concurrent snapshots.
func (r *Runner) DeliverSnapshot(e message.Envelope, dir string) error {
	return r.call(func() { _ = r.host.StepSnapshot(e, dir) }, true)
}

// SnapshotDir returns the directory in which the transport creates a directory for each snapshot that it receives.
func (r *Runner) SnapshotDir() string { return r.host.SnapshotDir() }

// ReportSnapshot reports the result of a Transport.SendSnapshot; see Host.ReportSnapshot.
func (r *Runner) ReportSnapshot(group, to uint64, delivered bool) {
	_ = r.call(func() { _ = r.host.ReportSnapshot(group, to, delivered) }, true)
}

// ReportUnreachable reports that messages to a member were lost; see Host.ReportUnreachable.
func (r *Runner) ReportUnreachable(member uint64) {
	_ = r.call(func() { _ = r.host.ReportUnreachable(member) }, false)
}

// Propose proposes data and returns the state machine's result when this member has applied it. The errors are those of
// Group.Propose and ErrNoGroup. If the context ends first, the error wraps ErrUncertain and the context's error.
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

// ReadIndex returns when this member has applied all entries that were committed before the call, so that reads of the
// group's state machine are linearizable. The errors are those of Group.ReadIndex, ErrNoGroup and the context's.
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

// TransferLeader makes member to the leader of the group and returns when it leads; see Group.TransferLeader.
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

// Status returns the state of the host and its groups: leaders, log positions, members and pending work.
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

// Leader returns the current leader of the group as far as this member knows. Leadership.Leader is 0 if none is known.
func (r *Runner) Leader(group uint64) Leadership {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.leaders[group]
}

// Leads returns a channel that receives the group's current leader and then each change. The channel buffers only the
// newest value. It is closed when the runner has stopped or stop is called.
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

// observe stores a change of leadership and sends it to the channels of Leads. The host calls it.
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

// Done returns a channel that is closed when the Host's goroutine has ended and the host is closed.
func (r *Runner) Done() <-chan struct{} { return r.done }

// Err returns the error that stopped the runner: nil while it runs, ErrStopped after Stop.
func (r *Runner) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stopped
}

// Stop transfers the leadership of the groups that this member leads to other reachable members, until the context
// ends. Then it stops and closes the host. It returns the error that stopped the host earlier, or that of closing the
// host.
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
				r.host.opts.Log.Info("leadership was not transferred before the stop", "id", id, "err", err)
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
