package store

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// Change describes how one record has changed at a revision.
type Change[T any] struct {
	Path []string
	// Value is the record after the change, or nil if the change deleted it.
	Value *T
	// Before is the record before the change, or nil if the change created it. Only a Shared sets Before; in the
	// changes that Watch.Next returns it is always nil.
	Before   *T
	Revision int64
}

// watchBytes is the approximate size in bytes of one batch of changes, keys and values together. It is small because
// there may be thousands of watches with slow readers, each with one batch and its decoded form in memory.
const watchBytes = 16 << 10

// Watch returns the changes of the records below a path, or of one record. Call Close when the watch is no longer
// needed.
type Watch[T any] struct {
	table   Table[T]
	watcher *watch.Watcher
}

// Watch returns a Watch of the records below path. The parameter from is the first revision whose changes it returns.
func (t Table[T]) Watch(s *Store, from int64, path ...string) *Watch[T] {
	start, end := t.below(path)
	return t.watch(s, watch.Options{Key: start, End: end, FromRevision: from})
}

// WatchOne returns a Watch of the record at path. The parameter from is the first revision whose changes it returns.
func (t Table[T]) WatchOne(s *Store, from int64, path ...string) *Watch[T] {
	return t.watch(s, watch.Options{Key: t.key(path), FromRevision: from})
}

func (t Table[T]) watch(s *Store, opts watch.Options) *Watch[T] {
	opts.MaxBytes = watchBytes
	return &Watch[T]{table: t, watcher: s.opts.Engine.Watch(opts)}
}

// Close ends the watch. A blocked call of Next returns an error.
func (w *Watch[T]) Close() { w.watcher.Close() }

// Next waits for changes and returns them in log order, with the revision up to which the watch has returned every
// change. It returns an OutOfRange fault if the next change has been compacted; the caller must then read the records
// again and watch from the revision of that read.
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

// PathChange describes a change of a record by the record's path, without its value.
type PathChange struct {
	Path    []string
	Deleted bool
}

// PathWatch returns the paths of changed records without reading or decoding the records. Call Close when the watch is
// no longer needed.
type PathWatch struct {
	path    func(key []byte) []string
	watcher *watch.Watcher
}

// WatchPaths returns a PathWatch of the records below path. The parameter from is the first revision whose changes it
// returns.
func (t Table[T]) WatchPaths(s *Store, from int64, path ...string) *PathWatch {
	start, end := t.below(path)
	o := watch.Options{Key: start, End: end, FromRevision: from, KeysOnly: true, MaxBytes: watchBytes}
	return &PathWatch{path: t.path, watcher: s.opts.Engine.Watch(o)}
}

// Close ends the watch. A blocked call of Next returns an error.
func (w *PathWatch) Close() { w.watcher.Close() }

// Next waits for changes and returns them in log order, with the revision up to which the watch has returned every
// change. It returns an OutOfRange fault if the next change has been compacted.
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

// Await waits until done returns true for the record at path, and returns that record. It calls done with the current
// record and then with the record after each change, in order; the argument is nil while the record does not exist. If
// done returns an error, Await returns it at once.
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
