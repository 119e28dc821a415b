package kv

import (
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/session"
)

// errorHints maps errors of etcd's API to a hint about what the user can do.
var errorHints = map[error]string{
	rpctypes.ErrCompacted:                  "older revisions were compacted: give a newer --rev, or omit it to read the current revision",
	rpctypes.ErrFutureRev:                  "the revision does not exist yet: `trivet kv status` shows the current one",
	rpctypes.ErrNoSpace:                    "the store is full: delete keys, run `trivet kv compact`, then `trivet kv alarm disarm`",
	rpctypes.ErrCorrupt:                    "the data of the members differs: see `trivet kv alarm list` and the members' logs",
	rpctypes.ErrRequestTooLarge:            "a request is at most 1.5 MiB, a key at most 4 KiB",
	rpctypes.ErrTooManyOps:                 "a transaction has at most 128 operations",
	rpctypes.ErrDuplicateKey:               "a transaction can put a key only once",
	rpctypes.ErrLeaseNotFound:              "the lease expired or never existed: `trivet kv lease list` shows the existing ones",
	rpctypes.ErrLeaseExist:                 "choose another ID, or none",
	rpctypes.ErrLeaseTTLTooLarge:           "the TTL of a lease is at most 9000000000 seconds",
	rpctypes.ErrKeyNotFound:                "--ignore-value and --ignore-lease require an existing key",
	rpctypes.ErrEmptyKey:                   "a key has at least one byte; for all keys give \"\" with --prefix",
	rpctypes.ErrUserEmpty:                  "the store has its own users: give one with --user",
	rpctypes.ErrAuthFailed:                 "wrong user or password",
	rpctypes.ErrAuthNotEnabled:             "the store has no users of its own: omit --user",
	rpctypes.ErrInvalidAuthToken:           "the user's token has expired: try again",
	rpctypes.ErrNoLeader:                   "`trivet cluster status` shows which members are reachable",
	rpctypes.ErrLeaderChanged:              "try again",
	rpctypes.ErrTimeout:                    hintUncertain,
	rpctypes.ErrTimeoutDueToLeaderFail:     hintUncertain,
	rpctypes.ErrTimeoutDueToConnectionLost: hintUncertain,
	rpctypes.ErrTooManyRequests:            "the cluster is overloaded: try again in a moment",
}

const (
	hintUncertain = "a write may have been carried out or not: check before you repeat it"
	hintDenied    = "the store admits callers on a member's own host, tokens of system:admin, and its own users with what they were granted (--user); " +
		"a snapshot requires a token of system:admin or the user root, also on a member's own host: `trivet login`"
)

// withHint returns err with its code and, if errorHints has one, a hint, if err is an error of etcd's API.
func withHint(err error) error {
	var known rpctypes.EtcdError
	if !errors.As(err, &known) {
		return err
	}
	hint := errorHints[known]
	if hint == "" && known.Code() == codes.PermissionDenied {
		hint = hintDenied
	}
	return &session.Problem{Code: known.Code(), Message: err.Error(), Hint: hint, Err: err}
}
