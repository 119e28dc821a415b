package keyindex

import (
	"bytes"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Index maps each live key to the Entry of its newest version, in key order: a B-tree in which each node stores the
// number of keys below it and their highest mod revision. The zero Index is empty. See the package comment for copies.
type Index struct {
	root  child
	epoch uint64
}

// nodeKeys is the maximum number of keys in a leaf, and of children in an inner node.
const nodeKeys = 32

// child is a reference to a node, with the number of keys below the node and their highest mod revision. All keys below
// the node are equal to or after the key in the field low.
type child struct {
	low    string
	leaf   *leaf // either leaf or inner is set; neither in an empty tree
	inner  *inner
	count  int64
	maxMod int64 // highest mod revision of the keys below
}

// leaf holds up to nodeKeys keys and their entries, in order.
type leaf struct {
	epoch    uint64 // Index.epoch in which entries may be changed in place
	keyEpoch uint64 // Index.epoch in which keys and ends may be changed in place
	keys     []byte
	ends     []uint32 // end of each key in keys, as an offset
	entries  []Entry
}

// inner is a node whose children are nodes.
type inner struct {
	epoch    uint64
	children []child
}

// Freeze makes all existing copies of *t immutable: before t changes a node that it shares with a copy, it copies the
// node.
func (t *Index) Freeze() { t.epoch++ }

// Find returns the entry of key; ok is false when key is not live.
func (t *Index) Find(key []byte) (m Entry, ok bool) {
	c := &t.root
	for c.inner != nil {
		c = &c.inner.children[c.inner.search(key)]
	}
	if c.leaf == nil {
		return Entry{}, false
	}
	i, ok := c.leaf.search(key)
	if !ok {
		return Entry{}, false
	}
	return c.leaf.entries[i], true
}

// Count returns the number of keys in [key, end), written as in package command, and their highest mod revision.
func (t *Index) Count(key, end []byte) (count, newest int64) {
	switch {
	case len(end) == 0:
		if m, ok := t.Find(key); ok {
			return 1, m.ModRevision()
		}
		return 0, 0
	case command.IsFromKey(end):
		end = nil
	case bytes.Compare(key, end) >= 0:
		return 0, 0
	}
	return t.root.countRange(key, end)
}

// countRange returns the number of keys below c that are in [key, end), and their highest mod revision. If key is nil,
// the range begins at the first key. If end is nil, it has no upper bound.
func (c *child) countRange(key, end []byte) (count, newest int64) {
	switch {
	case key == nil && end == nil:
		return c.count, c.maxMod
	case c.leaf != nil:
		return c.leaf.countRange(key, end)
	case c.inner == nil:
		return 0, 0
	}
	from, to := 0, len(c.inner.children)-1
	if key != nil {
		from = c.inner.search(key)
	}
	if end != nil {
		to = c.inner.search(end)
	}
	for i := from; i <= to; i++ {
		k, e := key, end
		if i > from {
			k = nil
		}
		if i < to {
			e = nil
		}
		n, m := c.inner.children[i].countRange(k, e)
		count, newest = count+n, max(newest, m)
	}
	return count, newest
}

// countRange returns the same as child.countRange, for the keys in the leaf l.
func (l *leaf) countRange(key, end []byte) (count, newest int64) {
	from, to := 0, len(l.entries)
	if key != nil {
		from, _ = l.search(key)
	}
	if end != nil {
		to, _ = l.search(end)
	}
	for i := from; i < to; i++ {
		newest = max(newest, l.entries[i].ModRevision())
	}
	return int64(max(to-from, 0)), newest
}

// key returns the i-th key; it aliases l.keys.
func (l *leaf) key(i int) []byte {
	from := uint32(0)
	if i > 0 {
		from = l.ends[i-1]
	}
	return l.keys[from:l.ends[i]]
}

// search returns the position of key in l, or, if it is not found, the position where it has to be inserted.
func (l *leaf) search(key []byte) (at int, found bool) {
	from, to := 0, len(l.ends)
	for from < to {
		i := (from + to) / 2
		switch order := bytes.Compare(l.key(i), key); {
		case order == 0:
			return i, true
		case order < 0:
			from = i + 1
		default:
			to = i
		}
	}
	return from, false
}

// search returns the index in n.children of the child whose range contains key.
func (n *inner) search(key []byte) int {
	from, to := 1, len(n.children)
	for from < to {
		i := (from + to) / 2
		if n.children[i].low <= string(key) {
			from = i + 1
		} else {
			to = i
		}
	}
	return from - 1
}

// Set stores the entry m for key.
func (t *Index) Set(key []byte, m Entry) {
	if t.root.leaf == nil && t.root.inner == nil {
		t.root.leaf = &leaf{epoch: t.epoch, keyEpoch: t.epoch}
	}
	if right, split := t.setIn(&t.root, key, m); split {
		left := t.root
		n := &inner{epoch: t.epoch, children: append(make([]child, 0, nodeKeys), left, right)}
		t.root = child{inner: n}
		t.root.sum()
	}
}

// setIn stores the entry m for key below c. If c then has too many keys or children, it moves the last ones into the new
// child right, which the caller must insert after c.
func (t *Index) setIn(c *child, key []byte, m Entry) (right child, split bool) {
	if c.inner == nil {
		l := t.write(c)
		at, found := l.search(key)
		if found {
			l.entries[at] = m
		} else {
			l.insert(t.epoch, at, key, m)
			c.count++
		}
		c.maxMod = max(c.maxMod, m.ModRevision())
		if len(l.entries) <= nodeKeys {
			return child{}, false
		}
		return l.split(t.epoch, c, at), true
	}
	n := t.writeInner(c)
	i := n.search(key)
	before := n.children[i].count
	right, split = t.setIn(&n.children[i], key, m)
	c.count += n.children[i].count - before
	c.maxMod = max(c.maxMod, m.ModRevision())
	if !split {
		return child{}, false
	}
	c.count += right.count
	n.children = slices.Insert(n.children, i+1, right)
	if len(n.children) <= nodeKeys {
		return child{}, false
	}
	half := len(n.children) / 2
	if i == len(n.children)-2 {
		half = len(n.children) - 1 // keys inserted in order leave full nodes behind
	}
	right = child{low: n.children[half].low, inner: &inner{epoch: t.epoch, children: slices.Clone(n.children[half:])}}
	n.children = slices.Clone(n.children[:half])
	right.sum()
	c.sum()
	return right, true
}

// write returns c's leaf, whose entries the caller may change. If a snapshot shares the leaf, write first replaces it
// by a copy.
func (t *Index) write(c *child) *leaf {
	if c.leaf.epoch != t.epoch {
		l := *c.leaf
		l.epoch, l.entries = t.epoch, slices.Clone(l.entries)
		c.leaf = &l
	}
	return c.leaf
}

// writeInner returns c's inner node, which the caller may change. If a snapshot shares the node, writeInner first
// replaces it by a copy.
func (t *Index) writeInner(c *child) *inner {
	if c.inner.epoch != t.epoch {
		c.inner = &inner{epoch: t.epoch, children: slices.Clone(c.inner.children)}
	}
	return c.inner
}

// writeKeys makes l.keys and l.ends changeable. If a snapshot shares them, it replaces them by copies. The parameter
// more is the number of bytes of keys for which the copies have room in addition.
func (l *leaf) writeKeys(epoch uint64, more int) {
	if l.keyEpoch != epoch {
		l.keyEpoch = epoch
		l.keys = append(make([]byte, 0, len(l.keys)+more), l.keys...)
		l.ends = append(make([]uint32, 0, len(l.ends)+1), l.ends...)
	}
}

// insert inserts key with entry m at position at.
func (l *leaf) insert(epoch uint64, at int, key []byte, m Entry) {
	l.writeKeys(epoch, len(key))
	from := uint32(0)
	if at > 0 {
		from = l.ends[at-1]
	}
	l.keys = slices.Insert(l.keys, int(from), key...)
	l.ends = slices.Insert(l.ends, at, from)
	for i := at; i < len(l.ends); i++ {
		l.ends[i] += uint32(len(key))
	}
	l.entries = slices.Insert(l.entries, at, m)
}

// split moves the upper part of c's leaf into a new child. The parameter at is the position of the last insert: after
// an insert at the end, only the new key is moved.
func (l *leaf) split(epoch uint64, c *child, at int) child {
	half := len(l.entries) / 2
	if at == len(l.entries)-1 {
		half = at
	}
	cut := l.ends[half-1]
	r := &leaf{
		epoch: epoch, keyEpoch: epoch,
		keys: slices.Clone(l.keys[cut:]), ends: slices.Clone(l.ends[half:]), entries: slices.Clone(l.entries[half:]),
	}
	for i := range r.ends {
		r.ends[i] -= cut
	}
	right := child{low: separator(l.key(half-1), r.key(0)), leaf: r}
	l.keys, l.ends, l.entries = slices.Clone(l.keys[:cut]), slices.Clone(l.ends[:half]), slices.Clone(l.entries[:half])
	right.sum()
	c.sum()
	return right
}

// separator returns a short key that is after a and not after b.
func separator(a, b []byte) string {
	n := 0
	for n < len(a) && n < len(b)-1 && a[n] == b[n] {
		n++
	}
	return string(b[:n+1])
}

// Remove removes key.
func (t *Index) Remove(key []byte) {
	if _, ok := t.Find(key); !ok {
		return
	}
	t.removeIn(&t.root, key)
	for t.root.inner != nil && len(t.root.inner.children) == 1 {
		t.root = t.root.inner.children[0]
	}
	if t.root.count == 0 {
		t.root = child{}
	}
}

// removeIn removes key, which must exist, from the nodes below c, and joins neighbouring nodes that have become small.
func (t *Index) removeIn(c *child, key []byte) {
	if c.inner == nil {
		l := t.write(c)
		at, _ := l.search(key)
		l.writeKeys(t.epoch, 0)
		from, size := l.ends[at]-uint32(len(l.key(at))), uint32(len(l.key(at)))
		l.keys = slices.Delete(l.keys, int(from), int(from+size))
		l.ends = slices.Delete(l.ends, at, at+1)
		for i := at; i < len(l.ends); i++ {
			l.ends[i] -= size
		}
		l.entries = slices.Delete(l.entries, at, at+1)
		c.sum()
		return
	}
	n := t.writeInner(c)
	i := n.search(key)
	t.removeIn(&n.children[i], key)
	switch {
	case n.children[i].count == 0:
		// If the first child is removed, the second one takes over its range of keys.
		if i == 0 && len(n.children) > 1 {
			n.children[1].low = n.children[0].low
		}
		n.children = slices.Delete(n.children, i, i+1)
	case i > 0 && n.children[i-1].size()+n.children[i].size() <= nodeKeys/2:
		t.join(n, i-1)
	case i < len(n.children)-1 && n.children[i].size()+n.children[i+1].size() <= nodeKeys/2:
		t.join(n, i)
	}
	c.sum()
}

// size returns the number of entries or children in c's own node.
func (c *child) size() int {
	if c.leaf != nil {
		return len(c.leaf.entries)
	}
	return len(c.inner.children)
}

// join merges the i-th child of n with the next one.
func (t *Index) join(n *inner, i int) {
	a, b := &n.children[i], &n.children[i+1]
	if a.leaf != nil {
		l := &leaf{
			epoch: t.epoch, keyEpoch: t.epoch,
			keys: slices.Concat(a.leaf.keys, b.leaf.keys), ends: slices.Concat(a.leaf.ends, b.leaf.ends),
			entries: slices.Concat(a.leaf.entries, b.leaf.entries),
		}
		for j := len(a.leaf.ends); j < len(l.ends); j++ {
			l.ends[j] += uint32(len(a.leaf.keys))
		}
		a.leaf = l
	} else {
		a.inner = &inner{epoch: t.epoch, children: slices.Concat(a.inner.children, b.inner.children)}
	}
	a.sum()
	n.children = slices.Delete(n.children, i+1, i+2)
}

// sum computes c.count and c.maxMod from c's node.
func (c *child) sum() {
	c.count, c.maxMod = 0, 0
	if c.leaf != nil {
		c.count = int64(len(c.leaf.entries))
		for i := range c.leaf.entries {
			c.maxMod = max(c.maxMod, c.leaf.entries[i].ModRevision())
		}
		return
	}
	for i := range c.inner.children {
		c.count += c.inner.children[i].count
		c.maxMod = max(c.maxMod, c.inner.children[i].maxMod)
	}
}
