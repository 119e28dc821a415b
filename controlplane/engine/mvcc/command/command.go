package command

import (
	"encoding/binary"
	"fmt"
)

// Position is the index and term of a raft log entry.
type Position struct{ Index, Term uint64 }

// Command is one committed command of the raft log. Commands that share a log entry have the same Index and must be
// passed to one call of Apply, so that all of them are applied or none. A program for which ReadsRevision is true must
// not share its entry.
type Command struct {
	Index, Term uint64
	ID          [16]byte // proposal ID: not applied again while mvcc remembers it; zero: always applied
	Data        []byte   // made by EncodeTxn, EncodeProgram or EncodeCompact; empty: only the applied index advances
	WantSteps   bool     // fill Result.Steps, since a local caller waits for them
}

// EncodeCompact returns the Data of a command that compacts at revision: older revisions can no longer be read.
func EncodeCompact(revision int64) []byte {
	return binary.AppendUvarint([]byte{commandFormat, byte(KindCompact)}, uint64(max(revision, 0)))
}

// Refusal is the reason why a well-formed command changed nothing.
type Refusal uint8

// The numbers of the refusals are stored in the database and must never change.
const (
	RefusedNot       Refusal = 0
	RefusedCompacted Refusal = 1 // compaction at or below, or read below, the compact revision
	RefusedFuture    Refusal = 2 // compaction, or read, above the current revision
	RefusedTooMany   Refusal = 3 // more than MaxTxnChanges changes
	RefusedEpoch     Refusal = 4 // Program.Epoch is not the current one, or a lease's keys have changed (Step.Value)

	RefusedLeaseNotFound Refusal = 5
	RefusedLeaseExists   Refusal = 6
	RefusedKeyNotFound   Refusal = 7 // a put with IgnoreValue or IgnoreLease of a missing key

	// Encoded results have three bits for the refusal: an eighth refusal needs a new resultFormat.
)

// Result is the outcome of one command.
type Result struct {
	Revision    int64   // current revision after the command
	Time        int64   // highest time stamp after the command, Unix milliseconds
	Conflict    bool    // a guard failed: nothing was written
	FailedGuard int     // index in Txn.Guards of the first guard that failed
	Refused     Refusal // any other reason why nothing was written

	// Steps holds the results of a program's steps. Only Apply fills it, and only for a command with WantSteps that was
	// not refused. It is not encoded.
	Steps []StepResult
}

// Err returns nil or the error of the refusal: ErrCompacted, ErrFutureRevision, ErrTooMany, ErrEpoch, ErrLeaseNotFound,
// ErrLeaseExists or ErrKeyNotFound. It returns nil for a conflict.
func (r Result) Err() error {
	switch r.Refused {
	case RefusedCompacted:
		return ErrCompacted
	case RefusedFuture:
		return ErrFutureRevision
	case RefusedTooMany:
		return fmt.Errorf("delete of more than %d keys: %w", MaxTxnChanges, ErrTooMany)
	case RefusedEpoch:
		return ErrEpoch
	case RefusedLeaseNotFound:
		return ErrLeaseNotFound
	case RefusedLeaseExists:
		return ErrLeaseExists
	case RefusedKeyNotFound:
		return ErrKeyNotFound
	}
	return nil
}

// resultFormat is the format number in the upper four bits of the first byte of an encoded result. The refusal is in
// the next three bits, and the conflict in the last one.
const resultFormat = 1

// EncodeResult appends the encoding of r to dst.
func EncodeResult(dst []byte, r Result) []byte {
	head := byte(resultFormat<<4) | byte(r.Refused)<<1
	if r.Conflict {
		head |= 1
	}
	dst = append(dst, head)
	dst = binary.AppendUvarint(dst, uint64(r.Revision))
	dst = binary.AppendUvarint(dst, uint64(r.Time))
	if r.Conflict {
		dst = binary.AppendUvarint(dst, uint64(r.FailedGuard))
	}
	return dst
}

// DecodeResult is the inverse of EncodeResult. Its errors wrap ErrUnknownFormat or ErrMalformed.
func DecodeResult(b []byte) (Result, error) {
	d := FieldDecoder{Rest: b}
	r := d.Result()
	if d.Err == nil && len(d.Rest) > 0 {
		d.Fail()
	}
	if d.Err != nil {
		return Result{}, fmt.Errorf("result %x: %w", b, d.Err)
	}
	return r, nil
}

// Result decodes what EncodeResult has encoded.
func (d *FieldDecoder) Result() Result {
	head := d.Byte()
	if d.Err == nil && head>>4 != resultFormat {
		d.Rest, d.Err = nil, ErrUnknownFormat
		return Result{}
	}
	r := Result{Refused: Refusal(head >> 1 & 7), Conflict: head&1 != 0, Revision: d.Int64(), Time: d.Int64()}
	if r.Conflict {
		v := d.Int64()
		if v > MaxTxnGuards {
			d.Fail()
		}
		r.FailedGuard = int(v)
	}
	if d.Err != nil {
		return Result{}
	}
	return r
}
