package mvcc

import (
	"bytes"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// lookup returns the newest version of key. It sees the writes of earlier commands of the batch and, if own is true,
// those of earlier steps of the program. If value is false, the result may lack the value.
func (s *applier) lookup(key []byte, own, value bool) (keyState, error) {
	if e := s.pendingEntry(key, own); e != nil {
		return e.keyState, nil
	}
	if s.index != nil {
		m, ok := s.index.Find(key)
		if !ok {
			return keyState{}, nil
		}
		if !value && !m.Partial() {
			return keyState{Meta: m.Meta()}, nil
		}
	}
	it, err := s.keyIterator()
	if err != nil {
		return keyState{}, err
	}
	s.scratch = appendPrefix(s.scratch[:0], key)
	if !it.SeekPrefixGE(s.scratch) {
		return keyState{}, it.Error()
	}
	_, h, err := decodeAt(it)
	return h, err
}

// pendingEntry returns the pending write of key, or nil if there is none. If own is true, it searches the overlay of
// the program first, then that of the batch; otherwise only that of the batch.
func (s *applier) pendingEntry(key []byte, own bool) *overlayEntry {
	if own {
		if e := s.programOverlay.find(key); e != nil {
			return e
		}
	}
	return s.batchOverlay.find(key)
}

// scan calls visit for each live key of [key, end), in order, until visit returns false or an error. If own is true, it
// includes the writes of earlier steps of the program. visit must not use its arguments after it has returned.
func (s *applier) scan(key, end []byte, own bool, visit func(key []byte, h keyState) (bool, error)) error {
	lower, upper := encodedBounds(key, end)
	it, err := s.keyIterator()
	if err != nil {
		return err
	}
	merge := overlayIterator{s: s, batch: s.batchOverlay.between(key, end)}
	if own {
		merge.program = s.programOverlay.between(key, end)
	}
	stored := it.SeekGE(lower)
	for {
		var k []byte
		var h keyState
		if stored = stored && bytes.Compare(it.Key(), upper) < 0; stored {
			prefix, at, err := decodeAt(it)
			if err != nil {
				return err
			}
			if k, err = s.userKey(prefix); err != nil {
				return err
			}
			h = at
		}
		over := merge.peek()
		order := -1 // result of bytes.Compare for the stored key and the overlay's
		switch {
		case !stored && over == nil:
			return it.Error()
		case !stored:
			order = 1
		case over != nil:
			order = bytes.Compare(k, over.key)
		}
		if order >= 0 {
			k, h = over.key, over.keyState
			merge.next(k)
		}
		if h.Live() {
			if on, err := visit(k, h); err != nil || !on {
				return err
			}
		}
		if order <= 0 {
			stored = it.NextPrefix()
		}
	}
}

// overlayIterator merges the overlays of the program and of the batch in key order. If both have an entry of a key, it
// returns only that of the program.
type overlayIterator struct {
	s              *applier
	program, batch []uint32
}

// peek returns the entry with the lowest key, or nil at the end.
func (m *overlayIterator) peek() *overlayEntry {
	var a, b *overlayEntry
	if len(m.program) > 0 {
		a = &m.s.programOverlay.entries[m.program[0]]
	}
	if len(m.batch) > 0 {
		b = &m.s.batchOverlay.entries[m.batch[0]]
	}
	if a == nil || b != nil && bytes.Compare(b.key, a.key) < 0 {
		return b
	}
	return a
}

// next skips the entries of key.
func (m *overlayIterator) next(key []byte) {
	if len(m.program) > 0 && bytes.Equal(m.s.programOverlay.entries[m.program[0]].key, key) {
		m.program = m.program[1:]
	}
	if len(m.batch) > 0 && bytes.Equal(m.s.batchOverlay.entries[m.batch[0]].key, key) {
		m.batch = m.batch[1:]
	}
}

// userKey returns the key that prefix encodes. The key may alias prefix, and is valid until the next call.
func (s *applier) userKey(prefix []byte) (key []byte, err error) {
	if n := len(prefix); n >= 3 && bytes.IndexByte(prefix[1:n-2], escapeByte) < 0 {
		return prefix[1 : n-2], nil
	}
	s.key, err = appendUserKey(s.key[:0], prefix)
	return s.key, err
}

// decodeAt decodes the version at the current position of it. The results are valid until it moves.
func decodeAt(it *pebble.Iterator) (prefix []byte, h keyState, err error) {
	prefix, mod, err := splitVersion(it.Key())
	if err != nil {
		return nil, keyState{}, err
	}
	b, err := it.ValueAndErr()
	if err != nil {
		return nil, keyState{}, err
	}
	h.Meta, h.value, err = decodeVersion(b, mod)
	return prefix, h, err
}

// keyIterator returns the iterator over the stored keys, and opens it if needed.
func (s *applier) keyIterator() (*pebble.Iterator, error) {
	if s.iter == nil {
		it, err := s.db.NewIter(&pebble.IterOptions{
			LowerBound: []byte{tableKeys}, UpperBound: []byte{tableKeys + 1}, UseL6Filters: true,
		})
		if err != nil {
			return nil, err
		}
		s.iter = it
	}
	return s.iter, nil
}

// closeIterator closes the iterator over the stored keys.
func (s *applier) closeIterator() error {
	if s.iter == nil {
		return nil
	}
	err := s.iter.Close()
	s.iter = nil
	return err
}

// readRange reads the range of a StepRange. Without o.Revision, it includes the writes of earlier commands and steps.
// Otherwise it reads at that revision, which must be in Pebble. If the batch changed keys of the range, a read in
// reverse order first scans the whole range, since scan goes only forward.
func (s *applier) readRange(o RangeOptions) (RangeResult, error) {
	past := o.Revision != 0 && o.Revision <= s.batchRevision
	if past || len(s.programOverlay.between(o.Key, o.End)) == 0 && len(s.batchOverlay.between(o.Key, o.End)) == 0 {
		if past {
			return readRange(s.db, nil, o, o.Revision)
		}
		return readRange(s.db, s.index, o, s.batchRevision)
	}
	if command.EmptyRange(o.Key, o.End) {
		return RangeResult{}, nil
	}
	c := collector{o: &o}
	if !o.Reverse {
		err := s.scan(o.Key, o.End, true, func(key []byte, h keyState) (bool, error) { return c.add(key, h), nil })
		return c.res, err
	}
	var keys [][]byte
	err := s.scan(o.Key, o.End, true, func(key []byte, _ keyState) (bool, error) {
		keys = append(keys, bytes.Clone(key))
		return true, nil
	})
	for i := len(keys) - 1; i >= 0 && err == nil; i-- {
		var h keyState
		if h, err = s.lookup(keys[i], true, true); err == nil && !c.add(keys[i], h) {
			break
		}
	}
	return c.res, err
}
