package command

import (
	"encoding/binary"
	"fmt"
)

// Position is a place in the log.
type Position struct{ Index, Term uint64 }

// Command is one committed entry of the log, or one of several in it, which then have one Index and come in one Apply, so
// that all of them are applied or none. A program for which ReadsRevision holds shares its index with no other: what it
// reads may have to be there for itself.
type Command struct {
	Index, Term uint64
	ID          [16]byte // of the proposal; an id among the last MaxProposals applies once. Zero: always applies
	Data        []byte   // of EncodeTxn, EncodeProgram or EncodeCompact; empty only moves the applied index
	WantSteps   bool     // somebody waits here for what a program's steps found: Result.Steps
}

// EncodeCompact encodes, as the Data of a Command, the wish that revisions below revision can no longer be read.
func EncodeCompact(revision int64) []byte {
	return binary.AppendUvarint([]byte{commandFormat, byte(KindCompact)}, uint64(max(revision, 0)))
}

// Refusal says why a command that is well formed changed nothing.
type Refusal uint8

// The refusals are stored: their numbers never change.
const (
	RefusedNot       Refusal = 0
	RefusedCompacted Refusal = 1 // compaction at or below the floor
	RefusedFuture    Refusal = 2 // compaction above the current revision
	RefusedTooMany   Refusal = 3 // changes of more than MaxTxnChanges keys
	RefusedEpoch     Refusal = 4 // the records changed since the program was decided

	RefusedLeaseNotFound Refusal = 5
	RefusedLeaseExists   Refusal = 6
	RefusedKeyNotFound   Refusal = 7 // of a put that keeps value or lease

	// An encoded result has room for no further one: they are part of resultFormat.
)

// Result is the outcome of one command.
type Result struct {
	Revision    int64   // current after the command
	Time        int64   // highest stamp after the command, Unix milliseconds
	Conflict    bool    // a guard did not hold: nothing was written
	FailedGuard int     // the first guard that did not hold
	Refused     Refusal // any other reason why nothing was written

	// Steps is what the steps of a program found. Only Apply fills it, and only for a Command that is Wanted and was
	// not refused: it is not encoded.
	Steps []StepResult
}

// Err is nil, or why a command was refused: ErrCompacted, ErrFutureRevision, ErrTooMany, ErrEpoch, ErrLeaseNotFound,
// ErrLeaseExists or ErrKeyNotFound. A conflict is no error.
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

// The first byte of an encoded result: format in the upper four bits, refusal in the next three, conflict in the last.
const resultFormat = 1

// EncodeResult appends r to dst.
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

// DecodeResult reads what EncodeResult wrote.
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
