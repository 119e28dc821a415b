package rpc

import (
	"context"

	"google.golang.org/grpc/metadata"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
)

// whileValid calls end when the stream of ctx must end, as auth.Rechecker.WhileValid does. Call stop when the stream has
// ended.
func (e *edge) whileValid(ctx context.Context, end context.CancelCauseFunc) (stop func(), err error) {
	md, _ := metadata.FromIncomingContext(ctx)
	token, err := auth.Bearer(md.Get("authorization")[0])
	if err != nil {
		return nil, err
	}
	return e.checks.WhileValid(ctx, token, end), nil
}
