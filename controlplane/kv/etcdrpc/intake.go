package etcdrpc

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
)

// Admit authorizes a call by its headers and connection, before its message is read. The returned context contains the
// result, which Unary and Stream reuse. If they get another context, they authorize the call by the same rules. The
// result trusted reports whether the caller is on loopback or presented a credential.
func (s *Server) Admit(ctx context.Context, method string) (_ context.Context, trusted bool, err error) {
	ctx, a := s.admit(ctx, method)
	return ctx, a.trusted, a.err
}

// Intake returns a function that authorizes calls, to be passed to rpc.NewIntake. It is for a port that serves only
// etcd's services. The parameter limit is the maximum size of a request message in bytes.
func (s *Server) Intake(limit int) func(ctx context.Context, method string) (context.Context, rpc.Admission, error) {
	return func(ctx context.Context, method string) (context.Context, rpc.Admission, error) {
		ctx, trusted, err := s.Admit(ctx, method)
		return ctx, rpc.Admission{Foreign: true, Proven: trusted, Limit: limit}, err
	}
}
