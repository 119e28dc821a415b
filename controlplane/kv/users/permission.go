package users

import (
	"bytes"
	"slices"
	"sort"
	"sync"

	"go.etcd.io/etcd/api/v3/authpb"
)

// span holds a range of keys, [begin, end). An empty end means that the range is unbounded.
type span struct{ begin, end []byte }

// spans holds disjoint, non-adjacent ranges in ascending order.
type spans []span

// isOpen reports whether end is {0}, which in requests means an unbounded range.
func isOpen(end []byte) bool { return len(end) == 1 && end[0] == 0 }

// spanOf returns the range of a permission or request with this key and end.
func spanOf(key, end []byte) span {
	switch {
	case len(end) == 0:
		return span{key, append(bytes.Clone(key), 0)}
	case isOpen(end):
		return span{key, nil}
	}
	return span{key, end}
}

// endBefore compares the ends of two ranges. It reports whether the end a is lower than the end b. An empty end is the
// highest.
func endBefore(a, b []byte) bool {
	return len(a) > 0 && (len(b) == 0 || bytes.Compare(a, b) < 0)
}

// mergeSpans sorts ranges, and merges those that overlap or adjoin.
func mergeSpans(all []span) spans {
	slices.SortFunc(all, func(a, b span) int { return bytes.Compare(a.begin, b.begin) })
	var merged spans
	for _, s := range all {
		last := len(merged) - 1
		if last < 0 || endBefore(merged[last].end, s.begin) {
			merged = append(merged, s)
		} else if endBefore(merged[last].end, s.end) {
			merged[last].end = s.end
		}
	}
	return merged
}

// contains reports whether one of the ranges ss contains the whole range s. If the end of s is not after its begin,
// contains reports whether both are inside the same range, as in etcd.
func (ss spans) contains(s span) bool {
	reversed := len(s.end) > 0 && bytes.Compare(s.begin, s.end) >= 0
	if reversed {
		i := sort.Search(len(ss), func(i int) bool { return bytes.Compare(ss[i].begin, s.end) >= 0 }) - 1
		return i >= 0 && endBefore(s.begin, ss[i].end)
	}
	i := sort.Search(len(ss), func(i int) bool { return bytes.Compare(ss[i].begin, s.begin) > 0 }) - 1
	return i >= 0 && !endBefore(ss[i].end, s.end)
}

// validPermission reports whether [key, end) is a valid range for a permission.
func validPermission(key, end []byte) bool {
	return len(key) > 0 && (len(end) == 0 || isOpen(end) || bytes.Compare(key, end) < 0)
}

// grants holds the key ranges that the roles of a user permit to read and to write. They are computed at the first use.
type grants struct {
	user  *authpb.User
	roles map[string]*authpb.Role

	once        sync.Once
	read, write spans
}

func (g *grants) merge() {
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
	g.read, g.write = mergeSpans(read), mergeSpans(write)
}

func (g *grants) mayRead(s span) bool {
	g.once.Do(g.merge)
	return g.read.contains(s)
}

func (g *grants) mayWrite(s span) bool {
	g.once.Do(g.merge)
	return g.write.contains(s)
}
