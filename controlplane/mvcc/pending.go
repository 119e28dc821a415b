package mvcc

import "slices"

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
