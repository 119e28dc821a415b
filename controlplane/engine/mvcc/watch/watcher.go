package watch

import (
	"bytes"
	"context"
	"errors"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// The errors with which a Watcher ends, beside a CompactedError.
var (
	ErrRestored = errors.New("state was replaced by a snapshot")
	ErrClosed   = errors.New("closed")
)

// WatchOptions says what a Watcher sees.
type Options struct {
	Key, End []byte // [Key, End); no End: Key alone; End {0}: all from Key on

	// FromRevision is the first revision to see, in the past or in the future; 0 is the next one.
	FromRevision int64

	PrevKV    bool // events bring what they replaced
	KeysOnly  bool // of KV, events bring Key and ModRevision only; not with PrevKV
	MaxEvents int  // of a Batch, about; default 1000
	MaxBytes  int  // of keys and values of a Batch, about; default 1 MiB

	// Notify, when set, is called when Next has something new to return, and again when it returned a part of it: one
	// goroutine can so read many watchers, with a context that has ended. It must not wait, nor call the watcher.
	Notify func()
}

// EventType says what happened to a key.
type EventType uint8

// The types of events.
const (
	EventPut    EventType = 1
	EventDelete EventType = 2
)

// Event is one change of one key. Its bytes are shared with other watchers: they must not be written to.
type Event struct {
	Type            EventType
	ordinal         int32       // position among the changes of its revision; only set in a block
	KV              command.KV  // of a delete, the key and, as ModRevision, the revision of the delete
	PrevModRevision int64       // of what it replaced; 0: nothing
	Prev            *command.KV // what it replaced, with PrevKV
}

// Batch is the next events of a Watcher, in log order.
type Batch struct {
	// Revision is complete: with this batch and those before it, all events up to and including it were delivered.
	Revision int64
	Events   []Event
	// Partial says that the last event's revision goes on in the next batch: it has more events than fit into one.
	Partial bool
}

// Watcher is a pull-based stream of events. A watcher that is not read holds no memory but its own.
type Watcher struct {
	hub  *Hub
	opts Options
	wake chan struct{}

	nextMu    sync.Mutex // held by Next
	delivered int        // how many changes of the first pending revision were delivered; owned by Next

	// Guarded by hub.mu.
	next    int64 // first revision that may hold something to see; 0: there is none
	reading int64 // what Next is reading from; 0: it is not
	err     error // how it ended
}

// Watch starts a watcher. Close it. When FromRevision is below the floor, Next says so.
func (h *Hub) Watch(o Options) *Watcher {
	if o.MaxEvents <= 0 {
		o.MaxEvents = 1000
	}
	if o.MaxBytes <= 0 {
		o.MaxBytes = 1 << 20
	}
	o.Key, o.End = bytes.Clone(o.Key), bytes.Clone(o.End)
	w := &Watcher{hub: h, opts: o, wake: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		w.err = ErrClosed
		return w
	}
	switch floor := h.source.CompactRevision(); {
	case o.FromRevision == 0:
		w.opts.FromRevision = h.revision + 1
	case o.FromRevision < floor:
		w.err = &command.CompactedError{Revision: o.FromRevision, CompactRevision: floor}
		return w
	case o.FromRevision <= h.revision:
		w.next = o.FromRevision
	}
	h.add(w)
	return w
}

// end is the watcher's range's end as intervals writes it.
func (w *Watcher) rangeEnd() string {
	if command.IsFromKey(w.opts.End) {
		return ""
	}
	return string(w.opts.End)
}

// mark says that revision holds something to see. The caller holds hub.mu.
func (w *Watcher) markPending(revision int64) {
	if w.next != 0 || revision < w.opts.FromRevision {
		return
	}
	w.next = revision
	w.signal()
}

func (w *Watcher) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
	if w.opts.Notify != nil {
		w.opts.Notify()
	}
}

// finish ends the watcher. The caller holds hub.mu.
func (w *Watcher) end(err error) {
	if w.err == nil {
		w.err = err
		w.hub.remove(w)
	}
	w.signal()
}

// Close ends the watcher; a Next that waits returns ErrClosed.
func (w *Watcher) Close() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	w.end(ErrClosed)
}

// Progress is the revision up to which Next has returned all there is to see. Between two calls of Next, in the
// goroutine that makes them, it never runs ahead of the events; it moves on while nothing happens to the watched keys.
func (w *Watcher) Progress() int64 {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	return w.progress()
}

func (w *Watcher) progress() int64 {
	switch {
	case w.reading != 0:
		return w.reading - 1
	case w.next != 0:
		return w.next - 1
	}
	return w.hub.revision
}

// Next returns the next events and waits for them until ctx ends; what is there already it returns in any case. One
// goroutine at a time calls it. It fails for good with a CompactedError when history that was not yet seen is gone,
// ErrRestored when the state went back behind what was seen, or ErrClosed.
func (w *Watcher) Next(ctx context.Context) (Batch, error) {
	w.nextMu.Lock()
	defer w.nextMu.Unlock()
	for {
		t, err := w.beginRead()
		if err != nil {
			return Batch{}, err
		}
		if t.From == 0 {
			select {
			case <-w.wake:
				continue
			case <-ctx.Done():
				return Batch{}, ctx.Err()
			}
		}
		var c Collector
		if t.recent != nil {
			c, err = w.collectRecent(t)
		} else {
			c, err = w.collectFromSource(t)
		}
		if err := w.endRead(&c, err); err != nil {
			return Batch{}, err
		}
		if len(c.events) > 0 {
			return Batch{Revision: c.complete(), Events: c.events, Partial: c.partial}, nil
		}
		if c.stopped && ctx.Err() != nil {
			return Batch{}, ctx.Err()
		}
	}
}

// take is a stretch of revisions to read.
type readSpan struct {
	From, To int64
	more     bool     // there may be something after to
	recent   []*block // the events from there on; nil: they are on disk
}

// take decides what Next reads now; a take from 0 says that there is nothing.
func (w *Watcher) beginRead() (readSpan, error) {
	h := w.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if w.err != nil || w.next == 0 {
		return readSpan{}, w.err
	}
	t := readSpan{From: w.next, To: h.revision}
	t.recent, t.more = h.recent.since(t.From)
	if t.more {
		t.To = t.recent[len(t.recent)-1].last
	}
	// What is marked from here on is newer than t.
	w.reading, w.next = w.next, 0
	return t, nil
}

// putBack says how far g came.
func (w *Watcher) endRead(c *Collector, err error) error {
	h := w.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	w.reading = 0
	switch {
	case w.err != nil:
		return w.err
	case c.To > h.revision:
		w.end(ErrRestored)
		return w.err
	case errors.Is(err, ErrRestored):
		// The state was replaced while g read: start again where it began.
		w.next, c.events, c.stopped = c.From, nil, false
		return nil
	case errors.Is(err, command.ErrCompacted):
		w.end(err)
		return err
	case err != nil:
		w.next = c.From
		return err
	}
	w.delivered = 0
	switch {
	case c.stopped:
		w.next, w.delivered = c.next, c.nextOrdinal
		w.signal()
	case c.more:
		w.next = c.To + 1
		w.signal()
	}
	return nil
}
