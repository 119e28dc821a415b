package leader

import (
	"context"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Stream is a Command that sends its response in pieces. A stream must not change records, because the Gate does
// not check streams.
type Stream[S, Q any] struct {
	name string
	run  func(S, context.Context, Q, func([]byte) error) error
}

// NewStream returns a stream. When the stream is called, the leader runs it with the function run. The stream must be
// passed to Register before it is called.
func NewStream[S, Q any](name string, run func(s S, ctx context.Context, q Q, send func([]byte) error) error) *Stream[S, Q] {
	return &Stream[S, Q]{name, run}
}

// Call runs the stream on the leader, which may be any member, and calls send with each piece of the response. It sends
// the request again only if the request did not reach the leader.
func (st *Stream[S, Q]) Call(ctx context.Context, c *Commands, q Q, send func([]byte) error) error {
	run, ok := c.local[st.name].(func(context.Context, Q, func([]byte) error) error)
	if !ok {
		return notRegistered(st.name)
	}
	return c.route(ctx, Once, func(ctx context.Context, leader uint64) error {
		if leader == c.self {
			return run(ctx, q, send)
		}
		body, err := cbor.Marshal(q)
		if err != nil {
			return fmt.Errorf("encode %s: %w", st.name, err)
		}
		return c.peers.Open(ctx, leader, st.name, body, auth.CallerOf(ctx), send)
	})
}

func (st *Stream[S, Q]) register(c *Commands, s S) {
	run := func(ctx context.Context, q Q, send func([]byte) error) error { return st.run(s, ctx, q, send) }
	c.add(st.name, run)
	c.streamed[st.name] = func(ctx context.Context, body []byte, send func([]byte) error) error {
		var q Q
		if err := cbor.Unmarshal(body, &q); err != nil {
			return fmt.Errorf("decode %s: %w", st.name, err)
		}
		return run(ctx, q, send)
	}
}

// ServeStream runs a stream that another member forwarded to this one, and calls send with each encoded piece. It
// returns ErrNotLeader if this member does not lead.
func (c *Commands) ServeStream(ctx context.Context, name string, body []byte, caller *cloud.Caller, send func([]byte) error) error {
	f, ok := c.streamed[name]
	if !ok {
		return fault.New(fault.Unimplemented, "this member knows no command %s", name)
	}
	ctx, err := c.serving(ctx, caller)
	if err != nil {
		return err
	}
	return f(ctx, body, send)
}
