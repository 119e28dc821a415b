package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sort"

	"github.com/cockroachdb/pebble/v2"
)

// Record is a named record: a small value beside the keyspace; see command.Step.
type Record struct {
	Name  []byte
	Value []byte
}

// recordSet holds the named records of one epoch, sorted by name. It is never changed, so that snapshots can share it.
type recordSet []Record

// recordKey returns the Pebble key of a named record.
func recordKey(name []byte) []byte { return append([]byte{tableRecords}, name...) }

// loadRecords reads all named records.
func loadRecords(db *pebble.DB) (r recordSet, err error) {
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{tableRecords}, UpperBound: []byte{tableRecords + 1}})
	if err != nil {
		return nil, fmt.Errorf("read records: %w", err)
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for ok := it.First(); ok; ok = it.Next() {
		value, err := it.ValueAndErr()
		if err != nil {
			return nil, fmt.Errorf("read records: %w", err)
		}
		r = append(r, Record{Name: bytes.Clone(it.Key()[1:]), Value: append([]byte{}, value...)})
	}
	return r, it.Error()
}

// search returns the position of the record with this name in r, or, if it is not found, where it has to be inserted.
func (r recordSet) search(name []byte) (at int, found bool) {
	return slices.BinarySearchFunc(r, name, func(a Record, name []byte) int { return bytes.Compare(a.Name, name) })
}

// with returns a copy of r in which the records of the parameter changed are set. Those with a nil Value are removed.
func (r recordSet) with(changed []Record) recordSet {
	r = slices.Clone(r)
	for _, c := range changed {
		at, found := r.search(c.Name)
		switch {
		case c.Value == nil && found:
			r = slices.Delete(r, at, at+1)
		case c.Value == nil:
		case found:
			r[at].Value = bytes.Clone(c.Value)
		default:
			r = slices.Insert(r, at, Record{Name: bytes.Clone(c.Name), Value: bytes.Clone(c.Value)})
		}
	}
	return r
}

// Epoch returns the snapshot's epoch of the named records. The epoch begins at 1 and rises with each program that
// changes the records. A program with an older epoch is refused. For a snapshot of a closed engine Epoch returns -1,
// which no program can have.
func (s *Snapshot) Epoch() int64 { return s.epoch }

// Epoch returns the current epoch of the named records. The epoch begins at 1 and rises with each program that changes
// the records.
func (e *Engine) Epoch() int64 { return e.published.Load().epoch }

// Record returns the value of the named record as of the snapshot. The value must not be changed.
func (s *Snapshot) Record(name []byte) (value []byte, ok bool) {
	at, found := s.records.search(name)
	if !found {
		return nil, false
	}
	return s.records[at].Value, true
}

// Records returns the named records whose names begin with prefix, in order, as of the snapshot. They must not be
// changed.
func (s *Snapshot) Records(prefix []byte) []Record {
	all := s.records
	from, _ := s.records.search(prefix)
	n := sort.Search(len(all)-from, func(i int) bool { return !bytes.HasPrefix(all[from+i].Name, prefix) })
	return slices.Clone(all[from : from+n])
}
