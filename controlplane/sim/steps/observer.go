package steps

import (
	"context"
	"errors"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// ended returns a cancelled context. With this context, Next of a watcher does not wait: it returns only events that
// exist already.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// observer watches all keys of a member, also across restarts of the member. It checks that every revision is received
// completely, once and in order.
type observer struct {
	m      *member
	now    context.Context
	w      *watch.Watcher
	events []watch.Event // events of a revision whose last event was not received yet
}

func (m *member) observe() *observer {
	o := &observer{m: m, now: ended()}
	o.open()
	return o
}

func (o *observer) open() {
	from := o.m.seen
	if o.m.aside != nil {
		from = 1
	}
	o.w = o.m.engine.Watch(watch.Options{Key: []byte{0}, End: []byte{0}, FromRevision: from, PrevKV: true, MaxEvents: 7, MaxBytes: 600})
}

func (o *observer) close() { o.w.Close() }

// poll receives the events that exist already, and checks them.
func (o *observer) poll() {
	w := o.m.w
	for w.broken == "" && o.m.up && !o.m.dying() {
		b, err := o.w.Next(o.now)
		switch {
		case errors.Is(err, context.Canceled):
			return
		case errors.Is(err, mvcc.ErrCompacted):
			if o.m.engine.CompactRevision() <= o.m.seen {
				w.fail("the watch on member %d wants revision %d, the oldest is %d, and yet: %v", o.m.id, o.m.seen, o.m.engine.CompactRevision(), err)
			}
			o.again()
			continue
		case err != nil:
			w.fail("the watch on member %d ended: %v", o.m.id, err)
			return
		}
		o.take(b)
	}
}

// again opens a new watch after the current state. A watcher must do that when its history was compacted.
func (o *observer) again() {
	o.m.w.count("watches restarted")
	o.w.Close()
	o.events = nil
	o.m.w.check.state(o.m)
	o.m.seen = o.m.engine.Revision() + 1
	o.open()
}

// take splits a batch into revisions and passes each complete one to flush.
func (o *observer) take(b watch.Batch) {
	w := o.m.w
	if o.m.aside != nil {
		w.fail("member %d with an empty disk shows revision %d", o.m.id, b.Revision)
		return
	}
	for _, e := range b.Events {
		if len(o.events) > 0 && e.KV.ModRevision != o.events[0].KV.ModRevision {
			o.flush()
		}
		o.events = append(o.events, e)
	}
	if !b.Partial && len(o.events) > 0 {
		o.flush()
	}
	if b.Revision != o.m.seen-1 && !b.Partial {
		w.fail("the watch on member %d says that it is at revision %d, but it showed all up to %d", o.m.id, b.Revision, o.m.seen-1)
	}
}

// flush checks that the revision of the collected events is the next one, and passes it to the history.
func (o *observer) flush() {
	w := o.m.w
	revision := o.events[0].KV.ModRevision
	if revision != o.m.seen {
		w.fail("the watch on member %d shows revision %d where %d is due", o.m.id, revision, o.m.seen)
		return
	}
	o.m.seen = revision + 1
	w.check.history.commit(o.m, revision, o.events)
	o.events = nil
}

// position returns the index and term of the last entry that the member's state machine has applied.
func (m *member) position() command.Position { return m.engine.Applied() }
