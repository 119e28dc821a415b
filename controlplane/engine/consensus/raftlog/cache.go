package raftlog

import (
	"sort"

	"go.etcd.io/raft/v3/raftpb"
)

// entryCache caches the newest entries of a log in memory, without a gap between them. Their size is at most limit
// bytes, but at least one entry is cached.
type entryCache struct {
	limit int
	bytes int
	ents  []*raftpb.Entry
}

// cost returns an estimate of the memory in bytes that an entry uses: its data plus entryOverhead.
func cost(ent *raftpb.Entry) int { return len(ent.Data) + entryOverhead }

// first returns the index of the oldest cached entry. If the cache is empty, it returns the largest uint64.
func (c *entryCache) first() uint64 {
	if len(c.ents) == 0 {
		return ^uint64(0)
	}
	return c.ents[0].GetIndex()
}

// entry returns the entry at index, nil if it is not in the cache.
func (c *entryCache) entry(index uint64) *raftpb.Entry {
	if first := c.first(); index < first || index-first >= uint64(len(c.ents)) {
		return nil
	}
	return c.ents[index-c.first()]
}

// append adds ent as the newest entry. If an entry with this index is cached, that entry and all later ones are removed
// first. If ent would not follow the newest cached entry directly, all cached entries are removed first.
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

// truncateTo removes all cached entries whose index is at most index.
func (c *entryCache) truncateTo(index uint64) {
	for len(c.ents) > 0 && c.first() <= index {
		c.drop()
	}
}

func (c *entryCache) clear() { c.ents, c.bytes = nil, 0 }

// markEvery is the number of log bytes between two elements of sizeMarks.marks.
const markEvery = 64 << 10

// sizeMarks estimates how many bytes of a log follow a given index. The error is at most markEvery bytes. It needs 16
// bytes of memory per 64 KiB of log.
type sizeMarks struct {
	total uint64 // bytes of all entries added, without those that truncateFrom subtracted
	base  uint64 // the part of total that is before the log's begin
	marks []sizeMark
}

// sizeMark records how many bytes of entries had been added to the log (sizeMarks.total) after the entry at index.
type sizeMark struct{ index, bytes uint64 }

func (s *sizeMarks) add(index uint64, bytes int) {
	s.total += uint64(bytes)
	if n := len(s.marks); n == 0 || s.total-s.marks[n-1].bytes >= markEvery {
		s.marks = append(s.marks, sizeMark{index, s.total})
	}
}

// truncateFrom subtracts the bytes of all entries whose index is at least index.
func (s *sizeMarks) truncateFrom(index uint64) {
	n := sort.Search(len(s.marks), func(i int) bool { return s.marks[i].index >= index })
	if n == len(s.marks) {
		return // there are less than markEvery bytes from index on
	}
	s.marks = s.marks[:n]
	s.total = s.base
	if n > 0 {
		s.total = s.marks[n-1].bytes
	}
}

// truncateTo subtracts the bytes of all entries whose index is at most index.
func (s *sizeMarks) truncateTo(index uint64) {
	n := sort.Search(len(s.marks), func(i int) bool { return s.marks[i].index > index })
	if n > 0 {
		s.base = s.marks[n-1].bytes
		s.marks = append(s.marks[:0], s.marks[n:]...)
	}
}

// bytes returns the estimated size of the log in bytes.
func (s *sizeMarks) bytes() uint64 { return s.total - s.base }

// tail returns an index after which the log has at most about the given number of bytes. It returns 0 if the entire log
// is not larger than that.
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
