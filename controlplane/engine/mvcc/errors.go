package mvcc

import (
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// Types that reads take and return, under names of this package, so that callers need not import package command.
type (
	KV             = command.KV
	RangeOptions   = command.RangeOptions
	RangeResult    = command.RangeResult
	CompactedError = command.CompactedError
)

// Errors that reads return, mostly wrapped.
var (
	ErrCompacted      = command.ErrCompacted
	ErrFutureRevision = command.ErrFutureRevision
	ErrRestored       = watch.ErrRestored
	ErrClosed         = watch.ErrClosed
)
