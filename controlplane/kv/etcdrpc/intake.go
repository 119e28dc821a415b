package etcdrpc

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
)

// Admit authorizes a call by its headers and connection, before its message is read. Unary and Stream reuse the result
// if they get the returned context, and otherwise apply the same rules. trusted reports whether the caller is on
// loopback or presented a credential.
func (s *Server) Admit(ctx context.Context, method string) (_ context.Context, trusted bool, err error) {
	ctx, a := s.admit(ctx, method)
	return ctx, a.trusted, a.err
}

// Intake returns the function admit for rpc.NewIntake, for a port that serves only etcd's services. limit is the
// maximum size of a message in bytes.
func (s *Server) Intake(limit int) func(ctx context.Context, method string) (context.Context, rpc.Admission, error) {
	return func(ctx context.Context, method string) (context.Context, rpc.Admission, error) {
		ctx, trusted, err := s.Admit(ctx, method)
		return ctx, rpc.Admission{Foreign: true, Proven: trusted, Limit: limit}, err
	}
}
