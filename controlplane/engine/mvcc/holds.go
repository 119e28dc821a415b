package mvcc

// Holds reports whether all guards hold at the snapshot's revision, without reading a value. known is false if the engine
// keeps no index of its keys, or not yet: then only reading the keys can tell.
func (s *Snapshot) Holds(guards []Guard) (hold, known bool) {
	if s.err != nil || s.closed.Load() || s.index == nil {
		return false, false
	}
	for i := range guards {
		if !s.index.holds(&guards[i]) {
			return false, true
		}
	}
	return true, true
}

// holds reports whether g holds for the keys of the index.
func (t *index) holds(g *Guard) bool {
	count, newest := t.span(g.Key, g.End)
	return newest == g.ModRevision && (len(g.End) == 0 || count == g.Count)
}
