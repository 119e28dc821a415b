package rpc

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// recheck is how often the token of a stream is judged again: a stream can outlive its token by that, and by as much as a
// unary call could.
const recheck = time.Second

// unjudged is how long a stream goes on whose token cannot be judged: a member that is cut off, or waits for a leader.
const unjudged = 10 * time.Second

// whileValid runs a stream for as long as the token that opened it is good, and its holder may still do what was let in.
func (e *edge) whileValid(ctx context.Context, run func(context.Context) error) error {
	md, _ := metadata.FromIncomingContext(ctx)
	token, err := auth.Bearer(md.Get("authorization")[0])
	if err != nil {
		return err
	}
	ctx, end := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	defer watch.Wait()
	defer end(nil)
	watch.Go(func() {
		judged := time.Now()
		again := time.NewTicker(recheck)
		defer again.Stop()
		for {
			select {
			case <-again.C:
			case <-ctx.Done():
				return
			}
			caller, err := e.opts.Verifier.Verify(ctx, token)
			if err == nil {
				judged = time.Now()
				err = auth.Again(ctx, caller)
			}
			if fault.Is(err, fault.Unauthenticated) || fault.Is(err, fault.PermissionDenied) || err != nil && time.Since(judged) > unjudged {
				end(err)
				return
			}
		}
	})
	err = run(ctx)
	var why *fault.Fault
	if cause := context.Cause(ctx); err != nil && errors.As(cause, &why) {
		return cause
	}
	return err
}
