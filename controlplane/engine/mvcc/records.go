package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sort"

	"github.com/cockroachdb/pebble/v2"
)

// Record is a named value beside the keyspace; see Step.
type Record struct {
	Name  []byte
	Value []byte
}

// records are the named records of one epoch, by name. They are few and never changed, so that a snapshot can keep them.
type recordSet []Record

func recordKey(name []byte) []byte { return append([]byte{tableRecords}, name...) }

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

func (r recordSet) search(name []byte) (at int, found bool) {
	return slices.BinarySearchFunc(r, name, func(a Record, name []byte) int { return bytes.Compare(a.Name, name) })
}

// with returns the records after those of changed were set, or removed where the value is nil.
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

// Epoch counts how often the records changed, from 1: a program that carries it was decided by these records. That of a
// snapshot of a closed engine is -1, which no program can carry.
func (s *Snapshot) Epoch() int64 { return s.epoch }

// Epoch counts how often the records changed, from 1.
func (e *Engine) Epoch() int64 { return e.published.Load().epoch }

// Record returns the record of that name as of the snapshot. The value must not be written to.
func (s *Snapshot) Record(name []byte) (value []byte, ok bool) {
	at, found := s.records.search(name)
	if !found {
		return nil, false
	}
	return s.records[at].Value, true
}

// Records returns the records whose names begin with prefix, in order, as of the snapshot. They must not be written to.
func (s *Snapshot) Records(prefix []byte) []Record {
	all := s.records
	from, _ := s.records.search(prefix)
	n := sort.Search(len(all)-from, func(i int) bool { return !bytes.HasPrefix(all[from+i].Name, prefix) })
	return slices.Clone(all[from : from+n])
}
