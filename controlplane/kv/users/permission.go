package users

import (
	"bytes"
	"slices"
	"sort"
	"sync"

	"go.etcd.io/etcd/api/v3/authpb"
)

// span is the keys of [begin, end); no end: all from begin on.
type span struct{ begin, end []byte }

// spans are disjoint, in order, and do not touch.
type spans []span

// isOpen says whether end is how requests write that a range has none.
func isOpen(end []byte) bool { return len(end) == 1 && end[0] == 0 }

// spanOf is what a permission, or a request, with this key and end is about.
func spanOf(key, end []byte) span {
	switch {
	case len(end) == 0:
		return span{key, append(bytes.Clone(key), 0)}
	case isOpen(end):
		return span{key, nil}
	}
	return span{key, end}
}

// before compares two ends, of which none is the highest.
func before(a, b []byte) bool {
	return len(a) > 0 && (len(b) == 0 || bytes.Compare(a, b) < 0)
}

// unite makes spans of any list of them.
func unite(all []span) spans {
	slices.SortFunc(all, func(a, b span) int { return bytes.Compare(a.begin, b.begin) })
	var united spans
	for _, s := range all {
		last := len(united) - 1
		if last < 0 || before(united[last].end, s.begin) {
			united = append(united, s)
		} else if before(united[last].end, s.end) {
			united[last].end = s.end
		}
	}
	return united
}

// cover says whether all of s is in one of the spans. Of a span whose end is not after its begin both must lie inside
// one, as in etcd.
func (ss spans) cover(s span) bool {
	backwards := len(s.end) > 0 && bytes.Compare(s.begin, s.end) >= 0
	if backwards {
		i := sort.Search(len(ss), func(i int) bool { return bytes.Compare(ss[i].begin, s.end) >= 0 }) - 1
		return i >= 0 && before(s.begin, ss[i].end)
	}
	i := sort.Search(len(ss), func(i int) bool { return bytes.Compare(ss[i].begin, s.begin) > 0 }) - 1
	return i >= 0 && !before(ss[i].end, s.end)
}

// validPermission says whether a role can be granted [key, end).
func validPermission(key, end []byte) bool {
	return len(key) > 0 && (len(end) == 0 || isOpen(end) || bytes.Compare(key, end) < 0)
}

// grants is what a user's roles come to, worked out when first asked.
type grants struct {
	user  *authpb.User
	roles map[string]*authpb.Role

	once        sync.Once
	read, write spans
}

func (g *grants) unite() {
	var read, write []span
	for _, name := range g.user.Roles {
		for _, p := range g.roles[name].GetKeyPermission() {
			s := spanOf(p.Key, p.RangeEnd)
			if p.PermType != authpb.Permission_WRITE {
				read = append(read, s)
			}
			if p.PermType != authpb.Permission_READ {
				write = append(write, s)
			}
		}
	}
	g.read, g.write = unite(read), unite(write)
}

func (g *grants) mayRead(s span) bool {
	g.once.Do(g.unite)
	return g.read.cover(s)
}

func (g *grants) mayWrite(s span) bool {
	g.once.Do(g.unite)
	return g.write.cover(s)
}
