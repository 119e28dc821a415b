package qmp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"
)

// What the log of a connection keeps at most. A guest can provoke events, so neither may grow with them.
const (
	maxEvents     = 1024
	maxEventBytes = 4 << 20
)

// ErrDropped means that more events came than are kept, and the one waited for may have been among those dropped: ask
// QEMU for its state instead.
var ErrDropped = errors.New("events were dropped")

// Mark is a position in a connection's events. It means nothing to another connection.
type Mark uint64

// Event is something that happened in QEMU.
type Event struct {
	Name string          // such as SHUTDOWN
	Data json.RawMessage // its members as sent; nil if it has none
	Time time.Time       // by QEMU's clock; zero if QEMU does not know
	At   Mark            // where it stands; the next one stands at At+1

	// Dropped is how many events a [Stream] lost just before this one. Not 0: ask QEMU for its state.
	Dropped uint64
}

// Decode reads the event's data into out, which stays as it is when there is none.
func (e Event) Decode(out any) error {
	if e.Data == nil {
		return nil
	}
	if err := json.Unmarshal(e.Data, out); err != nil {
		return fmt.Errorf("decode event %s: %w", e.Name, err)
	}
	return nil
}

// Mark is the position of the next event to come. Taken before a command, it lets Wait find what the command caused.
func (c *Conn) Mark() Mark { return c.log.end() }

// Wait returns the first event at or after from that match accepts, waiting for it if need be. It fails with
// [ErrDropped] when events in that range are gone and those left do not match, with [ErrClosed] when the connection
// closedErr without it, or with the error of ctx, which should have a deadline. match may use the connection.
func (c *Conn) Wait(ctx context.Context, from Mark, match func(Event) bool) (Event, error) {
	s := c.Subscribe(from)
	lost := false
	for {
		if lost && s.next >= c.log.end() {
			return Event{}, ErrDropped
		}
		e, err := s.Next(ctx)
		if err != nil {
			return Event{}, fmt.Errorf("wait for event: %w", err)
		}
		if match(e) {
			return e, nil
		}
		lost = lost || e.Dropped > 0
	}
}

// Subscribe reads events from a position on. A stream costs nothing while unread and need not be closed; a reader that
// falls behind by more than the log keeps (1024 events, 4 MiB) finds Dropped set and goes on with the oldest kept.
func (c *Conn) Subscribe(from Mark) *Stream { return &Stream{c: c, next: from} }

// Stream is one reader's place in the events of a connection, for one goroutine.
type Stream struct {
	c    *Conn
	next Mark
}

// Next returns the next event in QEMU's order, waiting for it. After the connection's end it returns what is left, then
// [ErrClosed] with the cause.
func (s *Stream) Next(ctx context.Context) (Event, error) {
	for {
		// Asked before looking: when it is over already, nothing can come after the look.
		over := s.c.Err()
		e, more := s.c.log.at(s.next)
		if more == nil {
			s.next = e.At + 1
			return e, nil
		}
		if over != nil {
			return Event{}, over
		}
		select {
		case <-more:
		case <-s.c.done:
		case <-ctx.Done():
			return Event{}, ctx.Err()
		}
	}
}

// eventLog keeps the last events. The zero value is empty.
type eventLog struct {
	mu     sync.Mutex
	events []Event
	first  Mark          // position of events[0]
	bytes  int           // of all their names and data
	more   chan struct{} // closed by the next event; nil while nobody waits
}

func (l *eventLog) end() Mark {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.first + Mark(len(l.events))
}

// add appends e and drops the oldest beyond the limits, but never e itself.
func (l *eventLog) add(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.At = l.first + Mark(len(l.events))
	l.events = append(l.events, e)
	l.bytes += e.size()
	for len(l.events) > 1 && (len(l.events) > maxEvents || l.bytes > maxEventBytes) {
		l.bytes -= l.events[0].size()
		l.events[0] = Event{} // free its data now, not when append moves the slice
		l.events = l.events[1:]
		l.first++
	}
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
}

// at returns the event at a position, or the oldest kept after it with Dropped set. If there is none yet, it returns
// a channel that the next event closes.
func (l *eventLog) at(m Mark) (Event, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m >= l.first+Mark(len(l.events)) {
		if l.more == nil {
			l.more = make(chan struct{})
		}
		return Event{}, l.more
	}
	if m < l.first {
		e := l.events[0]
		e.Dropped = uint64(l.first - m)
		return e, nil
	}
	return l.events[m-l.first], nil
}

func (e Event) size() int { return len(e.Name) + len(e.Data) }
