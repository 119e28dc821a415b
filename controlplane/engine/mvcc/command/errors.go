package command

import (
	"errors"
	"fmt"
)

// CompactedError means that a revision can no longer be read. errors.Is(err, ErrCompacted) is true for it.
type CompactedError struct {
	Revision        int64 // requested revision
	CompactRevision int64 // oldest revision that can be read
}

func (e *CompactedError) Error() string {
	return fmt.Sprintf("revision %d has been compacted, the oldest is %d", e.Revision, e.CompactRevision)
}

// Is makes a CompactedError match ErrCompacted.
func (e *CompactedError) Is(target error) bool { return target == ErrCompacted }

// Errors of commands and reads. Most are returned wrapped.
var (
	ErrCompacted      = errors.New("revision has been compacted")
	ErrFutureRevision = errors.New("revision is in the future")

	ErrEpoch         = errors.New("records have changed")
	ErrLeaseNotFound = errors.New("lease not found")
	ErrLeaseExists   = errors.New("lease exists already")
	ErrKeyNotFound   = errors.New("key not found")

	ErrEmptyKey     = errors.New("key is empty")
	ErrTooLarge     = errors.New("too large")
	ErrTooMany      = errors.New("too many")
	ErrDuplicateKey = errors.New("key is changed twice in one transaction")
	ErrInvalid      = errors.New("invalid")

	ErrMalformed     = errors.New("encoding is malformed")
	ErrUnknownFormat = errors.New("format is unknown, a newer version wrote it")
)
