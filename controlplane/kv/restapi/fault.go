package restapi

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// restKinds maps etcd's errors to kinds of fault.Fault. All other errors of etcd map to fault.Internal.
var restKinds = map[error]fault.Kind{
	rpctypes.ErrEmptyKey:         fault.InvalidArgument,
	rpctypes.ErrRequestTooLarge:  fault.TooLarge,
	rpctypes.ErrNoLeader:         fault.Unavailable,
	rpctypes.ErrNotLeader:        fault.Unavailable,
	rpctypes.ErrLeaderChanged:    fault.Unavailable,
	rpctypes.ErrPermissionDenied: fault.PermissionDenied,
	rpctypes.ErrUserNotFound:     fault.PermissionDenied,
	rpctypes.ErrUserEmpty:        fault.PermissionDenied,
	rpctypes.ErrInvalidAuthToken: fault.PermissionDenied,
	rpctypes.ErrAuthOldRevision:  fault.PermissionDenied,
}

// faultOf converts an error to the fault.Fault that the client receives (docs/api.md, "Errors"). etcd's errors keep
// their text. A request that exceeds its deadline is an internal error, except for changes of the members
// (Server.change).
func faultOf(err error) error {
	if _, isFault := fault.From(err); isFault {
		return err
	}
	var notLeaderErr *consensus.NotLeaderError
	var known rpctypes.EtcdError
	var withStatus interface {
		error
		GRPCStatus() *status.Status
	}
	switch {
	case errors.As(err, &notLeaderErr):
		return notLeader("the leader changed: send the request again")
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), isContextStatus(err):
		return fault.New(fault.Internal, "the deadline passed: a write may or may not have been carried out").MayRetry().Because(err)
	case errors.As(err, &known), errors.As(err, &withStatus) && errors.As(rpctypes.Error(withStatus), &known):
		kind := restKinds[known] // Internal for all others
		f := fault.New(kind, "%s", known.Error()).Because(err)
		f.Retry = kind == fault.Unavailable || known.Code() == codes.Unavailable
		if kind == fault.PermissionDenied {
			f.Message += ": REST acts as the user " + User
		}
		return f
	}
	return err
}

// isContextStatus reports whether err is a gRPC status for an ended context.
func isContextStatus(err error) bool {
	code := status.Code(err)
	return code == codes.DeadlineExceeded || code == codes.Canceled
}
