package store

import (
	"encoding/binary"

	"github.com/elastic/go-freelru"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// MemoKey identifies a value in a Memo. It is a hash, such as SHA-256, of all inputs of the value other than records.
type MemoKey [32]byte

// Memo caches values that are derived from records. A cached value is reused as long as none of the records that were
// read to derive it has changed. Memo checks this in the engine's key index, without reading the records. Callers must
// not modify the values.
//
// A Memo caches a bounded number of values and evicts the least recently used ones. To bound its memory, it does not
// cache a value that was derived from more than memoReads reads. It may be used concurrently.
type Memo[V any] struct {
	cache *freelru.SyncedLRU[MemoKey, derived[V]]
}

// memoReads is the maximum number of reads from which a cached value may be derived. Other values are not cached.
const memoReads = 64

// derived is a cached value with its conflict checks (guards). A guard fails if a record from which the value was
// derived has changed.
type derived[V any] struct {
	value  V
	guards []command.Guard
}

// NewMemo returns a Memo that caches up to size values.
func NewMemo[V any](size uint32) *Memo[V] {
	// NewSynced fails only if size is 0.
	cache, err := freelru.NewSynced[MemoKey, derived[V]](size, func(k MemoKey) uint32 { return binary.LittleEndian.Uint32(k[:]) })
	if err != nil {
		panic(err)
	}
	return &Memo[V]{cache}
}

// Get returns the value of a key, derived from the records that r sees. It returns the cached value if none of its
// records has changed, and calls derive otherwise. derive must read only through its View. An error of derive is
// returned and not cached. In a transaction, all records that the value depends on are checked for conflicts at commit,
// as if the transaction had read them.
func (m *Memo[V]) Get(r Reader, key MemoKey, derive func(*View) (V, error)) (V, error) {
	v := r.view()
	if len(v.writes) > 0 || v.revision != 0 {
		return derive(v) // the value would belong to this transaction or to an older revision, so it is not cached
	}
	if d, ok := m.cache.Get(key); ok {
		if hold, known := v.snap.Holds(d.guards); hold && known {
			v.guard(d.guards)
			return d.value, nil
		}
	}
	tracked := &View{snap: v.snap, reads: &reads{seen: map[string]bool{}}}
	value, err := derive(tracked)
	v.guard(tracked.reads.guards)
	if err == nil && len(tracked.reads.guards) <= memoReads {
		m.cache.Add(key, derived[V]{value, tracked.reads.guards})
	}
	return value, err
}

// guard adds the given conflict checks to the transaction of v. It does nothing if v is not part of a transaction.
func (v *View) guard(guards []command.Guard) {
	if v.reads == nil {
		return
	}
	for _, g := range guards {
		v.reads.add(g)
	}
}
