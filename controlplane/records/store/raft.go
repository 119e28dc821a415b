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

// Machine makes an engine the state machine of a raft group. Close it after the group's host.
type Machine struct {
	engine *mvcc.Engine
	opts   MachineOptions

	// unflushed is about how many bytes were applied since the last flush began.
	unflushed atomic.Int64

	cancel  context.CancelFunc
	ask     chan struct{}
	done    chan struct{}
	mu      sync.Mutex
	flushed uint64
	failure error
}

var _ consensus.StateMachine = (*Machine)(nil)

// MachineOptions of a Machine; the zero value is that of the platform's own records.
type MachineOptions struct {
	// Inline flushes when asked instead of in the background, for a simulation.
	Inline bool
	// NoIDs keeps the ids of proposals from the engine, which then remembers none and applies each entry: for proposers
	// that never propose again what may have been applied.
	NoIDs bool
	// FlushBytes of commands are applied at least between two flushes, so that each writes one large file instead of many
	// small ones, which would be merged again and again; default 32 MiB. It is also what a restart replays at most, about.
	FlushBytes int64
}

// NewMachine wraps an engine.
func NewMachine(engine *mvcc.Engine, opts MachineOptions) *Machine {
	opts.FlushBytes = cmp.Or(opts.FlushBytes, 32<<20)
	ctx, cancel := context.WithCancel(context.Background())
	m := &Machine{engine: engine, opts: opts, cancel: cancel, ask: make(chan struct{}, 1), done: make(chan struct{})}
	if opts.Inline {
		close(m.done)
		return m
	}
	go m.flush(ctx)
	return m
}

// flush makes the state durable whenever it was asked to and there is enough of it, so that the log can be cut.
func (m *Machine) flush(ctx context.Context) {
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

// Close ends the background work. The engine is the caller's.
func (m *Machine) Close() {
	m.cancel()
	<-m.done
}

// Apply implements consensus.StateMachine. The answers are of type command.Result.
func (m *Machine) Apply(entries []consensus.Entry) ([]any, error) {
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

// commandBytes is what a command costs beside its data, about.
const commandBytes = 100

// Applied implements consensus.StateMachine.
func (m *Machine) Applied() (index, term uint64) {
	p := m.engine.Applied()
	return p.Index, p.Term
}

// Flush implements consensus.StateMachine: it asks for a flush and says what is durable already.
func (m *Machine) Flush() (uint64, error) {
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

// checkpointDir is below the directory that a snapshot travels as.
const checkpointDir = "state"

// Checkpoint implements consensus.StateMachine.
func (m *Machine) Checkpoint(dir string) (index, term uint64, err error) {
	p, err := m.engine.Checkpoint(context.Background(), filepath.Join(dir, checkpointDir))
	return p.Index, p.Term, err
}

// Restore implements consensus.StateMachine.
func (m *Machine) Restore(dir string) error {
	return m.engine.Restore(filepath.Join(dir, checkpointDir))
}

// Group is one raft group as the store and the leader's work see it.
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

// NewGroup follows a group of a runner. Close it.
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

// Close ends the following.
func (g *Group) Close() {
	g.stop()
	<-g.done
}

// Leader implements leader.Leadership.
func (g *Group) Leader() (member, term uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.now.Leader, g.now.Term
}

// Changed implements leader.Leadership.
func (g *Group) Changed() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

// Propose implements Proposer.
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

// ReadIndex implements Proposer.
func (g *Group) ReadIndex(ctx context.Context) error {
	return explain(ctx, g.runner.ReadIndex(ctx, g.id))
}

// explain says consensus's errors to callers.
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
