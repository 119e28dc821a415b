package leader

import (
	"context"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Pipe is the caller's end of an Exchange. One goroutine may call Recv while another one calls Send.
type Pipe struct {
	// Recv returns the next piece of data from the caller. It returns io.EOF after the last piece, and the error of its
	// context when the context ends.
	Recv func(context.Context) ([]byte, error)
	// Send sends a piece of data to the caller. It blocks while the caller does not read.
	Send func([]byte) error
}

// Exchange is a bidirectional streaming command that runs on the leader. Like a Stream, it must only read records,
// because the Gate does not check it.
type Exchange[S, Q any] struct {
	name string
	run  func(S, context.Context, Q, Pipe) error
}

// NewExchange returns an exchange. When the exchange is called, the leader runs it with the function run. The exchange
// must be passed to Register before it is called.
func NewExchange[S, Q any](name string, run func(s S, ctx context.Context, q Q, pipe Pipe) error) *Exchange[S, Q] {
	return &Exchange[S, Q]{name, run}
}

// Call runs the exchange on the leader, which may be any member. It begins the exchange again only if the request did
// not reach the leader. What pipe.Recv has returned before that is lost, so a caller that needs all of its data waits in
// pipe.Recv for the first piece from the leader.
func (e *Exchange[S, Q]) Call(ctx context.Context, c *Commands, q Q, pipe Pipe) error {
	run, ok := c.local[e.name].(func(context.Context, Q, Pipe) error)
	if !ok {
		return notRegistered(e.name)
	}
	return c.route(ctx, Once, func(ctx context.Context, leader uint64) error {
		if leader == c.self {
			return run(ctx, q, pipe)
		}
		body, err := cbor.Marshal(q)
		if err != nil {
			return fmt.Errorf("encode %s: %w", e.name, err)
		}
		return c.peers.Exchange(ctx, leader, e.name, body, auth.CallerOf(ctx), pipe)
	})
}

func (e *Exchange[S, Q]) register(c *Commands, s S) {
	run := func(ctx context.Context, q Q, pipe Pipe) error { return e.run(s, ctx, q, pipe) }
	c.add(e.name, run)
	c.exchanged[e.name] = func(ctx context.Context, body []byte, pipe Pipe) error {
		var q Q
		if err := cbor.Unmarshal(body, &q); err != nil {
			return fmt.Errorf("decode %s: %w", e.name, err)
		}
		return run(ctx, q, pipe)
	}
}

// ServeExchange runs an exchange that another member forwarded to this one. It returns ErrNotLeader if this member does
// not lead.
func (c *Commands) ServeExchange(ctx context.Context, name string, body []byte, caller *cloud.Caller, pipe Pipe) error {
	f, ok := c.exchanged[name]
	if !ok {
		return fault.New(fault.Unimplemented, "this member knows no command %s", name)
	}
	ctx, err := c.serving(ctx, caller)
	if err != nil {
		return err
	}
	return f(ctx, body, pipe)
}
