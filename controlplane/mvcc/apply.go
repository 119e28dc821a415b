package mvcc

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Apply carries out commands, in order, as one batch, and returns one result for each. When it returns, readers and
// watchers see them; they are durable after a Flush. Indexes must grow from call to call and within one, gaps are allowed.
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
	gen := e.published.Load().gen
	if err := gen.acquire(); err != nil {
		return nil, err
	}
	defer gen.release()
	s := &e.stage
	s.begin(gen.db)
	results, err := s.run(cmds)
	if err = errors.Join(err, s.endReads()); err == nil {
		err = s.commit()
	}
	if err == nil && e.opts.Quiet {
		err = s.flushEarly()
	}
	if err = errors.Join(err, s.batch.Close()); err != nil {
		e.failed = fmt.Errorf("apply %d commands up to index %d: %w", len(cmds), cmds[len(cmds)-1].Index, err)
		return nil, e.failed
	}
	e.published.Store(&view{gen: gen, state: s.state})
	e.hub.announce(s.changes, s.revision)
	s.clear()
	return results, nil
}

// stage is the batch that Apply builds: the state it leads to, and what reads within it must see.
type stage struct {
	state
	proposals   *proposals
	mostChanges int // MaxTxnChanges

	db      *pebble.DB
	batch   *pebble.Batch
	iter    *pebble.Iterator // over the keys as they were before the batch; opened when first needed
	pending pendingVersions
	changes []change
	more    bool // commands follow the present one

	txn     Txn // reused
	scratch []byte
	chunk   []byte

	unflushed int // bytes in the memtable, about; for Quiet
}

func (s *stage) begin(db *pebble.DB) {
	s.db, s.batch = db, db.NewBatch()
}

// bufferedItems bounds the buffers that are kept from one batch to the next.
const bufferedItems = 1024

// clear forgets the batch and keeps its buffers, unless it was a huge one.
func (s *stage) clear() {
	s.db, s.batch = nil, nil
	s.pending.clear()
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
}

func (s *stage) run(cmds []Command) ([]Result, error) {
	results := make([]Result, len(cmds))
	for i := range cmds {
		c := &cmds[i]
		if c.Index <= s.applied.Index {
			return nil, fmt.Errorf("command at index %d after %d was applied: %w", c.Index, s.applied.Index, ErrInvalid)
		}
		s.applied = Position{Index: c.Index, Term: c.Term}
		s.more = i < len(cmds)-1
		r, err := s.command(c)
		if err != nil {
			return nil, err
		}
		results[i] = r
	}
	return results, nil
}

func (s *stage) command(c *Command) (Result, error) {
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
		s.scratch = appendPrefix(s.scratch[:0], g.Key)
		v, err := s.newest(s.scratch)
		return v.mod == g.ModRevision, err
	}
	var highest, count int64
	err := s.scan(g.Key, g.End, func(_ []byte, v version) (bool, error) {
		highest, count = max(highest, v.mod), count+1
		return count <= g.Count && highest <= g.ModRevision, nil
	})
	return highest == g.ModRevision && count == g.Count, err
}

// collect appends to s.changes what the ops of s.txn change, and reports whether that is too much.
func (s *stage) collect(first int) (refused bool, err error) {
	next := s.revision + 1
	deletes := 0
	for i := range s.txn.Ops {
		o := &s.txn.Ops[i]
		if o.Kind != OpPut {
			deletes++
		}
		switch o.Kind {
		case OpPut, OpDelete:
			s.scratch = appendPrefix(s.scratch[:0], o.Key)
			v, err := s.newest(s.scratch)
			if err != nil {
				return false, err
			}
			c := change{key: o.Key, value: o.Value, revision: next, previous: v.mod}
			if o.Kind == OpPut {
				c.now = version{create: v.create, mod: next, number: v.number + 1}
				if !v.live() {
					c.now.create = next
				}
			} else if c.deleted = true; !v.live() {
				continue
			}
			s.changes = append(s.changes, c)
		case OpDeleteRange:
			err := s.scan(o.Key, o.End, func(prefix []byte, v version) (bool, error) {
				key, err := appendUserKey(nil, prefix)
				s.changes = append(s.changes, change{deleted: true, key: key, revision: next, previous: v.mod})
				return len(s.changes)-first <= s.mostChanges, err
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

// write adds the changes of the revision that s.revision now is to the batch.
func (s *stage) write(changes []change) error {
	s.chunk = s.chunk[:0]
	chunkFirst := 0
	for i := range changes {
		c := &changes[i]
		if err := s.writeVersion(c); err != nil {
			return err
		}
		if len(s.chunk) > chunkBytes {
			if err := s.batch.Set(changesKey(s.revision, chunkFirst), s.chunk, nil); err != nil {
				return err
			}
			s.chunk, chunkFirst = s.chunk[:0], i
		}
		s.chunk = appendChange(s.chunk, c)
		switch {
		case c.deleted:
			s.keys--
		case c.previous == 0:
			s.keys++
		}
	}
	return s.batch.Set(changesKey(s.revision, chunkFirst), s.chunk, nil)
}

func (s *stage) writeVersion(c *change) error {
	var header [maxVersionHeader]byte
	head := header[:0]
	if c.deleted {
		head = append(head, recordTombstone)
	} else {
		head = appendVersionHeader(head, c.now)
	}
	op := s.batch.SetDeferred(prefixLen(c.key)+revisionBytes, len(head)+len(c.value))
	appendVersionKey(op.Key[:0], c.key, c.revision)
	copy(op.Value[copy(op.Value, head):], c.value)
	if s.more {
		s.pending.put(op.Key[:len(op.Key)-revisionBytes], c.now)
	}
	return op.Finish()
}

// commit adds state and ids to the batch and gives it to Pebble.
func (s *stage) commit() error {
	if err := s.proposals.save(s.batch); err != nil {
		return err
	}
	s.state.proposals = s.proposals.next
	s.scratch = appendState(s.scratch[:0], s.state)
	if err := s.batch.Set([]byte{tableState}, s.scratch, nil); err != nil {
		return err
	}
	const entryBytes = 160 // more than a memtable adds to an entry
	s.unflushed += s.batch.Len() + entryBytes*int(s.batch.Count())
	return s.batch.Commit(pebble.NoSync)
}

// flushEarly flushes before the smallest memtable is full, so that Pebble never does it by itself.
func (s *stage) flushEarly() error {
	const soon = 96 << 10
	if s.unflushed < soon {
		return nil
	}
	s.unflushed = 0
	return s.db.Flush()
}
