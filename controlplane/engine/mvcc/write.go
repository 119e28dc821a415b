package mvcc

import (
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// write adds the changes of the revision that s.revision now is to the batch.
func (s *stage) write(changes []change) error {
	for i := range changes {
		c := &changes[i]
		if err := s.enlist(c, i); err != nil {
			return err
		}
		s.tally(c)
		if err := s.attach(c); err != nil {
			return err
		}
		if c.superseded {
			continue
		}
		if err := s.writeVersion(c); err != nil {
			return err
		}
	}
	return nil
}

// tally counts keys and sizes.
func (s *stage) tally(c *change) {
	if c.before.live() {
		s.keys--
		// Not below 0: what a state of format 1 held was not counted.
		s.live = max(s.live-c.before.stored(c.key), 0)
	}
	if !c.deleted {
		s.keys++
		s.live += c.now.stored(c.key)
	}
	if !c.superseded {
		s.written += c.now.stored(c.key)
	}
}

// attach makes the key one of its lease's.
func (s *stage) attach(c *change) error {
	if c.before.lease == c.now.lease {
		return nil
	}
	if c.before.lease != 0 && !(c.deleted && mutant.On(mutant.KeepAttachment)) {
		if err := s.batch.Delete(attachedKey(c.before.lease, c.key), nil); err != nil {
			return err
		}
	}
	if c.now.lease == 0 {
		return nil
	}
	return s.batch.Set(attachedKey(c.now.lease, c.key), nil, nil)
}

// enlist adds a change, the place-th of its revision, to the list of changes.
func (s *stage) enlist(c *change, place int) error {
	l := &s.list
	if len(l.chunk) > chunkBytes {
		if err := s.writeList(); err != nil {
			return err
		}
	}
	if len(l.chunk) == 0 {
		l.revision, l.place = c.revision, place
		l.chunk = appendChange(l.chunk, c, false)
	} else {
		l.chunk = appendChange(l.chunk, c, c.revision != l.last)
	}
	l.last = c.revision
	return nil
}

// writeList adds the list to the batch and begins another.
func (s *stage) writeList() error {
	l := &s.list
	if len(l.chunk) == 0 {
		return nil
	}
	err := s.batch.Set(changesKey(l.revision, l.place), l.chunk, nil)
	if l.chunk = l.chunk[:0]; cap(l.chunk) > 4*chunkBytes {
		l.chunk = nil
	}
	return err
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
		s.pending.put(overlaid{key: c.key, held: held{version: c.now, value: c.value}})
	}
	return op.Finish()
}

// commit adds lists, ids and state to the batch and gives it to Pebble.
func (s *stage) commit() error {
	if err := s.writeList(); err != nil {
		return err
	}
	if err := s.proposals.save(s.batch); err != nil {
		return err
	}
	s.state.proposals = s.proposals.next
	s.scratch = appendState(s.scratch[:0], s.state)
	var err error
	if mutant.On(mutant.SplitAppliedIndex) {
		err = errors.Join(s.db.Set([]byte{tableState}, s.scratch, pebble.NoSync), s.db.Flush())
	} else {
		err = s.batch.Set([]byte{tableState}, s.scratch, nil)
	}
	if err != nil {
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
