package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3/raftpb"
)

// Scan calls f for each stored entry whose index is at least lo and less than hi, in order. It stops when f returns
// false or an error. If an entry is missing although a later one is stored, Scan returns an error.
func (l *Log) Scan(lo, hi uint64, f func(*raftpb.Entry) (bool, error)) error {
	return l.walk(lo, hi, func(h entryHead, data []byte) (bool, error) { return f(h.entry(data)) })
}

// walk is Scan without a copy of the data: f must not use the parameter data after it has returned.
func (l *Log) walk(lo, hi uint64, f func(h entryHead, data []byte) (bool, error)) error {
	it, err := l.e.db.NewIter(&pebble.IterOptions{LowerBound: entryKey(l.group, lo), UpperBound: entryKey(l.group, hi)})
	if err != nil {
		return fmt.Errorf("read the log of group %d: %w", l.group, err)
	}
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		index := binary.BigEndian.Uint64(it.Key()[10:])
		if index != lo {
			return fmt.Errorf("read the log of group %d: entry %d is missing before %d", l.group, lo, index)
		}
		lo++
		v, err := it.ValueAndErr()
		if err != nil {
			return fmt.Errorf("read entry %d of group %d: %w", index, l.group, err)
		}
		h, data, err := decodeEntry(index, v)
		if err != nil {
			return fmt.Errorf("read entry %d of group %d: %w", index, l.group, err)
		}
		if more, err := f(h, data); err != nil || !more {
			return err
		}
	}
	if err := it.Error(); err != nil {
		return fmt.Errorf("read the log of group %d: %w", l.group, err)
	}
	return nil
}

// entryHead has the fields of a raft entry except its data.
type entryHead struct {
	index, term uint64
	kind        raftpb.EntryType
}

// decodeEntry decodes v, which is the stored value of the entry at index. The result data points into v.
func decodeEntry(index uint64, v []byte) (h entryHead, data []byte, err error) {
	if len(v) < 2 {
		return entryHead{}, nil, errors.New("too short")
	}
	term, n := binary.Uvarint(v[1:])
	if n <= 0 {
		return entryHead{}, nil, errors.New("broken term")
	}
	return entryHead{index, term, raftpb.EntryType(v[0])}, v[1+n:], nil
}

// entry returns a raft entry with the fields in h and a copy of data.
func (h entryHead) entry(data []byte) *raftpb.Entry {
	ent := &raftpb.Entry{Type: h.kind.Enum(), Index: &h.index, Term: &h.term}
	if len(data) > 0 {
		ent.Data = slices.Clone(data)
	}
	return ent
}
