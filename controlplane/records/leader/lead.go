// Package lead is what only the leader of the system group does: commands, which any member accepts and one carries out,
// and tasks, which run while a member leads.
//
// A command is a function with a name. Handle gives back the same function for use on any member: it runs here when this
// member leads, and travels to the leader (one hop, with the verified caller, deadline and request id) when it does not.
// A task is a loop over records that would do the same if started again from nothing. It knows no records.
package leader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// ErrNotLeader is returned by a command, or by a call to another member, that found out before any effect that the
// member does not lead. The command is tried again elsewhere.
var ErrNotLeader = errors.New("this member does not lead")

// ErrNotSent is returned by a Caller whose request cannot have reached the other member.
var ErrNotSent = errors.New("the call was not sent")

// RemoteError is a failure of the leader's own: what happened is known there, and is for the log.
type RemoteError struct{ Text string }

func (e *RemoteError) Error() string { return "on the leader: " + e.Text }

// Leadership is what consensus knows of who leads.
type Leadership interface {
	// Leader is the leading member, 0 when none is known, and its term.
	Leader() (member, term uint64)
	// Changed is closed at the next change of Leader. Ask for it before asking Leader.
	Changed() <-chan struct{}
}

// Caller sends a command to another member. Its errors are ErrNotLeader, ErrNotSent, a *fault.Fault of the command, or
// anything else when nobody knows whether the command took effect.
type Caller interface {
	Call(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller) ([]byte, error)
	// Open is Call for a command that answers with a stream; each piece goes to send.
	Open(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, send func([]byte) error) error
}

// NoLeaderTime is how long a command waits for a leader to appear.
const NoLeaderTime = 5 * time.Second

// Commands is the table of commands of a member. Fill it before serving.
type Commands struct {
	self       uint64
	leadership Leadership
	peers      Caller
	gate       Gate
	table      map[string]func(ctx context.Context, body []byte) ([]byte, error)
	streams    map[string]func(ctx context.Context, body []byte, send func([]byte) error) error
}

// NewCommands makes an empty table for the member self. peers may be nil in a cluster of one.
func NewCommands(self uint64, leadership Leadership, peers Caller) *Commands {
	return &Commands{
		self: self, leadership: leadership, peers: peers, table: map[string]func(context.Context, []byte) ([]byte, error){},
		streams: map[string]func(context.Context, []byte, func([]byte) error) error{},
	}
}

// Gate decides whether a command may run for the caller in its context. It returns nil or a *fault.Fault, at once.
type Gate func(ctx context.Context) error

// SetGate makes the leader call g before it runs a command, also for calls that another member forwarded. Call SetGate
// before serving. The gate does not apply to commands that answer with a stream, which only read.
func (c *Commands) SetGate(g Gate) { c.gate = g }

// gated returns a function that calls the gate and then f.
func gated[Q, A any](c *Commands, f func(context.Context, Q) (A, error)) func(context.Context, Q) (A, error) {
	return func(ctx context.Context, q Q) (a A, err error) {
		if c.gate != nil {
			if err := c.gate(ctx); err != nil {
				return a, err
			}
		}
		return f(ctx, q)
	}
}

// Mode says what may be done about a command whose answer was lost.
type Mode uint8

const (
	// Once: the caller is told that the outcome is unknown.
	Once Mode = iota
	// Repeatable: doing it again does no harm, so it is sent again.
	Repeatable
	// Keyed: Once, but Repeatable for a caller who gave an idempotency key. The command keeps its answer under that
	// key (store.Idempotent), so that doing it again gives the first answer.
	Keyed
)

// repeatable says whether a call of this caller may be sent again.
func (m Mode) repeatable(caller *cloud.Caller) bool {
	return m == Repeatable || m == Keyed && caller != nil && caller.IdempotencyKey != ""
}

// Handle adds a command. The function that it returns runs it wherever the leader is.
func Handle[Q, A any](c *Commands, name string, mode Mode, f func(context.Context, Q) (A, error)) func(context.Context, Q) (A, error) {
	if _, ok := c.table[name]; ok {
		panic("command " + name + " is handled twice")
	}
	f = gated(c, f)
	c.table[name] = func(ctx context.Context, body []byte) ([]byte, error) {
		var q Q
		if err := cbor.Unmarshal(body, &q); err != nil {
			return nil, fmt.Errorf("decode %s: %w", name, err)
		}
		a, err := f(ctx, q)
		if err != nil {
			return nil, err
		}
		return cbor.Marshal(a)
	}
	return func(ctx context.Context, q Q) (a A, err error) {
		err = c.route(ctx, mode, func(ctx context.Context, leader uint64) error {
			if leader == c.self {
				a, err = f(ctx, q)
				return err
			}
			body, err := cbor.Marshal(q)
			if err != nil {
				return fmt.Errorf("encode %s: %w", name, err)
			}
			answer, err := c.peers.Call(ctx, leader, name, body, auth.CallerOf(ctx))
			if err != nil {
				return err
			}
			return cbor.Unmarshal(answer, &a)
		})
		return a, err
	}
}

// HandleStream adds a command that reads: it answers with pieces of bytes until it returns. It is sent again only while
// nothing of it has come.
func HandleStream[Q any](c *Commands, name string, f func(context.Context, Q, func([]byte) error) error) func(context.Context, Q, func([]byte) error) error {
	if _, ok := c.streams[name]; ok {
		panic("command " + name + " is handled twice")
	}
	c.streams[name] = func(ctx context.Context, body []byte, send func([]byte) error) error {
		var q Q
		if err := cbor.Unmarshal(body, &q); err != nil {
			return fmt.Errorf("decode %s: %w", name, err)
		}
		return f(ctx, q, send)
	}
	return func(ctx context.Context, q Q, send func([]byte) error) error {
		return c.route(ctx, Once, func(ctx context.Context, leader uint64) error {
			if leader == c.self {
				return f(ctx, q, send)
			}
			body, err := cbor.Marshal(q)
			if err != nil {
				return fmt.Errorf("encode %s: %w", name, err)
			}
			return c.peers.Open(ctx, leader, name, body, auth.CallerOf(ctx), send)
		})
	}
}

func (c *Commands) route(ctx context.Context, mode Mode, attempt func(ctx context.Context, leader uint64) error) error {
	return Route(ctx, c.leadership, c.self, mode.repeatable(auth.CallerOf(ctx)), attempt)
}

// Route runs an attempt on the leader, which may be this member itself, and again while nothing can have happened: there
// is no leader yet, the one that was known is gone or says that it does not lead. If the attempt is repeatable, it is
// made again too when another leader's answer was lost. Unavailable when there was no leader for NoLeaderTime, or
// when what a lost leader did is not known; else the error is the attempt's own, or the context's.
func Route(ctx context.Context, l Leadership, self uint64, repeatable bool, attempt func(ctx context.Context, leader uint64) error) error {
	patience := time.NewTimer(NoLeaderTime)
	defer patience.Stop()
	pause := 5 * time.Millisecond
	for {
		changed := l.Changed()
		if leader, _ := l.Leader(); leader != 0 {
			err := attemptOn(ctx, l, self, leader, attempt)
			var f *fault.Fault
			var remote *RemoteError
			switch {
			case err == nil || errors.As(err, &f) || errors.As(err, &remote):
				return err
			case ctx.Err() != nil:
				// What the transport made of it is of no use to the caller: who hung up, or whose time is over, is told so.
				return fmt.Errorf("%w: %v", ctx.Err(), err)
			case errors.Is(err, ErrNotLeader), errors.Is(err, ErrNotSent), repeatable && leader != self:
			case leader == self:
				return err
			default:
				return fault.New(fault.Unavailable, "the leader was lost before it answered; whether the call took effect is not known").
					Because(err).MayRetry()
			}
		}
		select {
		case <-changed:
			pause = 5 * time.Millisecond
		case <-time.After(pause):
			pause = min(2*pause, 100*time.Millisecond)
		case <-patience.C:
			return fault.New(fault.Unavailable, "no leader: fewer than a majority of the members can be reached").MayRetry()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// attemptOn makes an attempt on a leader. One that waits for another member is given up when that no longer leads: a
// member that is cut off would never answer.
func attemptOn(ctx context.Context, l Leadership, self, leader uint64, attempt func(ctx context.Context, leader uint64) error) error {
	if leader == self {
		return attempt(ctx, leader)
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			changed := l.Changed()
			if now, _ := l.Leader(); now != leader && now != 0 {
				cancel()
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	err := attempt(ctx, leader)
	cancel()
	<-done
	return err
}

// Serve runs a command that another member sent here. It never sends it on.
func (c *Commands) Serve(ctx context.Context, name string, body []byte, caller *cloud.Caller) ([]byte, error) {
	f, ok := c.table[name]
	if !ok {
		return nil, fault.New(fault.Unimplemented, "this member knows no command %s", name)
	}
	ctx, err := c.serving(ctx, caller)
	if err != nil {
		return nil, err
	}
	return f(ctx, body)
}

// ServeStream is Serve for a command that answers with a stream.
func (c *Commands) ServeStream(ctx context.Context, name string, body []byte, caller *cloud.Caller, send func([]byte) error) error {
	f, ok := c.streams[name]
	if !ok {
		return fault.New(fault.Unimplemented, "this member knows no command %s", name)
	}
	ctx, err := c.serving(ctx, caller)
	if err != nil {
		return err
	}
	return f(ctx, body, send)
}

func (c *Commands) serving(ctx context.Context, caller *cloud.Caller) (context.Context, error) {
	if leader, _ := c.leadership.Leader(); leader != c.self {
		return ctx, ErrNotLeader
	}
	if caller != nil {
		ctx = auth.With(ctx, caller, auth.RPC)
	}
	return ctx, nil
}

// Task is a loop of the leader.
type Task struct {
	Name string
	// Every is the pause between runs. A run that fails is logged and comes again.
	Every time.Duration
	Run   func(context.Context) error
}

// Tasks runs tasks while this member leads.
type Tasks struct {
	Self       uint64
	Leadership Leadership
	// Ready returns when the records are as new as the leadership; required.
	Ready func(context.Context) error
	Log   *slog.Logger
	List  []Task
}

// Run returns when ctx ends, after every task has.
func (t *Tasks) Run(ctx context.Context) {
	for ctx.Err() == nil {
		changed := t.Leadership.Changed()
		if leader, term := t.Leadership.Leader(); leader == t.Self {
			t.reign(ctx, term, changed)
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// reign runs every task until the leadership changes.
func (t *Tasks) reign(ctx context.Context, term uint64, changed <-chan struct{}) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		defer cancel()
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			changed = t.Leadership.Changed()
			if leader, now := t.Leadership.Leader(); leader != t.Self || now != term {
				return
			}
		}
	})
	if err := t.Ready(ctx); err != nil {
		t.Log.Warn("leader is not ready", "term", term, "err", err)
		cancel()
		return
	}
	t.Log.Info("leading", "term", term)
	for _, task := range t.List {
		wg.Go(func() { t.loop(ctx, task) })
	}
	<-ctx.Done()
	t.Log.Info("no longer leading", "term", term)
}

func (t *Tasks) loop(ctx context.Context, task Task) {
	tick := time.NewTicker(task.Every)
	defer tick.Stop()
	for {
		if err := task.Run(ctx); err != nil && ctx.Err() == nil {
			t.Log.Warn("task failed", "task", task.Name, "err", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
