package store

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/consensus"
	"github.com/trivet-cloud/trivet/controlplane/lead"
	"github.com/trivet-cloud/trivet/controlplane/mvcc"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Machine makes an engine the state machine of a raft group. Close it after the group's host.
type Machine struct {
	engine *mvcc.Engine
	// inline flushes when asked instead of in the background, for a simulation.
	inline bool

	cancel  context.CancelFunc
	ask     chan struct{}
	done    chan struct{}
	mu      sync.Mutex
	flushed uint64
	failure error
}

var _ consensus.StateMachine = (*Machine)(nil)

// NewMachine wraps an engine. Inline is for simulations.
func NewMachine(engine *mvcc.Engine, inline bool) *Machine {
	ctx, cancel := context.WithCancel(context.Background())
	m := &Machine{engine: engine, inline: inline, cancel: cancel, ask: make(chan struct{}, 1), done: make(chan struct{})}
	if inline {
		close(m.done)
		return m
	}
	go m.flush(ctx)
	return m
}

// flush makes the state durable whenever it was asked to, so that the log can be cut.
func (m *Machine) flush(ctx context.Context) {
	defer close(m.done)
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.ask:
		}
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

// Apply implements consensus.StateMachine.
func (m *Machine) Apply(entries []consensus.Entry) ([][]byte, error) {
	commands := make([]mvcc.Command, len(entries))
	for i, e := range entries {
		commands[i] = mvcc.Command{Index: e.Index, Term: e.Term, ID: e.ID, Data: e.Data}
	}
	results, err := m.engine.Apply(commands)
	if err != nil {
		return nil, err
	}
	out := make([][]byte, len(results))
	for i, r := range results {
		out[i] = mvcc.EncodeResult(nil, r)
	}
	return out, nil
}

// Applied implements consensus.StateMachine.
func (m *Machine) Applied() (index, term uint64) {
	p := m.engine.Applied()
	return p.Index, p.Term
}

// Flush implements consensus.StateMachine: it asks for a flush and says what is durable already.
func (m *Machine) Flush() (uint64, error) {
	if m.inline {
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
	_ Proposer        = (*Group)(nil)
	_ lead.Leadership = (*Group)(nil)
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

// Leader implements lead.Leadership.
func (g *Group) Leader() (member, term uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.now.Leader, g.now.Term
}

// Changed implements lead.Leadership.
func (g *Group) Changed() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

// Propose implements Proposer.
func (g *Group) Propose(ctx context.Context, id [16]byte, data []byte) ([]byte, error) {
	answer, err := g.runner.Propose(ctx, g.id, id, data)
	return answer, explain(ctx, err)
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
		return lead.ErrNotLeader
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
