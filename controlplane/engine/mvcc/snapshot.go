package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
)

// KV is a key with the value it has, or had, at some revision.
type KV struct {
	Key, Value     []byte
	CreateRevision int64 // that put the key when it did not exist
	ModRevision    int64 // that put this value
	Version        int64 // puts since and with the creation
	Lease          int64 // 0: none
}

// RangeOptions says what Range reads.
type RangeOptions struct {
	Key, End  []byte // [Key, End); no End: Key alone; End {0}: all from Key on
	Revision  int64  // 0: the snapshot's
	Limit     int    // most keys; 0: no limit
	MaxBytes  int    // stop after the key that brings keys and values to this; 0: no limit
	Reverse   bool   // from the last key to the first
	KeysOnly  bool   // values stay nil
	WantCount bool   // count the whole range, not only the keys returned
	CountOnly bool   // WantCount, and return no keys
}

// RangeResult is what Range found.
type RangeResult struct {
	KVs  []KV
	More bool // Limit or MaxBytes left keys out

	// Count and the highest mod revision of the keys in KVs, or of the whole range with WantCount or CountOnly.
	Count          int64
	MaxModRevision int64
}

// Guard is the guard that fails once r, read with o at the current revision, has changed. It covers what Count covers.
func (o RangeOptions) Guard(r RangeResult) Guard {
	g := Guard{Key: o.Key, End: o.End, ModRevision: r.MaxModRevision}
	if len(o.End) == 0 {
		return g
	}
	g.Count = r.Count
	if r.More && !o.WantCount && len(r.KVs) > 0 {
		last := r.KVs[len(r.KVs)-1].Key
		if o.Reverse {
			g.Key = last
		} else {
			g.End = append(bytes.Clone(last), 0)
		}
	}
	return g
}

// Snapshot is the keyspace as it was when the snapshot was taken, with the history that was kept then. It may be used
// from several goroutines. Until it is closed, Scrub removes nothing that it can read.
type Snapshot struct {
	*view
	err    error // of taking it
	closed atomic.Bool
}

// Snapshot takes a snapshot of the current revision. Close it.
func (e *Engine) Snapshot() *Snapshot {
	v, err := e.pin(true)
	if err != nil {
		return &Snapshot{err: err, view: &view{state: state{epoch: -1}}}
	}
	v.gen.release()
	return &Snapshot{view: v}
}

// Revision is the newest revision that can be read.
func (s *Snapshot) Revision() int64 { return s.revision }

// Floor is the oldest revision that can be read.
func (s *Snapshot) Floor() int64 { return s.floor }

// Time is the highest stamp of any transaction up to Revision, Unix milliseconds.
func (s *Snapshot) Time() int64 { return s.time }

// Close lets go of the snapshot. It must not run beside a read.
func (s *Snapshot) Close() {
	if s.err == nil && !s.closed.Swap(true) {
		s.gen.unpin(s.floor)
	}
}

// acquire permits reads until s.gen.release.
func (s *Snapshot) acquire() error {
	switch {
	case s.err != nil:
		return s.err
	case s.closed.Load():
		return fmt.Errorf("snapshot: %w", ErrClosed)
	}
	return s.gen.acquire()
}

// readable returns the revision to read at when asked for revision.
func (s *Snapshot) readable(revision int64) (int64, error) {
	switch {
	case revision == 0:
		return s.revision, nil
	case revision > s.revision:
		return 0, fmt.Errorf("revision %d, the current one is %d: %w", revision, s.revision, ErrFutureRevision)
	case revision < s.floor:
		return 0, &CompactedError{Revision: revision, Floor: s.floor}
	}
	return revision, nil
}

// readCounts counts what snapshots read; see Stats.
type readCounts struct{ gets, ranges, keys atomic.Int64 }

// Get reads one key; ok is false when it does not exist.
func (s *Snapshot) Get(key []byte) (kv KV, ok bool, err error) {
	if err := s.acquire(); err != nil {
		return KV{}, false, err
	}
	defer s.gen.release()
	if s.index != nil {
		if _, exists := s.index.find(key); !exists {
			return KV{}, false, nil
		}
	}
	s.gen.reads.gets.Add(1)
	it, err := s.gen.db.NewIter(&pebble.IterOptions{})
	if err != nil {
		return KV{}, false, fmt.Errorf("read key: %w", marked(err))
	}
	kv, ok, err = get(it, key, s.revision)
	if err = errors.Join(err, it.Close()); err != nil {
		return KV{}, false, fmt.Errorf("read key: %w", marked(err))
	}
	if ok {
		s.gen.reads.keys.Add(1)
	}
	return kv, ok, nil
}

// get reads the version of key that was newest at revision.
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
	h, err := r.held(mod)
	if err != nil || !h.live() {
		return KV{}, false, err
	}
	return h.kv(key, false), true, nil
}

// reader goes from key to key at one revision.
type reader struct {
	it       *pebble.Iterator
	revision int64
	key      []byte // scratch
	seek     []byte // scratch
}

// held decodes what r.it stands at, a version of revision mod; the zero version is a tombstone. The value is only lent.
func (r *reader) held(mod int64) (h held, err error) {
	b, err := r.it.ValueAndErr()
	if err == nil {
		h.version, h.value, err = decodeVersion(b, mod)
	}
	return h, err
}

// kv copies what a live version holds.
func (h *held) kv(key []byte, keysOnly bool) KV {
	value := h.value
	if keysOnly {
		value = nil
	}
	// One allocation for both.
	both := make([]byte, len(key)+len(value))
	n := copy(both, key)
	copy(both[n:], value)
	kv := KV{Key: both[:n:n], CreateRevision: h.create, ModRevision: h.mod, Version: h.number, Lease: h.lease}
	if !keysOnly {
		kv.Value = both[n:]
	}
	return kv
}

// Range reads the keys of [Key, End) at a revision, in order. It fails with ErrFutureRevision, a CompactedError, and
// ErrRestored or ErrClosed when that happened to the engine.
func (s *Snapshot) Range(o RangeOptions) (res RangeResult, err error) {
	if err := s.acquire(); err != nil {
		return RangeResult{}, err
	}
	defer s.gen.release()
	revision, err := s.readable(o.Revision)
	if err != nil {
		return RangeResult{}, err
	}
	res, err = readRange(s.gen.db, s.index.unless(revision != s.revision), o, revision)
	s.gen.reads.ranges.Add(1)
	s.gen.reads.keys.Add(int64(len(res.KVs)))
	return res, err
}

// emptyRange reports whether no key can be in [key, end).
func emptyRange(key, end []byte) bool {
	return len(end) > 0 && !isFromKey(end) && bytes.Compare(key, end) >= 0
}

// readRange reads what was newest at revision, which db must hold. counts is of that revision; without it counts read.
func readRange(db *pebble.DB, counts *index, o RangeOptions, revision int64) (RangeResult, error) {
	if emptyRange(o.Key, o.End) {
		return RangeResult{}, nil
	}
	if counts != nil && (o.CountOnly || o.WantCount) {
		count, newest := counts.span(o.Key, o.End)
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
		return RangeResult{}, fmt.Errorf("read range: %w", marked(err))
	}
	r, c := reader{it: it, revision: revision}, collector{o: &o}
	err = r.collect(&c)
	if err = errors.Join(err, it.Close()); err != nil {
		return RangeResult{}, fmt.Errorf("read range: %w", marked(err))
	}
	return c.res, nil
}

// collect gives c what is in the bounds of r.it.
func (r *reader) collect(c *collector) error {
	step := r.ascend
	if c.o.Reverse {
		step = r.descend
	}
	for first := true; ; first = false {
		prefix, mod, ok, err := step(first)
		if err != nil || !ok {
			return err
		}
		h, err := r.held(mod)
		if err != nil {
			return err
		}
		if !h.live() {
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

// collector makes a RangeResult of live keys in the order they are wanted.
type collector struct {
	o    *RangeOptions
	res  RangeResult
	size int
}

// full reports whether further keys are only counted, if that.
func (c *collector) full() bool {
	return c.o.CountOnly || c.o.Limit > 0 && len(c.res.KVs) >= c.o.Limit || c.o.MaxBytes > 0 && c.size >= c.o.MaxBytes
}

// add takes the next key, which need not be said when c is full, and reports whether those after it are of interest.
func (c *collector) add(key []byte, h held) bool {
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
	c.res.MaxModRevision = max(c.res.MaxModRevision, h.mod)
	return true
}

// expected is how many results to make room for.
func expected(limit int) int {
	const most = 128
	if limit <= 0 {
		return 8
	}
	return min(limit, most)
}

// ascend moves to the version that was newest at r.revision of the next key that had one.
func (r *reader) ascend(first bool) (prefix []byte, mod int64, ok bool, err error) {
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
		// Newer than wanted: go to the right place among the key's versions, or on to the next key.
		r.seek = appendRevision(append(r.seek[:0], prefix...), r.revision)
		ok = r.it.SeekGE(r.seek)
	}
	return nil, 0, false, r.it.Error()
}

// descend moves to the version that was newest at r.revision of the previous key that had one.
func (r *reader) descend(first bool) (prefix []byte, mod int64, ok bool, err error) {
	if first {
		ok = r.it.Last()
	} else {
		ok = r.it.SeekLT(r.seek)
	}
	for ok {
		// At the oldest version of a key; r.seek becomes its prefix, from which the next step goes on.
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
