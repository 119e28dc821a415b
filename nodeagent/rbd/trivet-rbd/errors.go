//go:build ceph

package main

import (
	"errors"
	"regexp"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// byErrno maps an errno of librbd or librados to its gRPC code. The code for all other errnos is Internal.
var byErrno = map[unix.Errno]codes.Code{
	unix.ENOENT:    codes.NotFound,
	unix.EEXIST:    codes.AlreadyExists,
	unix.EPERM:     codes.PermissionDenied,
	unix.EACCES:    codes.PermissionDenied,
	unix.EINVAL:    codes.InvalidArgument,
	unix.EDOM:      codes.InvalidArgument,
	unix.EBUSY:     codes.FailedPrecondition, // has clones, or a client has it open
	unix.ENOTEMPTY: codes.FailedPrecondition, // has snapshots
	unix.EROFS:     codes.FailedPrecondition, // another client has the exclusive lock
	unix.ENOSPC:    codes.ResourceExhausted,
	unix.EDQUOT:    codes.ResourceExhausted,
	unix.ETIMEDOUT: codes.Unavailable,
	unix.ENOTCONN:  codes.Unavailable,
	unix.ESHUTDOWN: codes.Unavailable, // the cluster blocks this helper
}

// wrap returns the gRPC status for an error of librbd or librados. An error of this program has a gRPC status already
// and keeps it. The text of the result begins with act, the action that failed.
func wrap(act string, err error) error {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok {
		return s.Err()
	}
	code := codes.Internal
	var coded interface{ ErrorCode() int }
	if errors.As(err, &coded) {
		if c, known := byErrno[errno(coded.ErrorCode())]; known {
			code = c
		}
	}
	return status.Errorf(code, "%s: %v", act, err)
}

// errno returns the errno of a return code, which Ceph negates.
func errno(code int) unix.Errno {
	if code < 0 {
		code = -code
	}
	return unix.Errno(code)
}

// isErrno reports whether err is an error of librbd or librados with one of the errnos.
func isErrno(err error, errnos ...unix.Errno) bool {
	var coded interface{ ErrorCode() int }
	if !errors.As(err, &coded) {
		return false
	}
	for _, e := range errnos {
		if errno(coded.ErrorCode()) == e {
			return true
		}
	}
	return false
}

var validName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}$`)

// checkNames returns an InvalidArgument error unless all names can be names of pools, images and snapshots.
func checkNames(names ...string) error {
	for _, name := range names {
		if !validName.MatchString(name) {
			return status.Errorf(codes.InvalidArgument,
				"name %.100q: must be 1 to 96 characters of A-Z a-z 0-9 . _ - and not begin with .", name)
		}
	}
	return nil
}
