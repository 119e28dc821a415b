package store

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// Change is a change of one record.
type Change[T any] struct {
	Path []string
	// Value is the record after the change, nil when it was deleted.
	Value *T
	// Before is the record before the change, nil when it was created. Only the changes that a Shared derives values
	// from have it; for those of a Watch it is nil.
	Before   *T
	Revision int64
}

// watchBytes is the approximate size of keys and values in one batch of a watch. A watch whose reader is slow holds one
// batch and its decoded form; there may be thousands of such watches.
const watchBytes = 16 << 10

// Watch returns the changes of the records below a path, or of one record. Call Close when done.
type Watch[T any] struct {
	table   Table[T]
	watcher *watch.Watcher
}

// Watch returns a Watch of the records below path. It starts at the revision from, inclusive.
func (t Table[T]) Watch(s *Store, from int64, path ...string) *Watch[T] {
	start, end := t.below(path)
	return t.watch(s, watch.Options{Key: start, End: end, FromRevision: from})
}

// WatchOne returns a Watch of the record at path. It starts at the revision from, inclusive.
func (t Table[T]) WatchOne(s *Store, from int64, path ...string) *Watch[T] {
	return t.watch(s, watch.Options{Key: t.key(path), FromRevision: from})
}

func (t Table[T]) watch(s *Store, opts watch.Options) *Watch[T] {
	opts.MaxBytes = watchBytes
	return &Watch[T]{table: t, watcher: s.opts.Engine.Watch(opts)}
}

// Close ends the watch. A blocked Next returns an error.
func (w *Watch[T]) Close() { w.watcher.Close() }

// Next waits for changes and returns them in log order, with the revision up to which the watch is complete. It returns
// OutOfRange if the next change is no longer kept: read the records again and watch from the revision of that read.
func (w *Watch[T]) Next(ctx context.Context) (changes []Change[T], revision int64, err error) {
	batch, err := w.watcher.Next(ctx)
	if err != nil {
		return nil, 0, history(err)
	}
	for _, e := range batch.Events {
		c := Change[T]{Path: w.table.path(e.KV.Key), Revision: e.KV.ModRevision}
		if e.Type == watch.EventPut {
			if c.Value, err = w.table.decode(e.KV.Key, e.KV.Value); err != nil {
				return nil, 0, err
			}
		}
		changes = append(changes, c)
	}
	return changes, batch.Revision, nil
}

// PathChange is a change of one record, without the record.
type PathChange struct {
	Path    []string
	Deleted bool
}

// PathWatch returns which records changed, and reads and decodes no record. Call Close when done.
type PathWatch struct {
	path    func(key []byte) []string
	watcher *watch.Watcher
}

// WatchPaths returns a PathWatch of the records below path. It starts at the revision from, inclusive.
func (t Table[T]) WatchPaths(s *Store, from int64, path ...string) *PathWatch {
	start, end := t.below(path)
	o := watch.Options{Key: start, End: end, FromRevision: from, KeysOnly: true, MaxBytes: watchBytes}
	return &PathWatch{path: t.path, watcher: s.opts.Engine.Watch(o)}
}

// Close ends the watch. A blocked Next returns an error.
func (w *PathWatch) Close() { w.watcher.Close() }

// Next waits for changes and returns them in log order, with the revision up to which the watch is complete. It returns
// OutOfRange if the next change is no longer kept.
func (w *PathWatch) Next(ctx context.Context) (changes []PathChange, revision int64, err error) {
	batch, err := w.watcher.Next(ctx)
	if err != nil {
		return nil, 0, history(err)
	}
	for _, e := range batch.Events {
		changes = append(changes, PathChange{Path: w.path(e.KV.Key), Deleted: e.Type == watch.EventDelete})
	}
	return changes, batch.Revision, nil
}

// Await waits until done returns true for the record at path, and returns the record. It calls done with the current
// record and then once per change, in order, with nil if the record does not exist. An error of done ends the wait.
func Await[T any](ctx context.Context, s *Store, t Table[T], done func(*T) (bool, error), path ...string) (*T, error) {
	var record *T
	var from int64
	if err := s.View(ctx, func(v *View) (err error) {
		from = v.Revision() + 1
		record, err = t.Get(v, path...)
		return err
	}); err != nil {
		return nil, err
	}
	if ok, err := done(record); ok || err != nil {
		return record, err
	}
	w := t.WatchOne(s, from, path...)
	defer w.Close()
	for {
		changes, _, err := w.Next(ctx)
		if err != nil {
			return record, err
		}
		for _, c := range changes {
			record = c.Value
			if ok, err := done(record); ok || err != nil {
				return record, err
			}
		}
	}
}
