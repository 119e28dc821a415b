package rpc

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// recheck is how often the token of a stream is judged again: a stream can outlive its token by that, and by as much as a
// unary call could.
const recheck = time.Second

// whileValid runs a stream for as long as the token that opened it is good.
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
		again := time.NewTicker(recheck)
		defer again.Stop()
		for {
			select {
			case <-again.C:
			case <-ctx.Done():
				return
			}
			// What cannot be judged just now goes on: a member that is cut off has nothing new to tell.
			if _, err := e.opts.Verifier.Verify(ctx, token); fault.Is(err, fault.Unauthenticated) {
				end(err)
				return
			}
		}
	})
	err = run(ctx)
	if cause := context.Cause(ctx); err != nil && fault.Is(cause, fault.Unauthenticated) {
		return cause
	}
	return err
}
