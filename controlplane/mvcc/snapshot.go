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
	v, err := e.pin()
	if err != nil {
		return &Snapshot{err: err, view: &view{}}
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

// Get reads one key; ok is false when it does not exist.
func (s *Snapshot) Get(key []byte) (kv KV, ok bool, err error) {
	if err := s.acquire(); err != nil {
		return KV{}, false, err
	}
	defer s.gen.release()
	it, err := s.gen.db.NewIter(&pebble.IterOptions{})
	if err != nil {
		return KV{}, false, fmt.Errorf("read key: %w", err)
	}
	kv, ok, err = get(it, key, s.revision)
	if err = errors.Join(err, it.Close()); err != nil {
		return KV{}, false, fmt.Errorf("read key: %w", err)
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
	return r.kv(key, mod)
}

// reader turns versions into KVs.
type reader struct {
	it       *pebble.Iterator
	revision int64
	keysOnly bool
	key      []byte // scratch
	seek     []byte // scratch
}

// kv copies what r.it stands at; ok is false for a tombstone.
func (r *reader) kv(key []byte, mod int64) (kv KV, ok bool, err error) {
	b, err := r.it.ValueAndErr()
	if err != nil {
		return KV{}, false, err
	}
	v, value, err := decodeVersion(b, mod)
	if err != nil || !v.live() {
		return KV{}, false, err
	}
	if r.keysOnly {
		value = nil
	}
	// One allocation for both.
	both := make([]byte, len(key)+len(value))
	n := copy(both, key)
	copy(both[n:], value)
	kv = KV{Key: both[:n:n], CreateRevision: v.create, ModRevision: v.mod, Version: v.number}
	if !r.keysOnly {
		kv.Value = both[n:]
	}
	return kv, true, nil
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
	if len(o.End) > 0 && !isFromKey(o.End) && bytes.Compare(o.Key, o.End) >= 0 {
		return RangeResult{}, nil
	}
	lower, upper := encodedBounds(o.Key, o.End)
	it, err := s.gen.db.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return RangeResult{}, fmt.Errorf("read range: %w", err)
	}
	r := reader{it: it, revision: revision, keysOnly: o.KeysOnly}
	err = r.collect(o, &res)
	if err = errors.Join(err, it.Close()); err != nil {
		return RangeResult{}, fmt.Errorf("read range: %w", err)
	}
	return res, nil
}

// collect fills res with what is in the bounds of r.it.
func (r *reader) collect(o RangeOptions, res *RangeResult) error {
	counting := o.WantCount || o.CountOnly
	size := 0
	step := r.ascend
	if o.Reverse {
		step = r.descend
	}
	for first := true; ; first = false {
		prefix, mod, ok, err := step(first)
		if err != nil || !ok {
			return err
		}
		full := o.CountOnly || o.Limit > 0 && len(res.KVs) >= o.Limit || o.MaxBytes > 0 && size >= o.MaxBytes
		if full {
			b, err := r.it.ValueAndErr()
			if err != nil {
				return err
			}
			v, _, err := decodeVersion(b, mod)
			if err != nil {
				return err
			}
			if !v.live() {
				continue
			}
			if !o.CountOnly {
				res.More = true
			}
			if !counting {
				return nil
			}
		} else {
			if r.key, err = appendUserKey(r.key[:0], prefix); err != nil {
				return err
			}
			kv, live, err := r.kv(r.key, mod)
			if err != nil {
				return err
			}
			if !live {
				continue
			}
			if res.KVs == nil {
				res.KVs = make([]KV, 0, expected(o.Limit))
			}
			res.KVs = append(res.KVs, kv)
			size += len(kv.Key) + len(kv.Value)
		}
		res.Count++
		res.MaxModRevision = max(res.MaxModRevision, mod)
	}
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
