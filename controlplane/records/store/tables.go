package store

import (
	"context"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// Name returns the name of the table.
func (t Table[T]) Name() string { return t.name }

// TableChange describes a change of a record by the record's table and path, without its value.
type TableChange struct {
	// Table is the name of the table.
	Table    string
	Path     []string
	Deleted  bool
	Revision int64
}

// TablesWatch returns the changes of several tables in one order, that of the log. Call Close when the watch is no
// longer needed.
type TablesWatch struct{ watcher *watch.Watcher }

// WatchTables returns a TablesWatch of all tables whose names begin with prefix. The parameter from is the first
// revision whose changes it returns.
func (s *Store) WatchTables(from int64, prefix string) *TablesWatch {
	o := watch.Options{
		Key: []byte(prefix), End: command.PrefixEnd([]byte(prefix)), FromRevision: from, KeysOnly: true, MaxBytes: watchBytes,
	}
	return &TablesWatch{watcher: s.opts.Engine.Watch(o)}
}

// Close ends the watch. A blocked call of Next returns an error.
func (w *TablesWatch) Close() { w.watcher.Close() }

// Next waits for changes and returns them in log order, with the revision up to which the watch has returned every
// change. It returns an OutOfRange fault if the next change has been compacted; the caller must then read the records
// again and watch from the revision of that read.
func (w *TablesWatch) Next(ctx context.Context) (changes []TableChange, revision int64, err error) {
	batch, err := w.watcher.Next(ctx)
	if err != nil {
		return nil, 0, history(err)
	}
	for _, e := range batch.Events {
		parts := strings.Split(string(e.KV.Key), "/")
		changes = append(changes, TableChange{
			Table: parts[0], Path: parts[1:], Deleted: e.Type == watch.EventDelete, Revision: e.KV.ModRevision,
		})
	}
	return changes, batch.Revision, nil
}
