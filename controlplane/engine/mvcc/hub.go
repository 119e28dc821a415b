package mvcc

import (
	"slices"
	"sort"
	"sync"
)

// hub knows who watches what. For each batch it only marks the watchers whose keys changed and wakes them: they read the
// events themselves, from the recent ones kept here or from disk.
type Hub struct {
	recentBytes int64

	mu       sync.Mutex
	revision int64 // newest announced
	byKey    map[string]map[*Watcher]struct{}
	byRange  intervalTree
	watchers map[*Watcher]struct{}
	closed   bool

	recent recentEvents
}

// recentEvents are the events of all revisions from first on, in blocks of one batch each. Blocks are never changed, so
// that readers can hold them without a lock.
type recentEvents struct {
	first  int64
	blocks []*block
	bytes  int64
}

type block struct {
	last   int64 // revision
	events []Event
	bytes  int64
}

func NewHub(revision, recentBytes int64) *Hub {
	return &Hub{
		recentBytes: recentBytes,
		revision:    revision,
		byKey:       map[string]map[*Watcher]struct{}{},
		watchers:    map[*Watcher]struct{}{},
		recent:      recentEvents{first: revision + 1},
	}
}

// announce says that changes are committed and that revision is current. It keeps nothing of changes.
func (h *Hub) Announce(changes []change, revision int64) {
	if len(changes) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.revision = revision
	if len(h.watchers) == 0 {
		h.recent = recentEvents{first: revision + 1}
		return
	}
	h.keep(newBlock(changes))
	for i := range changes {
		c := &changes[i]
		for w := range h.byKey[string(c.key)] {
			w.markPending(c.revision)
		}
		h.byRange.stab(c.key, func(w *Watcher) { w.markPending(c.revision) })
	}
}

func newBlock(changes []change) *block {
	const eventBytes = 128
	var data int
	for i := range changes {
		data += len(changes[i].key) + len(changes[i].value)
	}
	b := &block{
		last:   changes[len(changes)-1].revision,
		events: make([]Event, len(changes)),
		bytes:  int64(data + eventBytes*len(changes)),
	}
	buf := make([]byte, 0, data)
	hold := func(v []byte) []byte {
		n := len(buf)
		buf = append(buf, v...)
		return buf[n:len(buf):len(buf)]
	}
	for i := range changes {
		e := &b.events[i]
		*e = changes[i].event()
		e.KV.Key = hold(e.KV.Key)
		if !changes[i].deleted {
			e.KV.Value = hold(e.KV.Value)
		}
		if i > 0 && changes[i-1].revision == changes[i].revision {
			e.ordinal = b.events[i-1].ordinal + 1
		}
	}
	return b
}

// keep adds b and drops the oldest blocks that are too many.
func (h *Hub) keep(b *block) {
	r := &h.recent
	r.blocks = append(r.blocks, b)
	r.bytes += b.bytes
	dropped := 0
	for ; r.bytes > h.recentBytes; dropped++ {
		r.bytes -= r.blocks[dropped].bytes
		r.first = r.blocks[dropped].last + 1
		r.blocks[dropped] = nil
	}
	r.blocks = r.blocks[dropped:]
}

// from returns the next blocks that may hold events of revision and later, and whether there are more; none when some
// are gone.
func (r *recentEvents) since(revision int64) (blocks []*block, more bool) {
	const most = 256
	if revision < r.first {
		return nil, false
	}
	first := sort.Search(len(r.blocks), func(i int) bool { return r.blocks[i].last >= revision })
	end := min(first+most, len(r.blocks))
	return slices.Clone(r.blocks[first:end]), end < len(r.blocks)
}

func (h *Hub) add(w *Watcher) {
	key := string(w.opts.Key)
	h.watchers[w] = struct{}{}
	if len(w.opts.End) > 0 {
		h.byRange.add(key, w.rangeEnd(), w)
		return
	}
	if h.byKey[key] == nil {
		h.byKey[key] = map[*Watcher]struct{}{}
	}
	h.byKey[key][w] = struct{}{}
}

func (h *Hub) remove(w *Watcher) {
	key := string(w.opts.Key)
	delete(h.watchers, w)
	if len(w.opts.End) > 0 {
		h.byRange.remove(key, w.rangeEnd(), w)
		return
	}
	if delete(h.byKey[key], w); len(h.byKey[key]) == 0 {
		delete(h.byKey, key)
	}
}

// restore says that the state was replaced by one at revision. Watchers that may have missed something read on.
func (h *Hub) Restore(revision int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		switch seen := w.progress(); {
		case seen > revision:
			w.end(ErrRestored)
		case w.next > revision:
			w.next = 0
		case seen < revision && w.opts.FromRevision <= revision:
			w.markPending(max(seen+1, w.opts.FromRevision))
		}
	}
	h.revision = revision
	h.recent = recentEvents{first: revision + 1}
}

// close ends all watchers.
func (h *Hub) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for w := range h.watchers {
		w.end(ErrClosed)
	}
}

func (h *Hub) Stats() (watchers int, recentBytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.watchers), h.recent.bytes
}
