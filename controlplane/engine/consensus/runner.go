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

// RunnerOptions has the options of Start. A field that is 0 has its default value.
type RunnerOptions struct {
	TickInterval time.Duration // default 100 ms
	Envelopes    int           // limit of queued envelopes of other members; more are dropped; default 8192
	Calls        int           // limit of queued calls; more return ErrOverloaded; default 100,000
}

// Runner drives a Host with its own goroutines (threads.go). Its methods block until they have a result, and are safe
// for concurrent use. Calls and envelopes that arrive while the Host is busy are processed together afterwards. Entries
// that arrive during a write of the log are part of the next write. So under load several entries share an fsync,
// without an artificial delay.
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

// work has the counters behind Work: the calls for one group on this member since Start.
type work struct{ proposals, proposedBytes, readIndexes atomic.Int64 }

// Work has the number of calls for one group on this member since Start.
type Work struct {
	Proposals     int64
	ProposedBytes int64 // total size of the data of these proposals
	ReadIndexes   int64 // number of calls of ReadIndex; concurrent calls share a request to the leader
}

// Work returns the number of calls for a group on this member since Start. For an unknown group all numbers are 0.
func (r *Runner) Work(group uint64) Work {
	w := r.work[group]
	if w == nil {
		return Work{}
	}
	return Work{w.proposals.Load(), w.proposedBytes.Load(), w.readIndexes.Load()}
}

// inbox holds the envelopes and function calls that wait for the Host's goroutine.
type inbox struct {
	envelopes []message.Envelope
	calls     []func()
}

type watcher struct {
	group uint64
	ch    chan Leadership // capacity 1; contains the newest value
}

// waiter receives the result of one blocking call of Propose or ReadIndex. The functions finish and read are the
// callbacks for the two. They store the result and then send to the channel ch.
type waiter struct {
	ch     chan struct{} // capacity 1
	result Result
	err    error
	finish func(Result, error)
	read   func(uint64, error)
}

// Start starts a Runner that drives the host until Stop is called or the host fails. All groups must have been added
// before. After Start, only the Runner may use the host.
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

// end stops the Runner: it refuses new calls, closes the host, calls the functions that are still queued, which fail
// because the host is closed, and closes the channels that Leads has returned.
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

// take returns the inbox and replaces it by an empty one. The new inbox reuses the memory of old, an inbox that was
// returned earlier.
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

// call queues f, which the Host's goroutine will call. If call returns an error, f will not be called. If the host
// stops meanwhile, f is still called, and must handle a stopped host. If always is true, the limit RunnerOptions.Calls
// does not apply.
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

// Deliver queues an envelope that the transport has received from another member. If the queue is full or the Runner
// has stopped, Deliver drops the envelope and returns false.
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

// DeliverSnapshot queues an envelope with a snapshot, whose received files are in dir; see Host.StepSnapshot. These
// calls are not limited, so the transport must limit the number of concurrent snapshots.
func (r *Runner) DeliverSnapshot(e message.Envelope, dir string) error {
	return r.call(func() { _ = r.host.StepSnapshot(e, dir) }, true)
}

// SnapshotDir is Host.SnapshotDir: the directory in which the transport creates a directory for each snapshot that it
// receives.
func (r *Runner) SnapshotDir() string { return r.host.SnapshotDir() }

// ReportSnapshot is called by the transport when a SendSnapshot has ended; see Host.ReportSnapshot.
func (r *Runner) ReportSnapshot(group, to uint64, delivered bool) {
	_ = r.call(func() { _ = r.host.ReportSnapshot(group, to, delivered) }, true)
}

// ReportUnreachable is called by the transport when messages to a member were lost; see Host.ReportUnreachable.
func (r *Runner) ReportUnreachable(member uint64) {
	_ = r.call(func() { _ = r.host.ReportUnreachable(member) }, false)
}

// Propose proposes data, waits until this member has applied it, and returns the result of the state machine. It can
// return each error of Group.Propose, and ErrNoGroup. If ctx ends first, the error wraps ErrUncertain and the cause of
// ctx.
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

// ReadIndex waits until this member has applied all entries that the group had committed before the call. Reads of the
// group's state machine from then on are linearizable. The errors are those of Group.ReadIndex, ErrNoGroup and the
// cause of ctx.
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

// TransferLeader is the blocking form of Group.TransferLeader. The parameter to is the ID of the member that is to lead
// the group. TransferLeader returns nil when that member leads.
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

// Leader returns the current leader of the group, as far as this member knows. If no leader is known, Leadership.Leader
// is 0.
func (r *Runner) Leader(group uint64) Leadership {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.leaders[group]
}

// Leads returns a channel that receives the group's current leader at once, and then every change of leader or term. A
// receiver that is too slow gets only the newest value. The channel is closed when the Runner has stopped or the caller
// has called stop.
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

// observe stores the new leader or term of a group, and sends it to the channels that Leads has returned. The host
// calls observe.
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

// Done returns a channel that is closed when the Runner has stopped and the host is closed.
func (r *Runner) Done() <-chan struct{} { return r.done }

// Err returns the error that stopped the Runner. It returns nil while the Runner runs, and ErrStopped after Stop.
func (r *Runner) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stopped
}

// Stop first transfers the leadership of all groups that this member leads to other members; it waits for that until
// ctx ends. Then it stops the Runner and closes the host. It returns an error if the host had failed before, or if
// closing it fails.
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
