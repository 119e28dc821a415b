package mvcc

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/shared/mutant"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/keyindex"
)

// Snapshot is the keyspace at the time when the snapshot was taken, with the history that was readable then. It may be
// used from several goroutines. Until the snapshot is closed, Scrub keeps the data that the snapshot can read.
type Snapshot struct {
	*view
	err    error // why the snapshot could not be taken
	closed atomic.Bool
}

// Snapshot takes a snapshot at the current revision. The caller must close it. If no snapshot can be taken, the methods
// of the result return the error.
func (e *Engine) Snapshot() *Snapshot {
	v, err := e.pin(true)
	if err != nil {
		return &Snapshot{err: err, view: &view{state: state{epoch: -1}}}
	}
	v.gen.release()
	return &Snapshot{view: v}
}

// Revision returns the newest revision that can be read.
func (s *Snapshot) Revision() int64 { return s.revision }

// CompactRevision returns the oldest revision that can be read.
func (s *Snapshot) CompactRevision() int64 { return s.compactRevision }

// Time returns the highest time stamp of all transactions up to Revision, in Unix milliseconds.
func (s *Snapshot) Time() int64 { return s.time }

// Close releases the snapshot. It must not be called while another method runs.
func (s *Snapshot) Close() {
	if s.err == nil && !s.closed.Swap(true) {
		s.gen.unpin(s.compactRevision)
	}
}

// acquire keeps the database open for a read until s.gen.release is called.
func (s *Snapshot) acquire() error {
	switch {
	case s.err != nil:
		return s.err
	case s.closed.Load():
		return fmt.Errorf("snapshot: %w", ErrClosed)
	}
	return s.gen.acquire()
}

// readable returns the parameter revision, or the snapshot's revision if the parameter is 0. If the snapshot cannot
// read that revision, it fails with ErrFutureRevision or a CompactedError.
func (s *Snapshot) readable(revision int64) (int64, error) {
	switch {
	case revision == 0:
		return s.revision, nil
	case revision > s.revision:
		return 0, fmt.Errorf("revision %d, the current one is %d: %w", revision, s.revision, ErrFutureRevision)
	case revision < s.compactRevision && !mutant.On(mutant.ReadCompacted):
		return 0, &CompactedError{Revision: revision, CompactRevision: s.compactRevision}
	}
	return revision, nil
}

// readCounts counts the reads of snapshots; see Stats.
type readCounts struct{ gets, ranges, keys atomic.Int64 }

// Get reads the newest version of key; ok is false if key does not exist. With Options.ValueCacheBytes, the caller must
// not change the bytes of kv.
func (s *Snapshot) Get(key []byte) (kv KV, ok bool, err error) {
	if err := s.acquire(); err != nil {
		return KV{}, false, err
	}
	defer s.gen.release()
	if s.index != nil {
		m, exists := s.index.Find(key)
		if !exists {
			return KV{}, false, nil
		}
		if kv, ok := s.gen.values.get(key, m.ModRevision()); ok {
			return kv, true, nil
		}
	}
	s.gen.reads.gets.Add(1)
	it, err := s.gen.db.NewIter(&pebble.IterOptions{})
	if err != nil {
		return KV{}, false, fmt.Errorf("read key: %w", markCorrupt(err))
	}
	kv, ok, err = get(it, key, s.revision)
	if err = errors.Join(err, it.Close()); err != nil {
		return KV{}, false, fmt.Errorf("read key: %w", markCorrupt(err))
	}
	if ok {
		s.gen.reads.keys.Add(1)
		s.gen.values.add(kv)
	}
	return kv, ok, nil
}

// get reads the version of key that was the newest one at revision.
func get(it *pebble.Iterator, key []byte, revision int64) (KV, bool, error) {
	var buf [128]byte
	if !it.SeekPrefixGE(appendVersionKey(buf[:0], key, revision)) {
		return KV{}, false, it.Error()
	}
	_, mod, err := splitVersion(it.Key())
	if err != nil {
		return KV{}, false, err
	}
	r := reader{it: it}
	h, err := r.keyState(mod)
	if err != nil || !h.Live() {
		return KV{}, false, err
	}
	return h.kv(key, false), true, nil
}

// reader iterates over keys at one revision.
type reader struct {
	it       *pebble.Iterator
	revision int64
	key      []byte // buffer for the current key
	seek     []byte // buffer for the Pebble key to seek to
}

// keyState decodes the version at the position of r.it. The parameter mod is the revision of this version. For a
// tombstone it returns the zero keyState. The value is valid until r.it moves.
func (r *reader) keyState(mod int64) (h keyState, err error) {
	b, err := r.it.ValueAndErr()
	if err == nil {
		h.Meta, h.value, err = decodeVersion(b, mod)
	}
	return h, err
}

// kv returns the live version h of key as a KV, with copies of key and value. If keysOnly is true, the KV has no value.
func (h *keyState) kv(key []byte, keysOnly bool) KV {
	value := h.value
	if keysOnly {
		value = nil
	}
	// Allocate the memory of the key and of the value together.
	both := make([]byte, len(key)+len(value))
	n := copy(both, key)
	copy(both[n:], value)
	kv := KV{Key: both[:n:n], CreateRevision: h.CreateRevision, ModRevision: h.ModRevision, Version: h.Version, Lease: h.Lease}
	if !keysOnly {
		kv.Value = both[n:]
	}
	return kv
}

// Range reads the keys of [Key, End) at a revision, in order. It fails with ErrFutureRevision, a CompactedError,
// ErrRestored or ErrClosed.
func (s *Snapshot) Range(o RangeOptions) (res RangeResult, err error) {
	if err := s.acquire(); err != nil {
		return RangeResult{}, err
	}
	defer s.gen.release()
	revision, err := s.readable(o.Revision)
	if err != nil {
		return RangeResult{}, err
	}
	index := s.index
	if revision != s.revision {
		index = nil
	}
	res, err = readRange(s.gen.db, index, o, revision)
	s.gen.reads.ranges.Add(1)
	s.gen.reads.keys.Add(int64(len(res.KVs)))
	return res, err
}

// readRange reads, for each key, the version that was the newest at revision, which db must contain. The parameter
// counts is the key index at that revision; if it is nil, counting reads the range.
func readRange(db *pebble.DB, counts *keyindex.Index, o RangeOptions, revision int64) (RangeResult, error) {
	if command.EmptyRange(o.Key, o.End) {
		return RangeResult{}, nil
	}
	if counts != nil && (o.CountOnly || o.WantCount) {
		count, newest := counts.Count(o.Key, o.End)
		if o.CountOnly || count == 0 {
			return RangeResult{Count: count, MaxModRevision: newest}, nil
		}
		o.WantCount = false
		res, err := readRange(db, nil, o, revision)
		if err == nil {
			res.Count, res.MaxModRevision = count, newest
		}
		return res, err
	}
	lower, upper := encodedBounds(o.Key, o.End)
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return RangeResult{}, fmt.Errorf("read range: %w", markCorrupt(err))
	}
	r, c := reader{it: it, revision: revision}, collector{o: &o}
	err = r.collect(&c)
	if err = errors.Join(err, it.Close()); err != nil {
		return RangeResult{}, fmt.Errorf("read range: %w", markCorrupt(err))
	}
	return c.res, nil
}

// collect adds the keys within the bounds of r.it to c.
func (r *reader) collect(c *collector) error {
	step := r.next
	if c.o.Reverse {
		step = r.previous
	}
	for first := true; ; first = false {
		prefix, mod, ok, err := step(first)
		if err != nil || !ok {
			return err
		}
		h, err := r.keyState(mod)
		if err != nil {
			return err
		}
		if !h.Live() {
			continue
		}
		if !c.full() {
			if r.key, err = appendUserKey(r.key[:0], prefix); err != nil {
				return err
			}
		}
		if !c.add(r.key, h) {
			return nil
		}
	}
}

// collector builds a RangeResult from live keys.
type collector struct {
	o    *RangeOptions
	res  RangeResult
	size int
}

// full reports whether the result has as many keys as the options allow. The keys that follow may still have to be
// counted.
func (c *collector) full() bool {
	return c.o.CountOnly || c.o.Limit > 0 && len(c.res.KVs) >= c.o.Limit || c.o.MaxBytes > 0 && c.size >= c.o.MaxBytes
}

// add adds the next key to the result, or only counts it if c is full. It returns false when the caller can stop. If c
// is full, key is not used.
func (c *collector) add(key []byte, h keyState) bool {
	if c.full() {
		c.res.More = !c.o.CountOnly
		if !c.o.WantCount && !c.o.CountOnly {
			return false
		}
	} else {
		if c.res.KVs == nil {
			c.res.KVs = make([]KV, 0, expected(c.o.Limit))
		}
		kv := h.kv(key, c.o.KeysOnly)
		c.res.KVs = append(c.res.KVs, kv)
		c.size += len(kv.Key) + len(kv.Value)
	}
	c.res.Count++
	c.res.MaxModRevision = max(c.res.MaxModRevision, h.ModRevision)
	return true
}

// expected returns the initial capacity of RangeResult.KVs for a range with this limit.
func expected(limit int) int {
	const most = 128
	if limit <= 0 {
		return 8
	}
	return min(limit, most)
}

// next moves r.it to the next key with a version at or before r.revision, and there to the newest such version, which
// may be a tombstone. It returns the key's encoded prefix and the version's revision. At the end, ok is false. The
// parameter first must be true for the first call.
func (r *reader) next(first bool) (prefix []byte, mod int64, ok bool, err error) {
	if first {
		ok = r.it.First()
	} else {
		ok = r.it.NextPrefix()
	}
	for ok {
		if prefix, mod, err = splitVersion(r.it.Key()); err != nil {
			return nil, 0, false, err
		}
		if mod <= r.revision {
			return prefix, mod, true, nil
		}
		// This version is newer than r.revision: seek to an older version of the key, or to the next key.
		r.seek = appendRevision(append(r.seek[:0], prefix...), r.revision)
		ok = r.it.SeekGE(r.seek)
	}
	return nil, 0, false, r.it.Error()
}

// previous is like next, but moves to the key before the current one, and on the first call to the last key.
func (r *reader) previous(first bool) (prefix []byte, mod int64, ok bool, err error) {
	if first {
		ok = r.it.Last()
	} else {
		ok = r.it.SeekLT(r.seek)
	}
	for ok {
		// r.it is now at the oldest version of a key. Store the prefix of this key in r.seek; the next call searches
		// before it.
		if prefix, mod, err = splitVersion(r.it.Key()); err != nil {
			return nil, 0, false, err
		}
		r.seek = append(r.seek[:0], prefix...)
		if mod <= r.revision {
			n := len(r.seek)
			r.seek = appendRevision(r.seek, r.revision)
			found := r.it.SeekGE(r.seek)
			r.seek = r.seek[:n]
			if !found {
				return nil, 0, false, errors.Join(r.it.Error(), ErrCorrupt)
			}
			prefix, mod, err = splitVersion(r.it.Key())
			return prefix, mod, err == nil, err
		}
		ok = r.it.SeekLT(r.seek)
	}
	return nil, 0, false, r.it.Error()
}
