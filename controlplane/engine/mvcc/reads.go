package mvcc

import (
	"bytes"

	"github.com/cockroachdb/pebble/v2"
)

// lookup returns what key holds, as the commands so far left it, or also the steps so far of the present program; without
// the value where that is not asked for and would have to be read.
func (s *stage) lookup(key []byte, own, value bool) (held, error) {
	if e := s.overlaid(key, own); e != nil {
		return e.held, nil
	}
	if s.index != nil {
		m, ok := s.index.find(key)
		if !ok {
			return held{}, nil
		}
		if !value && !m.partial() {
			return held{version: m.version()}, nil
		}
	}
	it, err := s.reads()
	if err != nil {
		return held{}, err
	}
	s.scratch = appendPrefix(s.scratch[:0], key)
	if !it.SeekPrefixGE(s.scratch) {
		return held{}, it.Error()
	}
	_, h, err := heldAt(it)
	return h, err
}

func (s *stage) overlaid(key []byte, own bool) *overlaid {
	if own {
		if e := s.own.find(key); e != nil {
			return e
		}
	}
	return s.pending.find(key)
}

// scan calls visit for each live key of [key, end), in order, until it returns false. The key and what it holds are only
// lent.
func (s *stage) scan(key, end []byte, own bool, visit func(key []byte, h held) (bool, error)) error {
	lower, upper := encodedBounds(key, end)
	it, err := s.reads()
	if err != nil {
		return err
	}
	merge := merged{s: s, pending: s.pending.between(key, end)}
	if own {
		merge.own = s.own.between(key, end)
	}
	stored := it.SeekGE(lower)
	for {
		var k []byte
		var h held
		if stored = stored && bytes.Compare(it.Key(), upper) < 0; stored {
			prefix, at, err := heldAt(it)
			if err != nil {
				return err
			}
			if k, err = s.userKey(prefix); err != nil {
				return err
			}
			h = at
		}
		over := merge.peek()
		order := -1 // of the stored key to the one laid over
		switch {
		case !stored && over == nil:
			return it.Error()
		case !stored:
			order = 1
		case over != nil:
			order = bytes.Compare(k, over.key)
		}
		if order >= 0 {
			k, h = over.key, over.held
			merge.next(k)
		}
		if h.live() {
			if on, err := visit(k, h); err != nil || !on {
				return err
			}
		}
		if order <= 0 {
			stored = it.NextPrefix()
		}
	}
}

// merged walks over what a program and the commands before it have laid over the stored keys.
type merged struct {
	s            *stage
	own, pending []uint32
}

func (m *merged) peek() *overlaid {
	var a, b *overlaid
	if len(m.own) > 0 {
		a = &m.s.own.entries[m.own[0]]
	}
	if len(m.pending) > 0 {
		b = &m.s.pending.entries[m.pending[0]]
	}
	if a == nil || b != nil && bytes.Compare(b.key, a.key) < 0 {
		return b
	}
	return a
}

// next goes past key.
func (m *merged) next(key []byte) {
	if len(m.own) > 0 && bytes.Equal(m.s.own.entries[m.own[0]].key, key) {
		m.own = m.own[1:]
	}
	if len(m.pending) > 0 && bytes.Equal(m.s.pending.entries[m.pending[0]].key, key) {
		m.pending = m.pending[1:]
	}
}

// userKey decodes a prefix. The key is only lent.
func (s *stage) userKey(prefix []byte) (key []byte, err error) {
	if n := len(prefix); n >= 3 && bytes.IndexByte(prefix[1:n-2], escapeByte) < 0 {
		return prefix[1 : n-2], nil
	}
	s.key, err = appendUserKey(s.key[:0], prefix)
	return s.key, err
}

// heldAt decodes what it stands at. The results are only lent.
func heldAt(it *pebble.Iterator) (prefix []byte, h held, err error) {
	prefix, mod, err := splitVersion(it.Key())
	if err != nil {
		return nil, held{}, err
	}
	b, err := it.ValueAndErr()
	if err != nil {
		return nil, held{}, err
	}
	h.version, h.value, err = decodeVersion(b, mod)
	return prefix, h, err
}

func (s *stage) reads() (*pebble.Iterator, error) {
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

func (s *stage) endReads() error {
	if s.iter == nil {
		return nil
	}
	err := s.iter.Close()
	s.iter = nil
	return err
}

// read is Range within a program: as the steps so far left the keys, or as they were at an older revision that the batch
// has not made. Backwards over keys that the batch changed it goes over the whole range.
func (s *stage) read(o RangeOptions) (RangeResult, error) {
	past := o.Revision != 0 && o.Revision <= s.batchRevision
	if past || len(s.own.between(o.Key, o.End)) == 0 && len(s.pending.between(o.Key, o.End)) == 0 {
		revision := o.Revision
		if !past {
			revision = s.batchRevision
		}
		return readRange(s.db, s.index.unless(past), o, revision)
	}
	if emptyRange(o.Key, o.End) {
		return RangeResult{}, nil
	}
	c := collector{o: &o}
	if !o.Reverse {
		err := s.scan(o.Key, o.End, true, func(key []byte, h held) (bool, error) { return c.add(key, h), nil })
		return c.res, err
	}
	var keys [][]byte
	err := s.scan(o.Key, o.End, true, func(key []byte, _ held) (bool, error) {
		keys = append(keys, bytes.Clone(key))
		return true, nil
	})
	for i := len(keys) - 1; i >= 0 && err == nil; i-- {
		var h held
		if h, err = s.lookup(keys[i], true, true); err == nil && !c.add(keys[i], h) {
			break
		}
	}
	return c.res, err
}
