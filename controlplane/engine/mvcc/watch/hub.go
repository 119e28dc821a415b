package watch

import (
	"slices"
	"sort"
	"sync"
)

// hub knows who watches what. For each batch it only marks the watchers whose keys changed and wakes them: they read the
// events themselves, from the recent ones kept here or from disk.
type Hub struct {
	recentBytes int64
	source      Source

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

func NewHub(revision, recentBytes int64, source Source) *Hub {
	return &Hub{
		recentBytes: recentBytes,
		source:      source,
		revision:    revision,
		byKey:       map[string]map[*Watcher]struct{}{},
		watchers:    map[*Watcher]struct{}{},
		recent:      recentEvents{first: revision + 1},
	}
}

// Changes are the changes of one batch of commands, in order.
type Changes interface {
	Len() int
	// Event returns the i-th change as an event, without Prev. Its bytes are only valid during the call of Announce.
	Event(i int) Event
}

// Announce makes revision the current one and wakes the watchers of the keys that changes are about. It copies what it
// keeps of changes, and keeps nothing while there is no watcher.
func (h *Hub) Announce(changes Changes, revision int64) {
	if changes.Len() == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.revision = revision
	if len(h.watchers) == 0 {
		h.recent = recentEvents{first: revision + 1}
		return
	}
	b := newBlock(changes)
	h.keep(b)
	for i := range b.events {
		e := &b.events[i].KV
		for w := range h.byKey[string(e.Key)] {
			w.markPending(e.ModRevision)
		}
		h.byRange.stab(e.Key, func(w *Watcher) { w.markPending(e.ModRevision) })
	}
}

func newBlock(changes Changes) *block {
	const eventBytes = 128
	events := make([]Event, changes.Len())
	var data int
	for i := range events {
		events[i] = changes.Event(i)
		data += len(events[i].KV.Key) + len(events[i].KV.Value)
	}
	buf := make([]byte, 0, data)
	hold := func(v []byte) []byte {
		n := len(buf)
		buf = append(buf, v...)
		return buf[n:len(buf):len(buf)]
	}
	for i := range events {
		e := &events[i]
		e.KV.Key = hold(e.KV.Key)
		if e.Type == EventPut {
			e.KV.Value = hold(e.KV.Value)
		}
		if i > 0 && events[i-1].KV.ModRevision == e.KV.ModRevision {
			e.ordinal = events[i-1].ordinal + 1
		}
	}
	return &block{
		last: events[len(events)-1].KV.ModRevision, events: events, bytes: int64(data + eventBytes*len(events)),
	}
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
