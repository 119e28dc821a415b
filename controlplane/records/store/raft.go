package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// StateMachine implements consensus.StateMachine over an mvcc engine. Call Close after the consensus.Runner of its
// group is closed.
type StateMachine struct {
	engine *mvcc.Engine
	opts   StateMachineOptions

	// unflushed is the approximate number of bytes of the commands that were applied since the last flush began.
	unflushed atomic.Int64

	cancel  context.CancelFunc
	ask     chan struct{}
	done    chan struct{}
	mu      sync.Mutex
	flushed uint64
	failure error
}

var _ consensus.StateMachine = (*StateMachine)(nil)

// StateMachineOptions configures a StateMachine. The zero value is for the platform's own records.
type StateMachineOptions struct {
	// Inline makes Flush write before it returns, instead of in the background. It is for simulations.
	Inline bool
	// NoIDs hides the proposal IDs from the engine, which then applies every entry without checking for duplicates. Set
	// it only if proposers never repeat a proposal that may have been applied.
	NoIDs bool
	// FlushBytes is the minimum number of bytes of commands between two flushes; default 32 MiB. With a large value a
	// flush writes one large file instead of many small ones, which would be merged repeatedly. FlushBytes is also the
	// approximate maximum number of bytes that a restart must replay from the log.
	FlushBytes int64
}

// NewStateMachine returns a StateMachine over engine. If opts.Inline is false, it also starts the goroutine that
// flushes the engine.
func NewStateMachine(engine *mvcc.Engine, opts StateMachineOptions) *StateMachine {
	opts.FlushBytes = cmp.Or(opts.FlushBytes, 32<<20)
	ctx, cancel := context.WithCancel(context.Background())
	m := &StateMachine{engine: engine, opts: opts, cancel: cancel, ask: make(chan struct{}, 1), done: make(chan struct{})}
	if opts.Inline {
		close(m.done)
		return m
	}
	go m.flush(ctx)
	return m
}

// flush runs until ctx ends. Each time Flush requests it, it writes the engine's state to disk if at least FlushBytes
// bytes of commands were applied since the last flush. Afterwards the log can be truncated.
func (m *StateMachine) flush(ctx context.Context) {
	defer close(m.done)
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.ask:
		}
		if m.unflushed.Load() < m.opts.FlushBytes {
			continue
		}
		m.unflushed.Store(0)
		p, err := m.engine.Flush(ctx)
		m.mu.Lock()
		m.flushed, m.failure = max(m.flushed, p.Index), err
		m.mu.Unlock()
	}
}

// Close stops the background flushes. The engine remains open.
func (m *StateMachine) Close() {
	m.cancel()
	<-m.done
}

// Apply implements consensus.StateMachine. Each result is a command.Result, or nil if no proposer waits for it.
func (m *StateMachine) Apply(entries []consensus.Entry) ([]any, error) {
	commands := make([]command.Command, len(entries))
	var size int64
	for i, e := range entries {
		size += commandBytes + int64(len(e.Data))
		commands[i] = command.Command{Index: e.Index, Term: e.Term, ID: e.ID, Data: e.Data, WantSteps: e.Wanted}
		if m.opts.NoIDs {
			commands[i].ID = [16]byte{}
		}
	}
	results, err := m.engine.Apply(commands)
	if err != nil {
		return nil, err
	}
	m.unflushed.Add(size)
	answers := make([]any, len(results))
	for i, r := range results {
		if entries[i].Wanted {
			answers[i] = r
		}
	}
	return answers, nil
}

// commandBytes is the approximate overhead of a command in bytes. It is added to the length of the command's data.
const commandBytes = 100

// Applied implements consensus.StateMachine. It returns the index and term of the last entry that the engine contains.
func (m *StateMachine) Applied() (index, term uint64) {
	p := m.engine.Applied()
	return p.Index, p.Term
}

// Flush implements consensus.StateMachine. It requests a flush in the background and returns the index up to which the
// state is on disk now.
func (m *StateMachine) Flush() (uint64, error) {
	if m.opts.Inline {
		p, err := m.engine.Flush(context.Background())
		return p.Index, err
	}
	select {
	case m.ask <- struct{}{}:
	default:
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if errors.Is(m.failure, context.Canceled) {
		return m.flushed, nil
	}
	return m.flushed, m.failure
}

// checkpointDir is the subdirectory of a snapshot's directory to which Checkpoint writes the engine's state.
const checkpointDir = "state"

// Checkpoint implements consensus.StateMachine. It writes a checkpoint of the engine below dir and returns the index
// and term of the last entry in it.
func (m *StateMachine) Checkpoint(dir string) (index, term uint64, err error) {
	p, err := m.engine.Checkpoint(context.Background(), filepath.Join(dir, checkpointDir))
	return p.Index, p.Term, err
}

// Restore implements consensus.StateMachine. It replaces the engine's state by the checkpoint below dir.
func (m *StateMachine) Restore(dir string) error {
	return m.engine.Restore(filepath.Join(dir, checkpointDir))
}

// Group makes a raft group usable as the Proposer of a Store and as a leader.Leadership.
type Group struct {
	runner *consensus.Runner
	id     uint64

	mu      sync.Mutex
	now     consensus.Leadership
	changed chan struct{}
	stop    func()
	done    chan struct{}
}

var (
	_ Proposer          = (*Group)(nil)
	_ leader.Leadership = (*Group)(nil)
)

// NewGroup returns a Group that tracks which member leads the raft group with the given ID. Call Close when the Group
// is no longer needed.
func NewGroup(runner *consensus.Runner, id uint64) *Group {
	changes, stop := runner.Leads(id)
	g := &Group{runner: runner, id: id, changed: make(chan struct{}), stop: stop, done: make(chan struct{})}
	go func() {
		defer close(g.done)
		for l := range changes {
			g.mu.Lock()
			g.now = l
			close(g.changed)
			g.changed = make(chan struct{})
			g.mu.Unlock()
		}
	}()
	return g
}

// Close ends the goroutine that tracks the leadership. Leader then returns the last known leader.
func (g *Group) Close() {
	g.stop()
	<-g.done
}

// Leader implements leader.Leadership for the raft group.
func (g *Group) Leader() (member, term uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.now.Leader, g.now.Term
}

// Changed implements leader.Leadership for the raft group.
func (g *Group) Changed() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

// Propose implements Proposer. It proposes to the raft group and waits until the command is applied on this member.
func (g *Group) Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error) {
	answer, err := g.runner.Propose(ctx, g.id, id, data)
	if err != nil {
		return command.Result{}, explain(ctx, err)
	}
	r, ok := answer.(command.Result)
	if !ok {
		return command.Result{}, fmt.Errorf("the state machine answered a %T", answer)
	}
	return r, nil
}

// ReadIndex implements Proposer. It waits until this member has applied every write of the raft group that was
// acknowledged before the call.
func (g *Group) ReadIndex(ctx context.Context) error {
	return explain(ctx, g.runner.ReadIndex(ctx, g.id))
}

// explain turns errors of package consensus into leader.ErrNotLeader and faults, which callers of this package expect.
func explain(ctx context.Context, err error) error {
	var notLeader *consensus.NotLeaderError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &notLeader):
		return leader.ErrNotLeader
	case errors.Is(err, consensus.ErrUncertain):
		return fault.New(fault.Unavailable, "the leader was lost before it answered; whether the call took effect is not known").
			Because(err).MayRetry()
	case errors.Is(err, consensus.ErrNoLeader):
		return fault.New(fault.Unavailable, "no leader: fewer than a majority of the members can be reached").Because(err).MayRetry()
	case errors.Is(err, consensus.ErrOverloaded):
		return fault.New(fault.Unavailable, "this member has too much work queued").Because(err).MayRetry()
	case errors.Is(err, consensus.ErrStopped):
		return fault.New(fault.Unavailable, "this member is stopping").Because(err).MayRetry()
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("consensus: %w", err)
}
