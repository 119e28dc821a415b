package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/shared/mutant"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/keyindex"
)

// Apply applies cmds, in order, as one batch and returns one result for each. When it returns, readers and watchers see
// the changes; they are durable after a Flush. Indexes must increase from call to call and must not decrease within a
// call; gaps are allowed.
//
// After an error, readers and watchers see nothing of the call. The error is final: each later Apply returns it, until
// Restore. It is a CommandError for a command that this version cannot apply, otherwise an error of the disk.
func (e *Engine) Apply(cmds []command.Command) ([]command.Result, error) {
	if e.failed != nil {
		return nil, e.failed
	}
	if len(cmds) == 0 {
		return nil, nil
	}
	now := e.published.Load()
	gen := now.gen
	if err := gen.acquire(); err != nil {
		return nil, err
	}
	defer gen.release()
	s := &e.applier
	s.index = now.index
	s.beginBatch(gen.db)
	results, err := s.run(cmds)
	if err = errors.Join(err, s.closeIterator()); err == nil {
		err = s.commit()
	}
	if err == nil && e.opts.Quiet {
		err = s.flushEarly()
	}
	if err = errors.Join(err, s.batch.Close()); err != nil {
		e.failed = fmt.Errorf("apply %d commands up to index %d: %w", len(cmds), cmds[len(cmds)-1].Index, markCorrupt(err))
		return nil, e.failed
	}
	e.publish(&view{gen: gen, state: s.state, records: s.records}, s.changes)
	e.hub.Announce(&s.changes, s.revision)
	if s.leaseChanges.any() && e.opts.OnLeases != nil {
		e.opts.OnLeases(s.leaseChanges)
	}
	s.clear()
	return results, nil
}

// applier builds the Pebble batch of one Apply. Besides the new state, it holds the writes of earlier commands of the
// batch, which later commands must read instead of the stored keys.
type applier struct {
	state
	records    recordSet
	leases     leases
	proposals  *proposals
	maxChanges int // MaxTxnChanges; lower in tests

	db             *pebble.DB
	batch          *pebble.Batch
	batchRevision  int64            // newest revision that db contains
	iter           *pebble.Iterator // iterator over the keys as they were before the batch; opened on first use
	index          *keyindex.Index  // index of the keys as they were before Apply; nil: not built
	batchOverlay   overlay          // writes of the earlier commands in the batch
	programOverlay overlay          // writes of the earlier steps of the program
	changes        changeList
	leaseChanges   LeaseChanges
	moreCommands   bool // more commands of the batch follow the current one

	chunk changeChunk // the part of the change log that is being filled

	decoder command.Decoder
	scratch []byte
	key     []byte

	unflushed int // approximate bytes in the memtable; used only with Options.Quiet

	onCommit func(time.Duration) // Options.OnCommit, or nil
}

// changeChunk is the chunk of the change log that is being filled. It is not in the batch yet. The change log is the
// stored list of what each revision changed.
type changeChunk struct {
	data         []byte
	revision     int64 // revision of its first change
	ordinal      int   // position of its first change within that revision
	lastRevision int64 // revision of its last change
}

// beginBatch starts a Pebble batch.
func (s *applier) beginBatch(db *pebble.DB) {
	s.db, s.batch, s.batchRevision = db, db.NewBatch(), s.revision
}

// commitEarly commits the commands of the batch that are already applied. The next command can then read at each
// revision that they created, since reads at a revision see only what is in Pebble.
func (s *applier) commitEarly() error {
	if err := errors.Join(s.closeIterator(), s.commit(), s.batch.Close()); err != nil {
		return err
	}
	// Pebble now has the writes that are in s.batchOverlay. The index s.index does not have them, so the overlay must
	// not be cleared.
	s.beginBatch(s.db)
	return nil
}

// bufferedItems is the maximum capacity, in items, of a slice that is kept for the next batch. Larger slices are freed.
const bufferedItems = 1024

// clear removes the batch from s. It keeps slices of up to bufferedItems items for the next batch.
func (s *applier) clear() {
	s.db, s.batch, s.index = nil, nil, nil
	s.batchOverlay.clear()
	s.leaseChanges = LeaseChanges{}
	clear(s.changes)
	s.changes = s.changes[:0]
	if cap(s.changes) > bufferedItems {
		s.changes = nil
	}
	s.decoder.Reset()
}

// run applies cmds and adds their writes to the batch. It fails with ErrInvalid if a command's index was already
// applied.
func (s *applier) run(cmds []command.Command) ([]command.Result, error) {
	results := make([]command.Result, len(cmds))
	for i := range cmds {
		c := &cmds[i]
		shares := i > 0 && c.Index == cmds[i-1].Index
		if c.Index <= s.applied.Index && !shares {
			return nil, fmt.Errorf("command at index %d after %d was applied: %w", c.Index, s.applied.Index, command.ErrInvalid)
		}
		s.moreCommands = i < len(cmds)-1
		r, err := s.command(c, shares)
		if err != nil {
			return nil, err
		}
		s.applied = command.Position{Index: c.Index, Term: c.Term}
		results[i] = r
	}
	return results, nil
}

// command applies c and returns its result. If the proposal ID of c is remembered, c was applied before, and command
// only returns the remembered result. The parameter shares is true if the previous command of the batch has the same
// index.
func (s *applier) command(c *command.Command, shares bool) (command.Result, error) {
	if len(c.Data) == 0 {
		return s.result(), nil
	}
	known := c.ID != [16]byte{}
	if known && !mutant.On(mutant.ForgetProposalIDs) {
		if r, ok := s.proposals.find(c.ID); ok {
			return r, nil
		}
	}
	kind, err := s.decoder.Decode(c.Data)
	if err != nil {
		return command.Result{}, &CommandError{c.Index, err}
	}
	var r command.Result
	switch kind {
	case command.KindTxn:
		r, err = s.transact(&s.decoder.Txn)
	case command.KindProgram:
		p := s.decoder.Program
		if c.WantSteps && s.readsWithin(p.Steps) {
			if shares {
				err := fmt.Errorf("a program that reads at a revision shares its log entry: %w", command.ErrInvalid)
				return command.Result{}, &CommandError{c.Index, err}
			}
			if err := s.commitEarly(); err != nil {
				return command.Result{}, err
			}
		}
		r, err = s.execute(p, c.WantSteps)
	case command.KindCompact:
		r = s.compact(s.decoder.Compact)
	}
	if err != nil {
		return command.Result{}, err
	}
	if known {
		s.proposals.add(c.ID, r)
	}
	return r, nil
}

// readsWithin reports whether one of steps, or a step in one of their branches, reads at a revision that the
// uncommitted batch has created.
func (s *applier) readsWithin(steps []command.Step) bool {
	if s.revision == s.batchRevision {
		return false
	}
	for i := range steps {
		st := &steps[i]
		r := st.Range.Revision
		if r > s.batchRevision && r <= s.revision || s.readsWithin(st.Then) || s.readsWithin(st.Else) {
			return true
		}
	}
	return false
}

// result returns a result with the current revision and time.
func (s *applier) result() command.Result { return command.Result{Revision: s.revision, Time: s.time} }

// compact makes revision the compact revision, the oldest one that can be read. Scrub removes the older data later.
func (s *applier) compact(revision int64) command.Result {
	r := s.result()
	switch {
	case revision <= s.compactRevision:
		r.Refused = command.RefusedCompacted
	case revision > s.revision:
		r.Refused = command.RefusedFuture
	default:
		s.compactRevision = revision
	}
	return r
}

// transact applies t: if all guards hold it writes the ops, otherwise it returns a conflict.
func (s *applier) transact(t *command.Txn) (command.Result, error) {
	s.time = max(s.time, t.Time)
	for i := range t.Guards {
		holds, err := s.checkGuard(&t.Guards[i])
		if err != nil {
			return command.Result{}, err
		}
		if !holds && !mutant.On(mutant.DropGuards) {
			r := s.result()
			r.Conflict, r.FailedGuard = true, i
			return r, nil
		}
	}
	first := len(s.changes)
	refused, err := s.collectChanges(t, first)
	if err != nil {
		return command.Result{}, err
	}
	if refused {
		s.changes = s.changes[:first]
		r := s.result()
		r.Refused = command.RefusedTooMany
		return r, nil
	}
	if len(s.changes) > first {
		s.revision++
		if err := s.write(s.changes[first:]); err != nil {
			return command.Result{}, err
		}
	}
	return s.result(), nil
}

// checkGuard reports whether the guard g holds. It sees the writes of earlier commands of the batch.
func (s *applier) checkGuard(g *command.Guard) (bool, error) {
	if len(g.End) == 0 {
		h, err := s.lookup(g.Key, false, false)
		return h.ModRevision == g.ModRevision, err
	}
	if s.index != nil && len(s.batchOverlay.between(g.Key, g.End)) == 0 {
		return guardHolds(s.index, g), nil
	}
	var highest, count int64
	err := s.scan(g.Key, g.End, false, func(_ []byte, h keyState) (bool, error) {
		highest, count = max(highest, h.ModRevision), count+1
		return count <= g.Count && highest <= g.ModRevision, nil
	})
	return highest == g.ModRevision && count == g.Count, err
}

// collectChanges appends the changes that the ops of t make to s.changes; the first of them is at position first. The
// result refused is true if there are more than s.maxChanges.
func (s *applier) collectChanges(t *command.Txn, first int) (refused bool, err error) {
	deletes := 0
	for i := range t.Ops {
		o := &t.Ops[i]
		if o.Kind != command.OpPut {
			deletes++
		}
		switch o.Kind {
		case command.OpPut, command.OpDelete:
			h, err := s.lookup(o.Key, false, false)
			if err != nil {
				return false, err
			}
			if o.Kind == command.OpPut {
				s.changes = append(s.changes, s.putChange(o.Key, o.Value, 0, h.Meta))
			} else if h.Live() {
				s.changes = append(s.changes, s.deleteChange(o.Key, h.Meta))
			}
		case command.OpDeleteRange:
			err := s.scan(o.Key, o.End, false, func(key []byte, h keyState) (bool, error) {
				s.changes = append(s.changes, s.deleteChange(bytes.Clone(key), h.Meta))
				return len(s.changes)-first <= s.maxChanges, nil
			})
			if err != nil || len(s.changes)-first > s.maxChanges {
				return true, err
			}
		}
	}
	if deletes > 1 {
		s.dropRepeatedDeletes(first)
	}
	return false, nil
}

// putChange returns the change of a put at the next revision. The parameter before is the metadata of the version that
// the put replaces.
func (s *applier) putChange(key, value []byte, lease int64, before command.Meta) change {
	c := change{key: key, value: value, revision: s.revision + 1, before: before, prevModRevision: before.ModRevision}
	c.after = command.Meta{
		CreateRevision: before.CreateRevision, ModRevision: c.revision, Version: before.Version + 1,
		Lease: lease, Size: int64(len(value)),
	}
	if !before.Live() {
		c.after.CreateRevision = c.revision
	} else {
		c.freedBytes = storedBytes(key, before)
	}
	return c
}

// deleteChange returns the change of a delete at the next revision. The parameter before is the metadata of the deleted
// version.
func (s *applier) deleteChange(key []byte, before command.Meta) change {
	return change{
		deleted: true, key: key, revision: s.revision + 1,
		before: before, prevModRevision: before.ModRevision, freedBytes: storedBytes(key, before),
	}
}

// dropRepeatedDeletes removes from s.changes[first:] each delete of a key that an earlier change there already deletes.
func (s *applier) dropRepeatedDeletes(first int) {
	seen := make(map[string]struct{}, len(s.changes)-first)
	kept := slices.DeleteFunc(s.changes[first:], func(c change) bool {
		if !c.deleted {
			return false
		}
		_, again := seen[string(c.key)]
		seen[string(c.key)] = struct{}{}
		return again
	})
	s.changes = s.changes[:first+len(kept)]
}

// CommandError is the fatal error of Apply for a command that this version cannot apply. Skipping the command would let
// this member's state differ from the others'. It wraps command.ErrUnknownFormat, ErrMalformed or ErrInvalid.
type CommandError struct {
	Index uint64
	Err   error
}

func (e *CommandError) Error() string { return fmt.Sprintf("command at index %d: %v", e.Index, e.Err) }

// Unwrap returns e.Err.
func (e *CommandError) Unwrap() error { return e.Err }
