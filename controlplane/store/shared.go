package store

import (
	"container/list"
	"context"
	"fmt"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/mvcc"
)

// Shared makes something of each change of a table once for all watches that come to it, however many they are: a message,
// say. What it makes must not be changed.
type Shared[T, V any] struct {
	store *Store
	table Table[T]
	make  func(Change[T]) (V, int, error)
	most  int

	mu    sync.Mutex
	made  map[madeKey]*made[V]
	order list.List // of *made, the last used first; those that are ready
	bytes int
}

// madeKey is a change, or with current the record as that change left it.
type madeKey struct {
	key      string
	revision int64
	current  bool
}

// made is what was made of a change.
type made[V any] struct {
	key   madeKey
	ready chan struct{} // closed when the fields below are set
	value V
	bytes int
	err   error
	place *list.Element
}

// NewShared shares what f makes of changes. f also says how many bytes that occupies; the last used ones are kept up to
// most bytes.
func NewShared[T, V any](s *Store, t Table[T], most int, f func(Change[T]) (V, int, error)) *Shared[T, V] {
	return &Shared[T, V]{store: s, table: t, make: f, most: most, made: map[madeKey]*made[V]{}}
}

// SharedChange is one change of a record that a SharedWatch follows. It holds no record.
type SharedChange[V any] struct {
	// Deleted says that the record is gone.
	Deleted bool
	// Value returns what was made of the change. It reads the record when no other watch has done so lately, and fails
	// with OutOfRange when the history from there is no longer kept.
	Value func() (V, error)
}

// SharedWatch follows one record. Close it.
type SharedWatch[T, V any] struct {
	shared  *Shared[T, V]
	watcher *mvcc.Watcher
}

// sharedEvents is how many changes a SharedWatch returns at a time, at most.
const sharedEvents = 64

// WatchOne follows one record from a revision on.
func (c *Shared[T, V]) WatchOne(from int64, path ...string) *SharedWatch[T, V] {
	return &SharedWatch[T, V]{c, c.store.opts.Engine.Watch(mvcc.WatchOptions{
		Key: c.table.key(path), FromRevision: from, KeysOnly: true, MaxEvents: sharedEvents, MaxBytes: watchBytes,
	})}
}

// Close ends the watch; a Next that waits returns.
func (w *SharedWatch[T, V]) Close() { w.watcher.Close() }

// Next waits for changes and returns them in log order. OutOfRange when the reader is too far behind: read again and watch
// from there.
func (w *SharedWatch[T, V]) Next(ctx context.Context) ([]SharedChange[V], error) {
	batch, err := w.watcher.Next(ctx)
	if err != nil {
		return nil, history(err)
	}
	out := make([]SharedChange[V], len(batch.Events))
	for i, e := range batch.Events {
		key := madeKey{string(e.KV.Key), e.KV.ModRevision, false}
		deleted, created := e.Type == mvcc.EventDelete, e.PrevModRevision == 0
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

// Current returns what is made of the record as v shows it, as if it had been changed to what it was before: Before and
// Value are the same. The record must be there.
func (c *Shared[T, V]) Current(v *View, path ...string) (func() (V, error), error) {
	key := c.table.key(path)
	kv, ok, err := v.snap.Get(key)
	if err == nil && !ok {
		err = fmt.Errorf("read %s: there is no such record", key)
	}
	if err != nil {
		return nil, history(err)
	}
	at, seen := madeKey{string(key), kv.ModRevision, true}, v.Revision()
	return func() (V, error) {
		return c.get(at, func(snap *mvcc.Snapshot) (Change[T], error) {
			// The revision that wrote the record may not be kept any more.
			value, err := c.at(snap, at.key, seen)
			return Change[T]{Value: value, Before: value, Revision: at.revision}, err
		})
	}, nil
}

// at reads and decodes the record as it was at a revision at which it was there.
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

// get returns what was made of a change, and makes it if nobody has.
func (c *Shared[T, V]) get(key madeKey, read func(*mvcc.Snapshot) (Change[T], error)) (V, error) {
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
	m = &made[V]{key: key, ready: make(chan struct{}), err: fmt.Errorf("make a value of %s: it panicked", key.key)}
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

// keep keeps m for others, unless it failed, and lets go of those that were not used for longest.
func (c *Shared[T, V]) keep(m *made[V]) {
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
		last := c.order.Remove(c.order.Back()).(*made[V])
		delete(c.made, last.key)
		c.bytes -= last.bytes
	}
}
