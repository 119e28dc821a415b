package etcdrpc

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
)

// Admits authorizes a call by its headers and connection, before its message is read. Unary and Stream apply the same
// rules.
func (s *Server) Admits(ctx context.Context, method string) error {
	_, _, err := s.admit(ctx, method)
	return err
}

// Intake returns the admit function of rpc.NewIntake for a port that serves only etcd's services. limit is the largest
// message in bytes.
func (s *Server) Intake(limit int) func(ctx context.Context, method string) (context.Context, rpc.Admission, error) {
	return func(ctx context.Context, method string) (context.Context, rpc.Admission, error) {
		return ctx, rpc.Admission{Foreign: true, Limit: limit}, s.Admits(ctx, method)
	}
}
