package kv

import (
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
)

// errorHints say what to do about etcd's errors, whose own sentences are for programmers.
var errorHints = map[error]string{
	rpctypes.ErrCompacted:                  "history before that is gone: ask for a newer revision, or for the present one without --rev",
	rpctypes.ErrFutureRev:                  "that revision is yet to come: `trivet kv status` shows the present one",
	rpctypes.ErrNoSpace:                    "the store is full: delete keys, `trivet kv compact`, then `trivet kv alarm disarm`",
	rpctypes.ErrCorrupt:                    "the members disagree about the data: see `trivet kv alarm list` and the members' logs",
	rpctypes.ErrRequestTooLarge:            "a request holds 1.5 MiB, and a key 4 KiB, at most",
	rpctypes.ErrTooManyOps:                 "a transaction has 128 operations at most",
	rpctypes.ErrDuplicateKey:               "a transaction may put a key once",
	rpctypes.ErrLeaseNotFound:              "it has ended, or never was: `trivet kv lease list` shows those there are",
	rpctypes.ErrLeaseExist:                 "choose another --id, or none",
	rpctypes.ErrLeaseTTLTooLarge:           "a lease lasts 9000000000 seconds at most",
	rpctypes.ErrKeyNotFound:                "--ignore-value and --ignore-lease keep what is there, and there is nothing",
	rpctypes.ErrEmptyKey:                   "a key has at least one byte; for all keys say \"\" with --prefix",
	rpctypes.ErrUserEmpty:                  "the store has users of its own: say which you are with --user",
	rpctypes.ErrAuthFailed:                 "the user or the password is not right",
	rpctypes.ErrAuthNotEnabled:             "the store has no users of its own: leave --user out",
	rpctypes.ErrInvalidAuthToken:           "the user's token has ended: say it again",
	rpctypes.ErrNoLeader:                   "`trivet cluster status` tells what the members see of each other",
	rpctypes.ErrLeaderChanged:              "say it again",
	rpctypes.ErrTimeout:                    hintUncertain,
	rpctypes.ErrTimeoutDueToLeaderFail:     hintUncertain,
	rpctypes.ErrTimeoutDueToConnectionLost: hintUncertain,
	rpctypes.ErrTooManyRequests:            "the cluster has too much to do: say it again in a moment",
}

const (
	hintUncertain = "a write may have been carried out or not: look before you say it again"
	hintDenied    = "the store admits callers on a member's own host, tokens of system:admin, and its own users with what they were granted (--user); " +
		"a snapshot requires a token of system:admin or the user root, also on a member's own host: `trivet login`"
)

// withHint adds to an error of etcd's what to do about it.
func withHint(err error) error {
	var known rpctypes.EtcdError
	if !errors.As(err, &known) {
		return err
	}
	hint := errorHints[known]
	if hint == "" && known.Code() == codes.PermissionDenied {
		hint = hintDenied
	}
	if hint == "" {
		return err
	}
	return fmt.Errorf("%w\n%s", err, hint)
}
