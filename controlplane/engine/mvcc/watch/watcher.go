package watch

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Errors that Next returns when the watcher has ended, besides CompactedError.
var (
	ErrRestored = errors.New("state was replaced by a snapshot")
	ErrClosed   = errors.New("closed")
)

// Options selects the events of a Watcher and how Next returns them.
type Options struct {
	Key, End []byte // [Key, End); without End: Key alone; with End {0}: all keys from Key on

	// FromRevision is the first revision to deliver. It may be in the past or in the future; 0 means the one after the
	// current one.
	FromRevision int64

	PrevKV    bool // set Prev in events
	KeysOnly  bool // deliver only Key and ModRevision in KV; not to be combined with PrevKV
	MaxEvents int  // approximate limit of events in a Batch; default 1000
	MaxBytes  int  // approximate limit of the bytes of keys and values in a Batch; default 1 MiB

	// Notify, if set, is called when Next has something new to return, and again after Next returned only a part of it.
	// With it, one goroutine can serve many watchers by calling Next with a context that has ended. Notify must not
	// block and must not call methods of the watcher.
	Notify func()
}

// EventType is the type of an Event.
type EventType uint8

// The types of events.
const (
	EventPut    EventType = 1
	EventDelete EventType = 2
)

// Event is one change of one key. Its bytes are shared with other watchers and must not be changed.
type Event struct {
	Type            EventType
	ordinal         int32       // position among the changes of its revision; only set in a block
	KV              command.KV  // for a delete: only Key, and the delete's revision as ModRevision
	PrevModRevision int64       // mod revision of the replaced version; 0: the key did not exist
	Prev            *command.KV // the replaced version; only with Options.PrevKV
}

// Batch is the result of Next: events in log order.
type Batch struct {
	// Revision is the newest revision up to which all events were delivered with this batch and earlier ones.
	Revision int64
	Events   []Event
	// Partial is true if the last event's revision has more events, which follow in the next batch.
	Partial bool
}

// Watcher is a stream of events that its owner pulls with Next. While it is not read, it uses only its own memory.
type Watcher struct {
	hub  *Hub
	opts Options
	wake chan struct{}

	nextMu    sync.Mutex // held while Next runs
	delivered int        // number of changes of revision next that are already delivered; used only by Next

	// hub.mu guards the fields next, reading and err.
	next    int64 // first revision that may have events to deliver; 0: none has
	reading int64 // first revision that the running Next reads; 0: Next is not reading
	err     error // why the watcher ended; nil: it has not
}

// Watch starts a watcher, which the caller must close. If o.FromRevision is below the compact revision, Next fails with
// a CompactedError.
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
	switch compactRevision := h.source.CompactRevision(); {
	case o.FromRevision == 0:
		w.opts.FromRevision = h.revision + 1
	case o.FromRevision < compactRevision && !mutant.On(mutant.WatchCompacted):
		w.err = &command.CompactedError{Revision: o.FromRevision, CompactRevision: compactRevision}
		return w
	case o.FromRevision <= h.revision:
		w.next = o.FromRevision
	}
	h.add(w)
	return w
}

// rangeEnd returns the end of the watcher's range in the notation of intervalTree: "" means no upper bound.
func (w *Watcher) rangeEnd() string {
	if command.IsFromKey(w.opts.End) {
		return ""
	}
	return string(w.opts.End)
}

// markPending records that w has events to deliver from revision on, and wakes Next. If earlier events are pending, it
// does nothing. The caller holds hub.mu.
func (w *Watcher) markPending(revision int64) {
	if w.next != 0 || revision < w.opts.FromRevision {
		return
	}
	w.next = revision
	w.signal()
}

// signal wakes Next and calls Notify.
func (w *Watcher) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
	if w.opts.Notify != nil {
		w.opts.Notify()
	}
}

// end ends the watcher with the error err. If the watcher has already ended, its error stays. The caller holds hub.mu.
func (w *Watcher) end(err error) {
	if w.err == nil {
		w.err = err
		w.hub.remove(w)
	}
	w.signal()
}

// Close ends the watcher. Calls of Next return ErrClosed.
func (w *Watcher) Close() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	w.end(ErrClosed)
}

// Progress returns the revision up to which Next has returned all events. It also advances while there are no events
// for this watcher. If it is called between two calls of Next, on the same goroutine, Next has returned all events up
// to this revision.
func (w *Watcher) Progress() int64 {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	return w.progress()
}

// progress is Progress for callers that hold hub.mu.
func (w *Watcher) progress() int64 {
	switch {
	case w.reading != 0:
		return w.reading - 1
	case w.next != 0:
		return w.next - 1
	}
	return w.hub.revision
}

// Next returns the next events. If there are none, it waits for them until ctx ends. Events that exist already are
// returned even if ctx has ended. Only one goroutine may call it at a time. The watcher ends, and Next returns an error
// from then on, in three cases: with a CompactedError if events that were not delivered were compacted, with
// ErrRestored if the state was replaced by one that does not contain what was delivered, and with ErrClosed.
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
		if mutant.On(mutant.ReorderWatch) {
			slices.Reverse(c.events)
		}
		if len(c.events) > 0 {
			return Batch{Revision: c.complete(), Events: c.events, Partial: c.partial}, nil
		}
		if c.stopped && ctx.Err() != nil {
			return Batch{}, ctx.Err()
		}
	}
}

// readSpan is the range of revisions that one read covers.
type readSpan struct {
	From, To int64
	more     bool     // blocks after To exist
	recent   []*block // blocks with the events from From on; nil: they are no longer in memory
}

// beginRead returns the revisions that Next has to read, and marks them as being read. If there is nothing to deliver,
// From is 0 in the result.
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
	// The read covers the revisions from w.next to t.To. From here on, markPending sets w.next only for revisions after
	// t.To.
	w.reading, w.next = w.next, 0
	return t, nil
}

// endRead updates the watcher after a read. The events that were read are in c, and err is the error of the read.
// endRead returns the error that Next has to return.
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
		// The state was replaced during the read: read again from the same revision.
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
	if mutant.On(mutant.SkipWatchEvent) && w.next != 0 {
		w.next, w.delivered = w.next+1, 0
	}
	return nil
}
