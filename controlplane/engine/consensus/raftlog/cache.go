package raftlog

import (
	"sort"

	"go.etcd.io/raft/v3/raftpb"
)

// entryCache holds the newest entries of a log, without a gap, in about limit bytes, but at least one.
type entryCache struct {
	limit int
	bytes int
	ents  []*raftpb.Entry
}

// cost returns the bytes of an entry with overhead.
func cost(ent *raftpb.Entry) int { return len(ent.Data) + entryOverhead }

// first returns the index of the oldest cached entry, the largest uint64 if the cache is empty.
func (c *entryCache) first() uint64 {
	if len(c.ents) == 0 {
		return ^uint64(0)
	}
	return c.ents[0].GetIndex()
}

// entry returns a cached entry, nil if the entry is not in the cache.
func (c *entryCache) entry(index uint64) *raftpb.Entry {
	if first := c.first(); index < first || index-first >= uint64(len(c.ents)) {
		return nil
	}
	return c.ents[index-c.first()]
}

// append adds the entry after the newest one, or replaces a cached entry and drops all later ones.
func (c *entryCache) append(ent *raftpb.Entry) {
	index := ent.GetIndex()
	switch first := c.first(); {
	case len(c.ents) == 0:
	case index < first || index > first+uint64(len(c.ents)):
		c.clear()
	default:
		keep := index - first
		for _, old := range c.ents[keep:] {
			c.bytes -= cost(old)
		}
		c.ents = c.ents[:keep]
	}
	c.ents = append(c.ents, ent)
	c.bytes += cost(ent)
	for c.bytes > c.limit && len(c.ents) > 1 {
		c.drop()
	}
}

func (c *entryCache) drop() {
	c.bytes -= cost(c.ents[0])
	c.ents[0] = nil
	c.ents = c.ents[1:]
}

// truncateTo drops the entries up to index.
func (c *entryCache) truncateTo(index uint64) {
	for len(c.ents) > 0 && c.first() <= index {
		c.drop()
	}
}

func (c *entryCache) clear() { c.ents, c.bytes = nil, 0 }

// markEvery is the distance of two marks of sizeMarks in bytes.
const markEvery = 64 << 10

// sizeMarks estimates to within markEvery how many bytes of a log follow an index, with 16 bytes of memory per 64 KiB
// of log.
type sizeMarks struct {
	total uint64 // bytes ever added and not taken back
	base  uint64 // of those, bytes before the log begins
	marks []sizeMark
}

// sizeMark is the value of sizeMarks.total after the entry index.
type sizeMark struct{ index, bytes uint64 }

func (s *sizeMarks) add(index uint64, bytes int) {
	s.total += uint64(bytes)
	if n := len(s.marks); n == 0 || s.total-s.marks[n-1].bytes >= markEvery {
		s.marks = append(s.marks, sizeMark{index, s.total})
	}
}

// truncateFrom subtracts the entries from index on.
func (s *sizeMarks) truncateFrom(index uint64) {
	n := sort.Search(len(s.marks), func(i int) bool { return s.marks[i].index >= index })
	if n == len(s.marks) {
		return // less than a mark's worth
	}
	s.marks = s.marks[:n]
	s.total = s.base
	if n > 0 {
		s.total = s.marks[n-1].bytes
	}
}

// truncateTo subtracts the entries up to index.
func (s *sizeMarks) truncateTo(index uint64) {
	n := sort.Search(len(s.marks), func(i int) bool { return s.marks[i].index > index })
	if n > 0 {
		s.base = s.marks[n-1].bytes
		s.marks = append(s.marks[:0], s.marks[n:]...)
	}
}

// bytes returns the size of the log.
func (s *sizeMarks) bytes() uint64 { return s.total - s.base }

// tail returns an index after which at most about bytes bytes of the log follow, 0 if the whole log is smaller.
func (s *sizeMarks) tail(bytes uint64) uint64 {
	if s.bytes() <= bytes {
		return 0
	}
	n := sort.Search(len(s.marks), func(i int) bool { return s.total-s.marks[i].bytes <= bytes })
	if n == len(s.marks) {
		n--
	}
	if n < 0 {
		return 0
	}
	return s.marks[n].index
}
