package leader

import (
	"context"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

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

func (c *Commands) serving(ctx context.Context, caller *cloud.Caller) (context.Context, error) {
	if leader, _ := c.leadership.Leader(); leader != c.self {
		return ctx, ErrNotLeader
	}
	if caller != nil {
		ctx = auth.With(ctx, caller, auth.RPC)
	}
	return ctx, nil
}

func (c *Commands) route(ctx context.Context, mode Mode, attempt func(ctx context.Context, leader uint64) error) error {
	return Route(ctx, c.leadership, c.self, mode.repeatable(auth.CallerOf(ctx)), attempt)
}
