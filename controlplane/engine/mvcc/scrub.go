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

// Scrub removes, in one batch, what about limit changes below the compactRevision have made unreadable: each change the version it
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

// scrub leaves the compactRevision's own revision alone, so that a watch from the compactRevision misses nothing. It goes on where the last call
// left off: lists that were removed from one and the same beginning on would lie in Pebble one over the other, each of them
// to be looked at by everything that reads.
func (g *generation) scrub(compactRevision int64, limit int) (removed int, done bool, err error) {
	if g.scrubProgress.from == nil {
		g.scrubProgress.from = changesKey(0, 0)
	}
	it, err := g.db.NewIter(&pebble.IterOptions{LowerBound: g.scrubProgress.from, UpperBound: changesKey(compactRevision, 0)})
	if err != nil {
		return 0, false, err
	}
	s := scrubber{b: g.db.NewBatch(), compactRevision: compactRevision, limit: limit, freed: g.freed.Load(), from: g.scrubProgress.from}
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

// scrubber builds the batch that removes what the changes below a revision replaced.
type scrubber struct {
	b               *pebble.Batch
	compactRevision int64
	limit           int
	removed         int
	freed           int64
	from            []byte // key before which no list is left
	stop            []byte // key before which the lists are done with; nil: none that stays has been found
	more            bool   // there is more to remove
	key             []byte
}

// chunk removes what the changes of a chunk replaced. Those that are not to be touched yet it keeps, as a list of their own.
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
			// Knowing what it gains, Pebble soon rewrites tables that hold large values for nothing.
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

// commit removes the lists before s.stop with what they told to remove.
func (s *scrubber) commit() error {
	if err := s.b.DeleteRange(s.from, s.stop, nil); err != nil {
		return err
	}
	if err := s.b.Set([]byte{tableFreed}, binary.AppendUvarint(nil, uint64(s.freed)), nil); err != nil {
		return err
	}
	return s.b.Commit(pebble.NoSync)
}

// Defragment gives back what Scrub has removed, and waits until that is done: without it Pebble does so in its own time, of
// large values only when much of a file is free. Reads and Apply go on meanwhile; Close and Restore wait for it, or for the
// compaction that is under way when ctx ends. It rewrites nearly all files, and needs as much room again until it is done.
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

// stretch removes two versions that are never there, about the first and the last there could be: a table that has both is
// only compacted with all that lies between, and Pebble leaves the lowest level alone otherwise.
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

// scrubbed tells those who wait how far physical removal has come.
type scrubProgress struct {
	from []byte // key of the first list that may be left; whoever scrubs has it

	mu       sync.Mutex
	revision int64         // all that became unreadable below it is removed
	advanced chan struct{} // closed when compactRevision moves on; nil while nobody waits
}

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

func (s *scrubProgress) reached(compactRevision int64) (reached bool, moved <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.advanced == nil {
		s.advanced = make(chan struct{})
	}
	return s.revision >= compactRevision, s.advanced
}

// AwaitScrub waits until Scrub has removed all that compacting at revision made unreadable, on this member. It calls
// Scrub for nobody. It fails with what ctx says, or with ErrRestored or ErrClosed when that happens to the engine.
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
