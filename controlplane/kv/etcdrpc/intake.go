package etcdrpc

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/rpc"
)

// Admits refuses a call by its headers and connection, for what reads its message only afterwards. Unary and Stream refuse
// it for the same reasons.
func (s *Server) Admits(ctx context.Context, method string) error {
	_, _, err := s.admit(ctx, method)
	return err
}

// Intake is what an rpc.Intake of a port with these services alone needs: limit is that of a message in bytes.
func (s *Server) Intake(limit int) func(ctx context.Context, method string) (context.Context, rpc.Admission, error) {
	return func(ctx context.Context, method string) (context.Context, rpc.Admission, error) {
		return ctx, rpc.Admission{Foreign: true, Limit: limit}, s.Admits(ctx, method)
	}
}
