package mvcc

import "github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

// What reads take and return, under the name of the package that callers read with.
type (
	KV             = command.KV
	RangeOptions   = command.RangeOptions
	RangeResult    = command.RangeResult
	CompactedError = command.CompactedError
)

// The errors of reads; see package command.
var (
	ErrCompacted      = command.ErrCompacted
	ErrFutureRevision = command.ErrFutureRevision
)
