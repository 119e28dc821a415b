package mvcc

import (
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/keyindex"
)

// Holds reports whether all guards hold at the snapshot's revision. It uses only the key index. If the engine has no
// key index, or has not built it yet, known is false, and the caller must read the keys to find out.
func (s *Snapshot) Holds(guards []command.Guard) (hold, known bool) {
	if s.err != nil || s.closed.Load() || s.index == nil {
		return false, false
	}
	for i := range guards {
		if !guardHolds(s.index, &guards[i]) {
			return false, true
		}
	}
	return true, true
}

// guardHolds reports whether the guard g holds for the keys in the index t.
func guardHolds(t *keyindex.Index, g *command.Guard) bool {
	count, maxMod := t.Count(g.Key, g.End)
	return maxMod == g.ModRevision && (len(g.End) == 0 || count == g.Count)
}
