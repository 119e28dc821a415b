package rpc

import (
	"context"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// maxUnverified is how long a stream continues while this member cannot verify its token, for example because there is
// no leader.
const maxUnverified = 10 * time.Second

// whileValid calls end with a fault when the token of the stream of ctx becomes invalid, when its holder is no longer
// authorized for the call, or when the token could not be verified for maxUnverified. Call stop when the stream has
// ended.
func (e *edge) whileValid(ctx context.Context, end context.CancelCauseFunc) (stop func(), err error) {
	md, _ := metadata.FromIncomingContext(ctx)
	token, err := auth.Bearer(md.Get("authorization")[0])
	if err != nil {
		return nil, err
	}
	return whileValid(ctx, e.checks, token, end), nil
}

// whileValid is like the method of the same name, for a stream with the given token.
func whileValid(ctx context.Context, checks *auth.Rechecker, token string, end context.CancelCauseFunc) (stop func()) {
	verified := time.Now()
	return checks.Subscribe(token, func(c *auth.Check) {
		if c.Err == nil {
			verified = time.Now()
		}
		err := c.Readmit(ctx)
		if mutant.On(mutant.KeepInvalidStreams) {
			return
		}
		if fault.Is(err, fault.Unauthenticated) || fault.Is(err, fault.PermissionDenied) || err != nil && time.Since(verified) > maxUnverified {
			end(err)
		}
	})
}
