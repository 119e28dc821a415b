package kv

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// clientErrors maps errors of the packages that the Service uses to etcd's client errors; the first match applies.
// clientError also converts context errors, consensus.NotLeaderError and fault.Fault. All other errors are internal,
// and the RPC layer logs them.
var clientErrors = []struct{ is, as error }{
	{consensus.ErrOverloaded, rpctypes.ErrGRPCRequestTooManyRequests},
	{consensus.ErrTooLarge, rpctypes.ErrGRPCRequestTooLarge},
	{consensus.ErrNoLeader, rpctypes.ErrGRPCNoLeader},
	{consensus.ErrStopped, rpctypes.ErrGRPCStopped},
	{consensus.ErrNoGroup, rpctypes.ErrGRPCStopped},
	{consensus.ErrUncertain, rpctypes.ErrGRPCTimeoutDueToLeaderFail},
	{leader.ErrNotLeader, rpctypes.ErrGRPCLeaderChanged},
	{leader.ErrNotSent, rpctypes.ErrGRPCTimeoutDueToConnectionLost},
	{mvcc.ErrCompacted, rpctypes.ErrGRPCCompacted},
	{mvcc.ErrFutureRevision, rpctypes.ErrGRPCFutureRev},
	{command.ErrEmptyKey, rpctypes.ErrGRPCEmptyKey},
	{command.ErrTooLarge, rpctypes.ErrGRPCRequestTooLarge},
	{command.ErrTooMany, rpctypes.ErrGRPCTooManyOps},
	{command.ErrDuplicateKey, rpctypes.ErrGRPCDuplicateKey},
	{command.ErrInvalid, status.Error(codes.InvalidArgument, "etcdserver: invalid request")},
	{mvcc.ErrRestored, rpctypes.ErrGRPCLeaderChanged},
	{mvcc.ErrClosed, rpctypes.ErrGRPCStopped},
}

// clientError converts err to the gRPC error that the client receives. Errors that already are a gRPC status, and
// internal errors, are returned unchanged.
func clientError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		return status.FromContextError(ctx.Err()).Err()
	}
	var notLeader *consensus.NotLeaderError
	if errors.As(err, &notLeader) {
		if notLeader.Leader == 0 {
			return rpctypes.ErrGRPCNoLeader
		}
		return rpctypes.ErrGRPCLeaderChanged
	}
	for _, t := range clientErrors {
		if errors.Is(err, t.is) {
			return t.as
		}
	}
	if f, ok := fault.From(err); ok {
		return status.Error(f.Kind.RPC(), "etcdserver: "+f.Message)
	}
	return err
}

// refusalErrors maps the engine's reasons for refusing a command to client errors. A refused command changes nothing.
// RefusedEpoch has no entry, because the caller then proposes the command again.
var refusalErrors = map[command.Refusal]error{
	command.RefusedCompacted:     rpctypes.ErrGRPCCompacted,
	command.RefusedFuture:        rpctypes.ErrGRPCFutureRev,
	command.RefusedTooMany:       status.Error(codes.InvalidArgument, "etcdserver: too many keys in delete request"),
	command.RefusedLeaseNotFound: rpctypes.ErrGRPCLeaseNotFound,
	command.RefusedLeaseExists:   rpctypes.ErrGRPCLeaseExist,
	command.RefusedKeyNotFound:   rpctypes.ErrGRPCKeyNotFound,
}

// refusalError returns the client error if the engine refused the command whose result is r. It returns nil if the
// engine executed the command.
func refusalError(r *command.Result) error {
	if r.Refused == command.RefusedNot {
		return nil
	}
	if err := refusalErrors[r.Refused]; err != nil {
		return err
	}
	return r.Err()
}
