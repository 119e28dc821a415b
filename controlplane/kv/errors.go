package kv

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// told is what clients are told of errors below, the first that matches. What a client can be told is one of etcd's
// errors; everything else is ours, and goes to the log at the edge.
var told = []struct{ is, as error }{
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
	{mvcc.ErrEmptyKey, rpctypes.ErrGRPCEmptyKey},
	{mvcc.ErrTooLarge, rpctypes.ErrGRPCRequestTooLarge},
	{mvcc.ErrTooMany, rpctypes.ErrGRPCTooManyOps},
	{mvcc.ErrDuplicateKey, rpctypes.ErrGRPCDuplicateKey},
	{mvcc.ErrInvalid, status.Error(codes.InvalidArgument, "etcdserver: invalid request")},
	{mvcc.ErrRestored, rpctypes.ErrGRPCLeaderChanged},
	{mvcc.ErrClosed, rpctypes.ErrGRPCStopped},
}

// failure is what the client is told of an error. One that is a status already stays as it is, one that nobody can be told
// too.
func failure(ctx context.Context, err error) error {
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
	for _, t := range told {
		if errors.Is(err, t.is) {
			return t.as
		}
	}
	if f, ok := fault.From(err); ok {
		return status.Error(f.Kind.RPC(), "etcdserver: "+f.Message)
	}
	return err
}

// refusals is what clients are told of commands that changed nothing. RefusedEpoch never gets here.
var refusals = map[mvcc.Refusal]error{
	mvcc.RefusedCompacted:     rpctypes.ErrGRPCCompacted,
	mvcc.RefusedFuture:        rpctypes.ErrGRPCFutureRev,
	mvcc.RefusedTooMany:       status.Error(codes.InvalidArgument, "etcdserver: too many keys in delete request"),
	mvcc.RefusedLeaseNotFound: rpctypes.ErrGRPCLeaseNotFound,
	mvcc.RefusedLeaseExists:   rpctypes.ErrGRPCLeaseExist,
	mvcc.RefusedKeyNotFound:   rpctypes.ErrGRPCKeyNotFound,
}

// refusal is what the client is told of a result.
func refusal(r *mvcc.Result) error {
	if r.Refused == mvcc.RefusedNot {
		return nil
	}
	if err := refusals[r.Refused]; err != nil {
		return err
	}
	return r.Err()
}
