package store

import (
	"container/list"
	"context"
	"fmt"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// Shared derives a value, such as an encoded message, from each change of a record in a table. It derives the value
// once for all watches and caches it. Callers must not modify the values.
type Shared[T, V any] struct {
	store *Store
	table Table[T]
	make  func(Change[T]) (V, int, error)
	most  int

	mu    sync.Mutex
	made  map[changeKey]*cachedValue[V]
	order list.List // the *cachedValue entries of made that are ready, most recently used first
	bytes int
}

// changeKey identifies a change of a record by the record's key and the revision of the change. If the field current is
// true, it identifies the record as of that revision instead of the change.
type changeKey struct {
	key      string
	revision int64
	current  bool
}

// cachedValue is a cache entry: a value derived from one change, or one that is being derived.
type cachedValue[V any] struct {
	key   changeKey
	ready chan struct{} // closed when the fields below are set
	value V
	bytes int
	err   error
	place *list.Element
}

// NewShared returns a Shared that calls f to derive a value from a change. f also returns the size of the value in
// bytes. The cache holds the most recently used values; the parameter most is its maximum size in bytes.
func NewShared[T, V any](s *Store, t Table[T], most int, f func(Change[T]) (V, int, error)) *Shared[T, V] {
	return &Shared[T, V]{store: s, table: t, make: f, most: most, made: map[changeKey]*cachedValue[V]{}}
}

// SharedChange is one change that a SharedWatch returns. It holds a function that reads the records, not the records
// themselves.
type SharedChange[V any] struct {
	// Deleted is set if the change deleted the record.
	Deleted bool
	// Value returns the value derived from the change. If the value is not cached, Value reads the record. It returns
	// an OutOfRange fault if the revision of the change has been compacted.
	Value func() (V, error)
}

// SharedWatch returns the changes of one record. Call Close when the watch is no longer needed.
type SharedWatch[T, V any] struct {
	shared  *Shared[T, V]
	watcher *watch.Watcher
}

// sharedEvents is the maximum number of changes that one call of SharedWatch.Next returns.
const sharedEvents = 64

// WatchOne returns a SharedWatch of the record at path. The parameter from is the first revision whose changes it
// returns.
func (c *Shared[T, V]) WatchOne(from int64, path ...string) *SharedWatch[T, V] {
	return &SharedWatch[T, V]{c, c.store.opts.Engine.Watch(watch.Options{
		Key: c.table.key(path), FromRevision: from, KeysOnly: true, MaxEvents: sharedEvents, MaxBytes: watchBytes,
	})}
}

// Close ends the watch. A blocked call of Next returns an error.
func (w *SharedWatch[T, V]) Close() { w.watcher.Close() }

// Next waits for changes and returns them in log order. It returns an OutOfRange fault if the next change has been
// compacted; the caller must then read the record again and watch from the revision of that read.
func (w *SharedWatch[T, V]) Next(ctx context.Context) ([]SharedChange[V], error) {
	batch, err := w.watcher.Next(ctx)
	if err != nil {
		return nil, history(err)
	}
	out := make([]SharedChange[V], len(batch.Events))
	for i, e := range batch.Events {
		key := changeKey{string(e.KV.Key), e.KV.ModRevision, false}
		deleted, created := e.Type == watch.EventDelete, e.PrevModRevision == 0
		out[i] = SharedChange[V]{deleted, func() (V, error) {
			return w.shared.get(key, func(snap *mvcc.Snapshot) (c Change[T], err error) {
				c.Revision = key.revision
				if !deleted {
					if c.Value, err = w.shared.at(snap, key.key, key.revision); err != nil {
						return c, err
					}
				}
				if !created {
					c.Before, err = w.shared.at(snap, key.key, key.revision-1)
				}
				return c, err
			})
		}}
	}
	return out, nil
}

// Current returns a function that returns the value derived from the record that v reads at path. The value is derived
// from a Change whose fields Before and Value both hold that record. Current returns an error if the record does not
// exist.
func (c *Shared[T, V]) Current(v *View, path ...string) (func() (V, error), error) {
	key := c.table.key(path)
	kv, ok, err := v.snap.Get(key)
	if err == nil && !ok {
		err = fmt.Errorf("read %s: there is no such record", key)
	}
	if err != nil {
		return nil, history(err)
	}
	at, seen := changeKey{string(key), kv.ModRevision, true}, v.Revision()
	return func() (V, error) {
		return c.get(at, func(snap *mvcc.Snapshot) (Change[T], error) {
			// Read the record at the revision of the View (seen). The revision that wrote the record may have been
			// compacted, although the record is unchanged.
			value, err := c.at(snap, at.key, seen)
			return Change[T]{Value: value, Before: value, Revision: at.revision}, err
		})
	}, nil
}

// at reads and decodes the record of a key as of a revision. It returns an error if the record does not exist at that
// revision.
func (c *Shared[T, V]) at(snap *mvcc.Snapshot, key string, revision int64) (*T, error) {
	found, err := snap.Range(mvcc.RangeOptions{Key: []byte(key), Revision: revision})
	if err != nil {
		return nil, history(fmt.Errorf("read %s at revision %d: %w", key, revision, err))
	}
	if len(found.KVs) == 0 {
		return nil, fmt.Errorf("read %s at revision %d: there is no such record", key, revision)
	}
	return c.table.decode(found.KVs[0].Key, found.KVs[0].Value)
}

// get returns the value derived from a change. If the value is not cached, get calls read to get the change, and c.make
// to derive the value from it.
func (c *Shared[T, V]) get(key changeKey, read func(*mvcc.Snapshot) (Change[T], error)) (V, error) {
	c.mu.Lock()
	m := c.made[key]
	if m != nil {
		if m.place != nil {
			c.order.MoveToFront(m.place)
		}
		c.mu.Unlock()
		<-m.ready
		return m.value, m.err
	}
	m = &cachedValue[V]{key: key, ready: make(chan struct{}), err: fmt.Errorf("make a value of %s: it panicked", key.key)}
	c.made[key] = m
	c.mu.Unlock()
	defer c.keep(m)
	snap := c.store.opts.Engine.Snapshot()
	defer snap.Close()
	change, err := read(snap)
	if err == nil {
		m.value, m.bytes, err = c.make(change)
	}
	m.err = err
	return m.value, m.err
}

// keep adds m to the cache and evicts the least recently used values beyond c.most bytes. If the value could not be
// derived, keep removes m from the cache instead.
func (c *Shared[T, V]) keep(m *cachedValue[V]) {
	defer close(m.ready)
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.err != nil {
		delete(c.made, m.key)
		return
	}
	m.place = c.order.PushFront(m)
	c.bytes += m.bytes
	for c.bytes > c.most {
		last := c.order.Remove(c.order.Back()).(*cachedValue[V])
		delete(c.made, last.key)
		c.bytes -= last.bytes
	}
}
