package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Apply carries out commands, in order, as one batch, and returns one result for each. When it returns, readers and
// watchers see them; they are durable after a Flush. Indexes must grow from call to call, and within one not shrink; gaps
// are allowed.
//
// An error leaves nothing of the call behind and is final: a CommandError for a command this program cannot carry out,
// else what the disk said. Every later Apply returns it again, until Restore.
func (e *Engine) Apply(cmds []Command) ([]Result, error) {
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
	s := &e.stage
	s.index = now.index
	s.begin(gen.db)
	results, err := s.run(cmds)
	if err = errors.Join(err, s.endReads()); err == nil {
		err = s.commit()
	}
	if err == nil && e.opts.Quiet {
		err = s.flushEarly()
	}
	if err = errors.Join(err, s.batch.Close()); err != nil {
		e.failed = fmt.Errorf("apply %d commands up to index %d: %w", len(cmds), cmds[len(cmds)-1].Index, marked(err))
		return nil, e.failed
	}
	e.publish(&view{gen: gen, state: s.state, records: s.records}, s.changes)
	e.hub.announce(s.changes, s.revision)
	if s.leaseChanges.any() && e.opts.OnLeases != nil {
		e.opts.OnLeases(s.leaseChanges)
	}
	s.clear()
	return results, nil
}

// stage is the batch that Apply builds: the state it leads to, and what reads within it must see.
type stage struct {
	state
	records     records
	leases      leases
	proposals   *proposals
	mostChanges int // MaxTxnChanges

	db            *pebble.DB
	batch         *pebble.Batch
	batchRevision int64            // up to which db has everything
	iter          *pebble.Iterator // over the keys as they were before the batch; opened when first needed
	index         *index           // of the keys as they were before Apply; nil while there is none
	pending       overlay          // what the batch's commands have written, when more follow
	own           overlay          // what the steps of the present program have changed, when more follow
	changes       []change
	leaseChanges  LeaseChanges
	more          bool // commands follow the present one

	list listed // the chunk of changes that is being filled

	txn     Txn // reused
	program programDecoder
	scratch []byte
	key     []byte

	unflushed int // bytes in the memtable, about; for Quiet
}

// listed is a chunk of changes that is not in the batch yet.
type listed struct {
	chunk    []byte
	revision int64 // of its first change
	place    int   // of its first change among those of the revision
	last     int64 // revision of its last change
}

func (s *stage) begin(db *pebble.DB) {
	s.db, s.batch, s.batchRevision = db, db.NewBatch(), s.revision
}

// cut gives what was done so far to Pebble, so that the next command can read it at any of its revisions.
func (s *stage) cut() error {
	if err := errors.Join(s.endReads(), s.commit(), s.batch.Close()); err != nil {
		return err
	}
	// What is pending now is also in Pebble. The index does not know it.
	s.begin(s.db)
	return nil
}

// bufferedItems bounds the buffers that are kept from one batch to the next.
const bufferedItems = 1024

// clear forgets the batch and keeps its buffers, unless it was a huge one.
func (s *stage) clear() {
	s.db, s.batch, s.index = nil, nil, nil
	s.pending.clear()
	s.leaseChanges = LeaseChanges{}
	clear(s.changes)
	s.changes = s.changes[:0]
	if cap(s.changes) > bufferedItems {
		s.changes = nil
	}
	if max(cap(s.txn.Guards), cap(s.txn.Ops)) > bufferedItems {
		s.txn = Txn{}
	}
	clear(s.txn.Guards[:cap(s.txn.Guards)])
	clear(s.txn.Ops[:cap(s.txn.Ops)])
	s.program.clear()
}

func (s *stage) run(cmds []Command) ([]Result, error) {
	results := make([]Result, len(cmds))
	for i := range cmds {
		c := &cmds[i]
		shares := i > 0 && c.Index == cmds[i-1].Index
		if c.Index <= s.applied.Index && !shares {
			return nil, fmt.Errorf("command at index %d after %d was applied: %w", c.Index, s.applied.Index, ErrInvalid)
		}
		s.more = i < len(cmds)-1
		r, err := s.command(c, shares)
		if err != nil {
			return nil, err
		}
		s.applied = Position{Index: c.Index, Term: c.Term}
		results[i] = r
	}
	return results, nil
}

func (s *stage) command(c *Command, shares bool) (Result, error) {
	if len(c.Data) == 0 {
		return s.result(), nil
	}
	known := c.ID != [16]byte{}
	if known && !mutant.On(mutant.ForgetProposalIDs) {
		if r, ok := s.proposals.find(c.ID); ok {
			return r, nil
		}
	}
	d := decoder{b: c.Data}
	if format := d.byte(); format != commandFormat {
		return Result{}, &CommandError{c.Index, fmt.Errorf("format %d: %w", format, ErrUnknownFormat)}
	}
	var r Result
	var err error
	switch kind := d.byte(); {
	case d.err != nil:
		return Result{}, &CommandError{c.Index, d.err}
	case kind == commandTxn:
		if err := s.txn.decode(d.b); err != nil {
			return Result{}, &CommandError{c.Index, err}
		}
		r, err = s.transact()
	case kind == commandProgram:
		p, err := s.program.decode(d.b)
		if err != nil {
			return Result{}, &CommandError{c.Index, err}
		}
		if c.Wanted && s.readsWithin(p.Steps) {
			if shares {
				return Result{}, &CommandError{c.Index, fmt.Errorf("it reads at a revision and shares its index: %w", ErrInvalid)}
			}
			if err := s.cut(); err != nil {
				return Result{}, err
			}
		}
		if r, err = s.execute(p, c.Wanted); err != nil {
			return Result{}, err
		}
	case kind == commandCompact:
		revision := d.int64()
		if d.err != nil || len(d.b) > 0 {
			return Result{}, &CommandError{c.Index, ErrMalformed}
		}
		r = s.compact(revision)
	default:
		return Result{}, &CommandError{c.Index, fmt.Errorf("kind %d: %w", kind, ErrUnknownFormat)}
	}
	if err != nil {
		return Result{}, err
	}
	if known {
		s.proposals.add(c.ID, r)
	}
	return r, nil
}

// readsWithin reports whether a step reads at a revision that the batch has made and gone beyond.
func (s *stage) readsWithin(steps []Step) bool {
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

func (s *stage) result() Result { return Result{Revision: s.revision, Time: s.time} }

func (s *stage) compact(revision int64) Result {
	r := s.result()
	switch {
	case revision <= s.floor:
		r.Refused = RefusedCompacted
	case revision > s.revision:
		r.Refused = RefusedFuture
	default:
		s.floor = revision
	}
	return r
}

// transact carries out s.txn.
func (s *stage) transact() (Result, error) {
	s.time = max(s.time, s.txn.Time)
	for i := range s.txn.Guards {
		holds, err := s.holds(&s.txn.Guards[i])
		if err != nil {
			return Result{}, err
		}
		if !holds && !mutant.On(mutant.DropGuards) {
			r := s.result()
			r.Conflict, r.FailedGuard = true, i
			return r, nil
		}
	}
	first := len(s.changes)
	refused, err := s.collect(first)
	if err != nil {
		return Result{}, err
	}
	if refused {
		s.changes = s.changes[:first]
		r := s.result()
		r.Refused = RefusedTooMany
		return r, nil
	}
	if len(s.changes) > first {
		s.revision++
		if err := s.write(s.changes[first:]); err != nil {
			return Result{}, err
		}
	}
	return s.result(), nil
}

func (s *stage) holds(g *Guard) (bool, error) {
	if len(g.End) == 0 {
		h, err := s.lookup(g.Key, false, false)
		return h.mod == g.ModRevision, err
	}
	if s.index != nil && len(s.pending.between(g.Key, g.End)) == 0 {
		return s.index.holds(g), nil
	}
	var highest, count int64
	err := s.scan(g.Key, g.End, false, func(_ []byte, h held) (bool, error) {
		highest, count = max(highest, h.mod), count+1
		return count <= g.Count && highest <= g.ModRevision, nil
	})
	return highest == g.ModRevision && count == g.Count, err
}

// collect appends to s.changes what the ops of s.txn change, and reports whether that is too much.
func (s *stage) collect(first int) (refused bool, err error) {
	deletes := 0
	for i := range s.txn.Ops {
		o := &s.txn.Ops[i]
		if o.Kind != OpPut {
			deletes++
		}
		switch o.Kind {
		case OpPut, OpDelete:
			h, err := s.lookup(o.Key, false, false)
			if err != nil {
				return false, err
			}
			if o.Kind == OpPut {
				s.changes = append(s.changes, s.putChange(o.Key, o.Value, 0, h.version))
			} else if h.live() {
				s.changes = append(s.changes, s.deleteChange(o.Key, h.version))
			}
		case OpDeleteRange:
			err := s.scan(o.Key, o.End, false, func(key []byte, h held) (bool, error) {
				s.changes = append(s.changes, s.deleteChange(bytes.Clone(key), h.version))
				return len(s.changes)-first <= s.mostChanges, nil
			})
			if err != nil || len(s.changes)-first > s.mostChanges {
				return true, err
			}
		}
	}
	if deletes > 1 {
		s.dropRepeatedDeletes(first)
	}
	return false, nil
}

// putChange is a put at the next revision over what the key held before.
func (s *stage) putChange(key, value []byte, lease int64, before version) change {
	c := change{key: key, value: value, revision: s.revision + 1, before: before, previous: before.mod}
	c.now = version{
		create: before.create, mod: c.revision, number: before.number + 1, lease: lease, size: int64(len(value)),
	}
	if !before.live() {
		c.now.create = c.revision
	} else {
		c.releases = before.stored(key)
	}
	return c
}

// deleteChange is a delete, at the next revision, of what the key held before.
func (s *stage) deleteChange(key []byte, before version) change {
	return change{
		deleted: true, key: key, revision: s.revision + 1,
		before: before, previous: before.mod, releases: before.stored(key),
	}
}

// dropRepeatedDeletes leaves the first delete of each key: the others find nothing.
func (s *stage) dropRepeatedDeletes(first int) {
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
