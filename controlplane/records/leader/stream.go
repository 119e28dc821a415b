package leader

import (
	"context"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

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
