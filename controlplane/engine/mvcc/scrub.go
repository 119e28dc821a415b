package mvcc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Scrub removes data that compaction has made unreadable, in one batch: for about limit changes the version that the
// change replaced, and the tombstone of a delete. It keeps what open snapshots can read. The result done is true if
// nothing else is left to remove. The owner of the engine calls Scrub in the background at its own pace. Members may
// have removed different amounts, but all reads return the same. A crash may undo removals; Scrub then repeats them.
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
	compactRevision := e.scrubLimit(gen)
	removed, done, err := gen.scrub(compactRevision, max(limit, 1))
	if err == nil && removed > 0 && e.opts.Quiet {
		err = gen.db.Flush()
	}
	if err != nil {
		return false, fmt.Errorf("scrub below revision %d: %w", compactRevision, markCorrupt(err))
	}
	if done {
		gen.scrubProgress.advance(compactRevision)
	}
	return done, nil
}

// scrub removes the versions that the revisions below compactRevision replaced, and the change log of these revisions.
// The change log of compactRevision itself stays, so that a watch from there misses nothing. scrub continues where the
// last call stopped: range deletions that all began at the same key would overlap in Pebble and slow down every read.
func (g *generation) scrub(compactRevision int64, limit int) (removed int, done bool, err error) {
	if g.scrubProgress.from == nil {
		g.scrubProgress.from = changesKey(0, 0)
	}
	it, err := g.db.NewIter(&pebble.IterOptions{LowerBound: g.scrubProgress.from, UpperBound: changesKey(compactRevision, 0)})
	if err != nil {
		return 0, false, err
	}
	s := scrubber{
		b: g.db.NewBatch(), compactRevision: compactRevision, limit: limit,
		freed: g.freed.Load(), from: g.scrubProgress.from,
	}
	defer func() { err = errors.Join(err, it.Close(), s.b.Close()) }()
	for ok := it.First(); ok && s.stop == nil; ok = it.Next() {
		if s.removed >= limit {
			s.stop, s.more = append([]byte(nil), it.Key()...), true
			break
		}
		chunk, err := it.ValueAndErr()
		if err != nil {
			return 0, false, err
		}
		l, err := newChunkReader(it.Key(), chunk)
		if err == nil {
			err = s.chunk(&l)
		}
		if err != nil {
			return 0, false, err
		}
	}
	if err := it.Error(); err != nil || s.removed == 0 {
		return 0, true, err
	}
	if s.stop == nil {
		s.stop = changesKey(compactRevision, 0)
	}
	if err := s.commit(); err != nil {
		return 0, false, err
	}
	g.freed.Store(s.freed)
	g.scrubProgress.from = s.stop
	return s.removed, !s.more, nil
}

// scrubber builds the batch of one Scrub.
type scrubber struct {
	b               *pebble.Batch
	compactRevision int64
	limit           int
	removed         int
	freed           int64
	from            []byte // earlier calls have removed the change log before this key
	stop            []byte // this call removes the change log before this key; nil: not known yet
	more            bool   // there is more to remove after this call
	key             []byte
}

// chunk removes what the changes in the chunk l of the change log replaced. Changes that must stay in the log are
// written back as a chunk of their own.
func (s *scrubber) chunk(l *chunkReader) error {
	for {
		rest := l.b
		c, ok, err := l.next()
		if err != nil || !ok {
			return err
		}
		if c.revision >= s.compactRevision || s.removed >= s.limit && l.ordinal == 0 {
			s.more = c.revision < s.compactRevision
			s.stop = changesKey(c.revision, 0)
			kept := append([]byte{rest[0] &^ changeNext}, rest[1:]...)
			return s.b.Set(s.stop, kept, nil)
		}
		s.removed++
		s.freed += c.freedBytes
		if c.prevModRevision > 0 {
			s.key = appendVersionKey(s.key[:0], c.key, c.prevModRevision)
			// DeleteSized tells Pebble how large the deleted version is, so that it soon rewrites tables from which
			// much was deleted.
			if size := c.freedBytes - versionBytes - int64(len(c.key)); size > 0 {
				err = s.b.DeleteSized(s.key, uint32(size), nil)
			} else {
				err = s.b.Delete(s.key, nil)
			}
			if err != nil {
				return err
			}
		}
		if c.deleted && !c.superseded {
			s.freed += storedBytes(c.key, command.Meta{})
			s.key = appendVersionKey(s.key[:0], c.key, c.revision)
			if err := s.b.Delete(s.key, nil); err != nil {
				return err
			}
		}
	}
}

// commit adds a deletion of the change log before s.stop to the batch, and commits the batch.
func (s *scrubber) commit() error {
	if err := s.b.DeleteRange(s.from, s.stop, nil); err != nil {
		return err
	}
	if err := s.b.Set([]byte{tableFreed}, binary.AppendUvarint(nil, uint64(s.freed)), nil); err != nil {
		return err
	}
	return s.b.Commit(pebble.NoSync)
}

// Defragment rewrites the files without the removed data, and returns when that is done. Without Defragment, Pebble
// reclaims space on its own, but the space of large values only when much of a file is unused. Reads and Apply may run
// meanwhile. Close and Restore wait for Defragment or, once ctx has ended, for the current compaction. Defragment
// rewrites nearly all files and temporarily needs as much free space as they take.
func (e *Engine) Defragment(ctx context.Context) error {
	gen := e.published.Load().gen
	if err := gen.acquire(); err != nil {
		return err
	}
	defer gen.release()
	if err := gen.writeBoundaryTombstones(); err != nil {
		return fmt.Errorf("defragment: %w", err)
	}
	if err := gen.flush(ctx); err != nil {
		return err
	}
	gen.defragmenting.Add(1)
	defer gen.defragmenting.Add(-1)
	if err := gen.db.Compact(ctx, []byte{0}, []byte{0xff}, false); err != nil {
		return fmt.Errorf("defragment: %w", markCorrupt(err))
	}
	return nil
}

// writeBoundaryTombstones deletes two versions that never exist, one near the first and one near the last possible key.
// Pebble compacts the lowest level only for tables that overlap it, and a table with both deletions overlaps
// everything.
func (g *generation) writeBoundaryTombstones() (err error) {
	b := g.db.NewBatch()
	defer func() { err = errors.Join(err, b.Close()) }()
	for _, key := range [][]byte{{0}, bytes.Repeat([]byte{0xff}, 64)} {
		if err := b.Delete(appendVersionKey(nil, key, 0), nil); err != nil {
			return err
		}
	}
	return b.Commit(pebble.NoSync)
}

// scrubProgress records up to which compact revision Scrub has removed data. AwaitScrub waits for it.
type scrubProgress struct {
	from []byte // key of the first chunk of the change log that may be left; used only by Scrub

	mu       sync.Mutex
	revision int64         // Scrub has removed everything that compacting at this revision made unreadable
	advanced chan struct{} // closed when revision rises; nil: no caller waits
}

// advance records that Scrub has removed everything up to compactRevision, and wakes the waiting callers.
func (s *scrubProgress) advance(compactRevision int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if compactRevision <= s.revision {
		return
	}
	s.revision = compactRevision
	if s.advanced != nil {
		close(s.advanced)
		s.advanced = nil
	}
}

// reached reports whether Scrub has removed everything up to compactRevision. It also returns a channel that is closed
// when Scrub has come further than now.
func (s *scrubProgress) reached(compactRevision int64) (reached bool, moved <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.advanced == nil {
		s.advanced = make(chan struct{})
	}
	return s.revision >= compactRevision, s.advanced
}

// AwaitScrub waits until Scrub has removed, on this member, all that compacting at revision made unreadable. It does
// not call Scrub itself. It fails with the error of ctx, ErrRestored or ErrClosed.
func (e *Engine) AwaitScrub(ctx context.Context, revision int64) error {
	g := e.published.Load().gen
	for {
		reached, moved := g.scrubProgress.reached(revision)
		if reached {
			return nil
		}
		select {
		case <-moved:
		case <-g.done:
			return fmt.Errorf("await scrub up to revision %d: %w", revision, g.closedErr)
		case <-ctx.Done():
			return fmt.Errorf("await scrub up to revision %d: %w", revision, ctx.Err())
		}
	}
}
