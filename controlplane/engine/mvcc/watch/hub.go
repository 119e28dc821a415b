package watch

import (
	"slices"
	"sort"
	"sync"
)

// Hub holds the watchers of one keyspace and the recent events. All methods may be called from any goroutine; Announce,
// Restore and Close are called by the engine.
type Hub struct {
	recentBytes int64
	source      Source

	mu       sync.Mutex
	revision int64 // newest revision that was announced
	byKey    map[string]map[*Watcher]struct{}
	byRange  intervalTree
	watchers map[*Watcher]struct{}
	closed   bool

	recent recentEvents
}

// recentEvents holds the events of all revisions from the one in the field first on, with one block for each batch.
// Blocks are never changed, so that watchers read them without a lock.
type recentEvents struct {
	first  int64
	blocks []*block
	bytes  int64
}

// block holds the events of one batch of commands.
type block struct {
	last   int64 // newest revision in the block
	events []Event
	bytes  int64
}

// NewHub returns a hub without watchers for a keyspace at revision. It keeps at most recentBytes bytes of recent events
// in memory and reads older ones from source.
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

// Changes is the list of the changes of one batch of commands, in log order.
type Changes interface {
	Len() int
	// Event returns the i-th change as an event without Prev. Its bytes are valid only while Announce runs.
	Event(i int) Event
}

// Announce must be called after each batch. The parameter changes has the changes of the batch, and revision is the
// newest revision now. If there are watchers, Announce stores a copy of the events in memory and wakes the watchers of
// the changed keys.
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

// newBlock copies changes into one block with one buffer for all keys and values.
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

// keep adds b to the recent events, and drops the oldest blocks until those that are left take at most recentBytes.
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

// since returns the next blocks, at most 256, that may contain events of revision and later ones. If there are more
// blocks after them, more is true. If events of revision are no longer in memory, since returns nil.
func (r *recentEvents) since(revision int64) (blocks []*block, more bool) {
	const most = 256
	if revision < r.first {
		return nil, false
	}
	first := sort.Search(len(r.blocks), func(i int) bool { return r.blocks[i].last >= revision })
	end := min(first+most, len(r.blocks))
	return slices.Clone(r.blocks[first:end]), end < len(r.blocks)
}

// add registers w. The caller holds h.mu.
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

// remove unregisters w. The caller holds h.mu.
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

// Restore must be called when the state was replaced. The parameter revision is the newest revision of the new state.
// Watchers that have seen newer revisions end with ErrRestored; the others read what they have not seen from the new
// state.
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

// Close ends all watchers with ErrClosed.
func (h *Hub) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for w := range h.watchers {
		w.end(ErrClosed)
	}
}

// Stats returns the number of watchers and the bytes of events in memory.
func (h *Hub) Stats() (watchers int, recentBytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.watchers), h.recent.bytes
}
