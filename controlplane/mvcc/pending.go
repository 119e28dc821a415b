package mvcc

import (
	"bytes"
	"slices"

	"github.com/cockroachdb/pebble/v2"
)

// newest returns the newest version of the key with prefix, as the commands so far left it.
func (s *stage) newest(prefix []byte) (version, error) {
	if v, ok := s.pending.find(prefix); ok {
		return v, nil
	}
	it, err := s.reads()
	if err != nil {
		return version{}, err
	}
	if !it.SeekPrefixGE(prefix) {
		return version{}, it.Error()
	}
	_, v, err := versionAt(it)
	return v, err
}

// scan calls visit for the newest version of each live key of [key, end), in order, as the commands so far left them,
// until it returns false. The prefix is only lent.
func (s *stage) scan(key, end []byte, visit func(prefix []byte, v version) (bool, error)) error {
	lower, upper := encodedBounds(key, end)
	it, err := s.reads()
	if err != nil {
		return err
	}
	pending := s.pending.between(lower, upper)
	stored := it.SeekGE(lower)
	for {
		var prefix []byte
		var v version
		if stored = stored && bytes.Compare(it.Key(), upper) < 0; stored {
			if prefix, v, err = versionAt(it); err != nil {
				return err
			}
		}
		order := -1 // of the stored key to the pending one
		switch {
		case !stored && len(pending) == 0:
			return it.Error()
		case !stored:
			order = 1
		case len(pending) > 0 && string(prefix) == pending[0]:
			order = 0
		case len(pending) > 0 && string(prefix) > pending[0]:
			order = 1
		}
		if order >= 0 {
			prefix, v = []byte(pending[0]), s.pending.byPrefix[pending[0]]
			pending = pending[1:]
		}
		if v.live() {
			if on, err := visit(prefix, v); err != nil || !on {
				return err
			}
		}
		if order <= 0 {
			stored = it.NextPrefix()
		}
	}
}

// versionAt decodes the version that it stands at. The prefix is only lent.
func versionAt(it *pebble.Iterator) (prefix []byte, v version, err error) {
	prefix, mod, err := splitVersion(it.Key())
	if err != nil {
		return nil, version{}, err
	}
	value, err := it.ValueAndErr()
	if err != nil {
		return nil, version{}, err
	}
	v, _, err = decodeVersion(value, mod)
	return prefix, v, err
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

// pendingVersions are the versions that the commands of a batch wrote, for those after them.
type pendingVersions struct {
	byPrefix map[string]version
	sorted   []string
	unsorted []string
}

func (p *pendingVersions) clear() {
	if len(p.byPrefix) > bufferedItems {
		*p = pendingVersions{}
	}
	clear(p.byPrefix)
	clear(p.sorted)
	clear(p.unsorted)
	p.sorted, p.unsorted = p.sorted[:0], p.unsorted[:0]
}

func (p *pendingVersions) find(prefix []byte) (version, bool) {
	v, ok := p.byPrefix[string(prefix)]
	return v, ok
}

func (p *pendingVersions) put(prefix []byte, v version) {
	if p.byPrefix == nil {
		p.byPrefix = map[string]version{}
	}
	if _, known := p.byPrefix[string(prefix)]; known {
		p.byPrefix[string(prefix)] = v
		return
	}
	name := string(prefix)
	p.byPrefix[name] = v
	p.unsorted = append(p.unsorted, name)
}

// between returns the prefixes of [lower, upper) in order, valid until the next put.
func (p *pendingVersions) between(lower, upper []byte) []string {
	if len(p.unsorted) > len(p.sorted)/8 {
		p.sorted = append(p.sorted, p.unsorted...)
		slices.Sort(p.sorted)
	} else {
		for _, name := range p.unsorted {
			at, _ := slices.BinarySearch(p.sorted, name)
			p.sorted = slices.Insert(p.sorted, at, name)
		}
	}
	p.unsorted = p.unsorted[:0]
	from, _ := slices.BinarySearch(p.sorted, string(lower))
	to, _ := slices.BinarySearch(p.sorted, string(upper))
	return p.sorted[from:max(from, to)]
}
