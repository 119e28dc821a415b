package raftlog

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// InitialState implements raft.Storage: it returns the HardState and the membership as of the last applied entry.
func (l *Log) InitialState() (*raftpb.HardState, *raftpb.ConfState, error) {
	return l.hard, l.members.Conf, nil
}

// FirstIndex implements raft.Storage: it returns the index of the first entry that was not truncated.
func (l *Log) FirstIndex() (uint64, error) { return l.begin.Index + 1, nil }

// LastIndex implements raft.Storage: it returns the index of the last entry. If the log has no entry, it returns the
// index at which the log begins.
func (l *Log) LastIndex() (uint64, error) { return l.last.Index, nil }

// Term implements raft.Storage: it returns the term of entry i. The error is raft.ErrCompacted if the entry was
// truncated, and raft.ErrUnavailable if it is beyond the end of the log. If the entry is not cached, Term reads it from
// the disk.
func (l *Log) Term(i uint64) (uint64, error) {
	switch {
	case i < l.begin.Index:
		return 0, raft.ErrCompacted
	case i == l.begin.Index:
		return l.begin.Term, nil
	case i > l.last.Index:
		return 0, raft.ErrUnavailable
	case i == l.last.Index:
		return l.last.Term, nil
	}
	if ent := l.cache.entry(i); ent != nil {
		return ent.GetTerm(), nil
	}
	term, err := l.termOf(i)
	if err != nil {
		return 0, &ReadError{fmt.Errorf("read entry %d of group %d: %w", i, l.group, err)}
	}
	return term, nil
}

// termOf reads the term of entry i from the disk.
func (l *Log) termOf(i uint64) (uint64, error) {
	v, closer, err := l.e.db.Get(entryKey(l.group, i))
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, errors.New("it is missing")
	}
	if err != nil {
		return 0, err
	}
	h, _, err := decodeEntry(i, v)
	return h.term, errors.Join(err, closer.Close())
}

// Entries implements raft.Storage: it returns the entries from index lo to hi-1. If they are larger than about maxSize
// bytes in total, it returns only the first of them, at least one.
func (l *Log) Entries(lo, hi, maxSize uint64) ([]*raftpb.Entry, error) {
	if lo <= l.begin.Index {
		return nil, raft.ErrCompacted
	}
	if hi > l.last.Index+1 {
		return nil, raft.ErrUnavailable
	}
	var out []*raftpb.Entry
	size := uint64(0)
	fits := func(ent *raftpb.Entry) bool {
		size += uint64(len(ent.Data)) + entryOverhead
		return size <= maxSize || len(out) == 0
	}
	if first := l.cache.first(); lo < first {
		err := l.Scan(lo, min(hi, first), func(ent *raftpb.Entry) (bool, error) {
			if !fits(ent) {
				return false, nil
			}
			out = append(out, ent)
			return size < maxSize, nil
		})
		if err != nil {
			return nil, &ReadError{err}
		}
		lo += uint64(len(out))
		if lo < min(hi, first) {
			if size < maxSize {
				return nil, &ReadError{fmt.Errorf("read entry %d of group %d: it is missing", lo, l.group)}
			}
			return out, nil
		}
	}
	for ; lo < hi; lo++ {
		ent := l.cache.entry(lo)
		if !fits(ent) {
			break
		}
		out = append(out, ent)
	}
	return out, nil
}

// Snapshot implements raft.Storage. It returns only the metadata of a snapshot, as of the last applied entry. The state
// machine writes its files later, when raft has made the message that will carry the snapshot.
func (l *Log) Snapshot() (*raftpb.Snapshot, error) {
	term, err := l.Term(l.applied)
	if err != nil {
		return nil, &ReadError{fmt.Errorf("place a snapshot of group %d at %d: %w", l.group, l.applied, err)}
	}
	return &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: new(l.applied), Term: new(term), ConfState: l.members.Conf,
	}}, nil
}

// ReadError is the error of the raft.Storage methods when the disk cannot be read. raft panics with it, and the caller
// of raft recognizes it by its type when it recovers the panic.
type ReadError struct{ err error }

func (e *ReadError) Error() string { return e.err.Error() }
func (e *ReadError) Unwrap() error { return e.err }
