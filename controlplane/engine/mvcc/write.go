package mvcc

import (
	"errors"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// write adds changes, which all belong to the current revision s.revision, to the batch.
func (s *applier) write(changes []change) error {
	for i := range changes {
		c := &changes[i]
		if err := s.logChange(c, i); err != nil {
			return err
		}
		s.countChange(c)
		if err := s.updateAttachment(c); err != nil {
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

// countChange updates the number of live keys and the logical sizes after the change c.
func (s *applier) countChange(c *change) {
	if c.before.Live() {
		s.keys--
		// A state of format 1 has no sizes, so s.live may be too small: do not let it become negative.
		s.live = max(s.live-storedBytes(c.key, c.before), 0)
	}
	if !c.deleted {
		s.keys++
		s.live += storedBytes(c.key, c.after)
	}
	if !c.superseded {
		s.written += storedBytes(c.key, c.after)
	}
}

// updateAttachment updates the stored attachments of c's key to leases: it removes the one to the old lease and adds
// the one to the new lease.
func (s *applier) updateAttachment(c *change) error {
	if c.before.Lease == c.after.Lease {
		return nil
	}
	if c.before.Lease != 0 && !(c.deleted && mutant.On(mutant.KeepAttachment)) {
		if err := s.batch.Delete(attachmentKey(c.before.Lease, c.key), nil); err != nil {
			return err
		}
	}
	if c.after.Lease == 0 {
		return nil
	}
	return s.batch.Set(attachmentKey(c.after.Lease, c.key), nil, nil)
}

// logChange adds c to the change log. The parameter place is the position of c among the changes of its revision.
func (s *applier) logChange(c *change, place int) error {
	l := &s.chunk
	if len(l.data) > chunkBytes {
		if err := s.writeChunk(); err != nil {
			return err
		}
	}
	if len(l.data) == 0 {
		l.revision, l.ordinal = c.revision, place
		l.data = appendChange(l.data, c, false)
	} else {
		l.data = appendChange(l.data, c, c.revision != l.lastRevision)
	}
	l.lastRevision = c.revision
	return nil
}

// writeChunk adds the current chunk of the change log to the batch and begins another one.
func (s *applier) writeChunk() error {
	l := &s.chunk
	if len(l.data) == 0 {
		return nil
	}
	err := s.batch.Set(changesKey(l.revision, l.ordinal), l.data, nil)
	if l.data = l.data[:0]; cap(l.data) > 4*chunkBytes {
		l.data = nil
	}
	return err
}

// writeVersion adds the version that c creates to the batch, or a tombstone for a delete.
func (s *applier) writeVersion(c *change) error {
	var header [maxVersionHeader]byte
	head := header[:0]
	if c.deleted {
		head = append(head, recordTombstone)
	} else {
		head = appendVersionHeader(head, c.after)
	}
	op := s.batch.SetDeferred(prefixLen(c.key)+revisionBytes, len(head)+len(c.value))
	appendVersionKey(op.Key[:0], c.key, c.revision)
	copy(op.Value[copy(op.Value, head):], c.value)
	if s.moreCommands {
		s.batchOverlay.put(overlayEntry{key: c.key, keyState: keyState{Meta: c.after, value: c.value}})
	}
	return op.Finish()
}

// commit adds the change log, proposal IDs and state to the batch, and commits it.
func (s *applier) commit() error {
	if err := s.writeChunk(); err != nil {
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
	const entryBytes = 160 // upper limit of the bytes that a memtable needs for an entry besides its data
	s.unflushed += s.batch.Len() + entryBytes*int(s.batch.Count())
	began := time.Now()
	if err := s.batch.Commit(pebble.NoSync); err != nil {
		return err
	}
	if s.onCommit != nil {
		s.onCommit(time.Since(began))
	}
	return nil
}

// flushEarly flushes the memtable before it is full, even if it has the smallest size that Pebble uses. So Pebble never
// flushes in the background.
func (s *applier) flushEarly() error {
	const soon = 96 << 10
	if s.unflushed < soon {
		return nil
	}
	s.unflushed = 0
	return s.db.Flush()
}
