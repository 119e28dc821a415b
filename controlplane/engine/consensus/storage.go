package consensus

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// InitialState implements raft.Storage.
func (l *groupLog) InitialState() (*raftpb.HardState, *raftpb.ConfState, error) {
	return l.hard, l.members.conf, nil
}

// FirstIndex implements raft.Storage.
func (l *groupLog) FirstIndex() (uint64, error) { return l.begin.index + 1, nil }

// LastIndex implements raft.Storage.
func (l *groupLog) LastIndex() (uint64, error) { return l.last.index, nil }

// Term implements raft.Storage.
func (l *groupLog) Term(i uint64) (uint64, error) {
	switch {
	case i < l.begin.index:
		return 0, raft.ErrCompacted
	case i == l.begin.index:
		return l.begin.term, nil
	case i > l.last.index:
		return 0, raft.ErrUnavailable
	case i == l.last.index:
		return l.last.term, nil
	}
	if ent := l.cache.entry(i); ent != nil {
		return ent.GetTerm(), nil
	}
	term, err := l.termOf(i)
	if err != nil {
		return 0, &storageError{fmt.Errorf("read entry %d of group %d: %w", i, l.group, err)}
	}
	return term, nil
}

// termOf reads an entry's term only.
func (l *groupLog) termOf(i uint64) (uint64, error) {
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

// Entries implements raft.Storage.
func (l *groupLog) Entries(lo, hi, maxSize uint64) ([]*raftpb.Entry, error) {
	if lo <= l.begin.index {
		return nil, raft.ErrCompacted
	}
	if hi > l.last.index+1 {
		return nil, raft.ErrUnavailable
	}
	var out []*raftpb.Entry
	size := uint64(0)
	fits := func(ent *raftpb.Entry) bool {
		size += uint64(len(ent.Data)) + entryOverhead
		return size <= maxSize || len(out) == 0
	}
	if first := l.cache.first(); lo < first {
		err := l.scan(lo, min(hi, first), func(ent *raftpb.Entry) (bool, error) {
			if !fits(ent) {
				return false, nil
			}
			out = append(out, ent)
			return size < maxSize, nil
		})
		if err != nil {
			return nil, &storageError{err}
		}
		lo += uint64(len(out))
		if lo < min(hi, first) {
			if size < maxSize {
				return nil, &storageError{fmt.Errorf("read entry %d of group %d: it is missing", lo, l.group)}
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

// Snapshot implements raft.Storage: only where a snapshot would be. The state itself is asked of the state machine
// when raft's message is about to be sent.
func (l *groupLog) Snapshot() (*raftpb.Snapshot, error) {
	term, err := l.Term(l.applied)
	if err != nil {
		return nil, &storageError{fmt.Errorf("place a snapshot of group %d at %d: %w", l.group, l.applied, err)}
	}
	return &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: new(l.applied), Term: new(term), ConfState: l.members.conf,
	}}, nil
}

// storageError marks a failed read of the log, which raft turns into a panic, for Host.guard.
type storageError struct{ err error }

func (e *storageError) Error() string { return e.err.Error() }
func (e *storageError) Unwrap() error { return e.err }
