package mvcc

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// Scrub removes, in one batch, what about limit changes below the floor have made unreadable: each change the version it
// replaced, a delete also itself. It leaves what open snapshots can read, and reports whether nothing else is left to
// remove. A background owner calls it again and
// again at its own pace; what members have removed may differ, what they read does not. Where a crash takes removals
// back, the next call finds them again.
func (e *Engine) Scrub(ctx context.Context, limit int) (done bool, err error) {
	e.scrubbing.Lock()
	defer e.scrubbing.Unlock()
	if err := ctx.Err(); err != nil {
		return false, err
	}
	gen := e.published.Load().gen
	if err := gen.acquire(); err != nil {
		return false, err
	}
	defer gen.release()
	floor := e.unread(gen)
	removed, done, err := scrub(gen.db, floor, max(limit, 1))
	if err == nil && removed > 0 && e.opts.Quiet {
		err = gen.db.Flush()
	}
	if err != nil {
		return false, fmt.Errorf("scrub below revision %d: %w", floor, err)
	}
	return done, nil
}

// scrub leaves the floor's own revision alone, so that a watch from the floor misses nothing.
func scrub(db *pebble.DB, floor int64, limit int) (removed int, done bool, err error) {
	first, end := changesKey(0, 0), changesKey(floor, 0)
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: first, UpperBound: end})
	if err != nil {
		return 0, false, err
	}
	b := db.NewBatch()
	defer func() { err = errors.Join(err, it.Close(), b.Close()) }()
	for ok := it.First(); ok; ok = it.Next() {
		if removed >= limit {
			end = append([]byte(nil), it.Key()...)
			return removed, false, removeChanges(b, first, end)
		}
		revision, _, err := splitChangesKey(it.Key())
		if err != nil {
			return 0, false, err
		}
		chunk, err := it.ValueAndErr()
		if err != nil {
			return 0, false, err
		}
		n, err := scrubChunk(b, chunk, revision)
		if err != nil {
			return 0, false, err
		}
		removed += n
	}
	if err := it.Error(); err != nil || removed == 0 {
		return 0, true, err
	}
	return removed, true, removeChanges(b, first, end)
}

// scrubChunk removes what the changes of one chunk replaced and counts them.
func scrubChunk(b *pebble.Batch, chunk []byte, revision int64) (n int, err error) {
	var key []byte
	for ; len(chunk) > 0; n++ {
		c, rest, err := nextChange(chunk, revision)
		if err != nil {
			return n, err
		}
		chunk = rest
		if c.previous > 0 {
			key = appendVersionKey(key[:0], c.key, c.previous)
			if err := b.Delete(key, nil); err != nil {
				return n, err
			}
		}
		if c.deleted {
			key = appendVersionKey(key[:0], c.key, revision)
			if err := b.Delete(key, nil); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// removeChanges removes the lists of changes of [first, end) and commits.
func removeChanges(b *pebble.Batch, first, end []byte) error {
	if err := b.DeleteRange(first, end, nil); err != nil {
		return err
	}
	return b.Commit(pebble.NoSync)
}
