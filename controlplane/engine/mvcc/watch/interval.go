package watch

// intervalTree finds the watchers of the ranges that contain a key in O(log n + matches). It is a treap ordered by
// start, then end, in which each node stores the furthest end below it. Its shape depends only on the order of calls,
// so that simulations replay exactly.
type intervalTree struct {
	root *intervalNode
	seed uint64
}

// intervalNode is one range [start, end) with its watchers. The end "" means no upper bound.
type intervalNode struct {
	start, end  string
	watchers    map[*Watcher]struct{}
	priority    uint64
	furthest    string
	left, right *intervalNode
}

// add registers w for the range [start, end).
func (t *intervalTree) add(start, end string, w *Watcher) {
	// The priority comes from splitmix64: it balances the tree and is the same in every run.
	t.seed += 0x9e3779b97f4a7c15
	z := (t.seed ^ t.seed>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	t.root = t.root.add(start, end, w, z^z>>31)
}

// remove unregisters w from the range [start, end).
func (t *intervalTree) remove(start, end string, w *Watcher) { t.root = t.root.remove(start, end, w) }

// stab calls visit for each watcher of a range that contains key.
func (t *intervalTree) stab(key []byte, visit func(*Watcher)) { t.root.stab(key, visit) }

// endsAfter reports whether a range that ends at a ends after one that ends at b. The end "" means no upper bound and
// is after all others.
func endsAfter(a, b string) bool { return b != "" && (a == "" || a > b) }

// before reports whether n sorts before the range [start, end).
func (n *intervalNode) before(start, end string) bool {
	return n.start < start || n.start == start && endsAfter(end, n.end)
}

// update sets n.furthest to the furthest end in n and its children, and returns n.
func (n *intervalNode) update() *intervalNode {
	n.furthest = n.end
	if n.left != nil && endsAfter(n.left.furthest, n.furthest) {
		n.furthest = n.left.furthest
	}
	if n.right != nil && endsAfter(n.right.furthest, n.furthest) {
		n.furthest = n.right.furthest
	}
	return n
}

func (n *intervalNode) add(start, end string, w *Watcher, priority uint64) *intervalNode {
	switch {
	case n == nil:
		return &intervalNode{start: start, end: end, furthest: end, priority: priority, watchers: map[*Watcher]struct{}{w: {}}}
	case n.start == start && n.end == end:
		n.watchers[w] = struct{}{}
		return n
	case n.before(start, end):
		n.right = n.right.add(start, end, w, priority)
		if n.right.priority > n.priority {
			return n.rotateLeft()
		}
	default:
		n.left = n.left.add(start, end, w, priority)
		if n.left.priority > n.priority {
			return n.rotateRight()
		}
	}
	return n.update()
}

func (n *intervalNode) rotateLeft() *intervalNode {
	r := n.right
	n.right = r.left
	r.left = n.update()
	return r.update()
}

func (n *intervalNode) rotateRight() *intervalNode {
	l := n.left
	n.left = l.right
	l.right = n.update()
	return l.update()
}

func (n *intervalNode) remove(start, end string, w *Watcher) *intervalNode {
	switch {
	case n == nil:
		return nil
	case n.start == start && n.end == end:
		if delete(n.watchers, w); len(n.watchers) > 0 {
			return n
		}
		return merge(n.left, n.right)
	case n.before(start, end):
		n.right = n.right.remove(start, end, w)
	default:
		n.left = n.left.remove(start, end, w)
	}
	return n.update()
}

// merge joins two treaps; all nodes of l sort before those of r.
func merge(l, r *intervalNode) *intervalNode {
	switch {
	case l == nil:
		return r
	case r == nil:
		return l
	case l.priority > r.priority:
		l.right = merge(l.right, r)
		return l.update()
	default:
		r.left = merge(l, r.left)
		return r.update()
	}
}

func (n *intervalNode) stab(key []byte, visit func(*Watcher)) {
	if n == nil || n.furthest != "" && n.furthest <= string(key) {
		return
	}
	n.left.stab(key, visit)
	if n.start > string(key) {
		return
	}
	if n.end == "" || n.end > string(key) {
		for w := range n.watchers {
			visit(w)
		}
	}
	n.right.stab(key, visit)
}
