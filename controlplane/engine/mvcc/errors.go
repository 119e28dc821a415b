package mvcc

import (
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// What reads take and return, under the name of the package that callers read with.
type (
	KV             = command.KV
	RangeOptions   = command.RangeOptions
	RangeResult    = command.RangeResult
	CompactedError = command.CompactedError
)

// The errors of reads. Most are returned wrapped.
var (
	ErrCompacted      = command.ErrCompacted
	ErrFutureRevision = command.ErrFutureRevision
	ErrRestored       = watch.ErrRestored
	ErrClosed         = watch.ErrClosed
)
