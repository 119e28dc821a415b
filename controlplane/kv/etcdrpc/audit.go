package etcdrpc

import (
	"context"
	"fmt"
	"strings"

	"github.com/google/uuid"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// withCaller returns a context that contains the caller of a governing method. The audit records this caller.
func withCaller(ctx context.Context, c *cloud.Caller) context.Context {
	return auth.With(ctx, c, auth.RPC)
}

// runAudited runs a call of a governing method and records the outcome in the audit. If the error refused is not nil,
// the call is not run, and refused is the outcome. A successful change of the cluster's members is not recorded here,
// because the transaction that makes the change records it (audit.Stamp).
func (s *Server) runAudited(ctx context.Context, method string, req any, refused error, run func(context.Context) error) error {
	c := auth.CallerOf(ctx)
	if c == nil {
		c = &cloud.Caller{}
		ctx = withCaller(ctx, c)
	}
	c.Method, c.Target, c.Address, c.RequestID = method, auditTarget(req), rpc.Address(ctx), uuid.NewString()
	err := refused
	if err == nil {
		err = run(ctx)
	}
	switch {
	case s.opts.Audit == nil:
	case err != nil:
		outcome, message := codes.Internal, "internal error"
		if st, ok := status.FromError(err); ok {
			outcome, message = st.Code(), st.Message()
		} else if ctx.Err() != nil {
			outcome, message = codes.Canceled, "the caller disconnected, or the deadline passed"
		}
		s.opts.Audit.Failed(c, code.Code(outcome).String(), message)
	case !strings.HasPrefix(method, Prefix+"Cluster/"):
		s.opts.Audit.Done(c)
	}
	return err
}

// auditTarget returns the text that describes a governing request in the audit. It contains IDs, addresses, and names
// of users and roles.
func auditTarget(req any) string {
	switch r := req.(type) {
	case *pb.MemberAddRequest:
		return fmt.Sprintf("peer_urls=%s learner=%t", strings.Join(r.PeerURLs, ","), r.IsLearner)
	case *pb.MemberUpdateRequest:
		return fmt.Sprintf("id=%d peer_urls=%s", r.ID, strings.Join(r.PeerURLs, ","))
	case *pb.MoveLeaderRequest:
		return fmt.Sprintf("id=%d", r.TargetID)
	case interface{ GetID() uint64 }:
		return fmt.Sprintf("id=%d", r.GetID())
	}
	var parts []string
	if r, ok := req.(interface{ GetName() string }); ok && r.GetName() != "" {
		parts = append(parts, "name="+r.GetName())
	}
	if r, ok := req.(interface{ GetUser() string }); ok {
		parts = append(parts, "user="+r.GetUser())
	}
	if r, ok := req.(interface{ GetRole() string }); ok {
		parts = append(parts, "role="+r.GetRole())
	}
	return strings.Join(parts, " ")
}
