package qmp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Limits of the events that a connection stores. They limit the agent's memory, because a guest can cause events.
const (
	maxEvents     = 1024
	maxEventBytes = 4 << 20
)

// ErrDropped means that the awaited event may have been dropped, because the event log is bounded. Query QEMU's state
// instead.
var ErrDropped = errors.New("events were dropped")

// Mark is the number of an event of one connection, counted from 0.
type Mark uint64

// Event is an event that QEMU sent.
type Event struct {
	Name string          // such as SHUTDOWN
	Data json.RawMessage // nil if the event has none
	Time time.Time       // by QEMU's clock; zero if QEMU cannot read it
	At   Mark            // its number; the next event has At+1

	// Dropped is the number of events just before this one that a [Stream] missed. If it is not 0, query QEMU's state.
	Dropped uint64
}

// Decode decodes the event's data into out. It leaves out unchanged if the event has no data.
func (e Event) Decode(out any) error {
	if e.Data == nil {
		return nil
	}
	if err := json.Unmarshal(e.Data, out); err != nil {
		return fmt.Errorf("decode event %s: %w", e.Name, err)
	}
	return nil
}

// Mark returns the number that the next event will have. To wait for the events that a command causes, take a Mark
// before the command and pass it to Wait.
func (c *Conn) Mark() Mark { return c.log.end() }

// Wait returns the first event for which match returns true. It considers only events with the number from or a higher
// one, and waits for new events until ctx ends. ctx should have a deadline. The error wraps [ErrDropped] when such
// events were dropped and no other one matches, [ErrClosed] when the connection ended first, or the error of ctx. match
// may use the connection.
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

// Subscribe returns a Stream that begins at the event with the number from. A Stream uses no resources and need not be
// closed. A reader that falls behind by more than the event log holds (1024 events, 4 MiB) continues at the oldest
// event, which has Dropped set.
func (c *Conn) Subscribe(from Mark) *Stream { return &Stream{c: c, next: from} }

// Stream reads the events of a connection in order. It must not be used by two goroutines at once.
type Stream struct {
	c    *Conn
	next Mark
}

// Next returns the next event. It waits for the event until ctx ends. When the connection has ended it returns the
// remaining events, then an error that wraps [ErrClosed] and the cause.
func (s *Stream) Next(ctx context.Context) (Event, error) {
	for {
		// Err is called before the log is read. If it returns an error, the connection has ended and no event is added
		// later, so that the log read below is complete.
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

// eventLog holds the latest events of a connection. The zero value is an empty log.
type eventLog struct {
	mu     sync.Mutex
	events []Event
	first  Mark          // number of events[0]
	bytes  int           // total size of the names and data
	more   chan struct{} // closed when the next event is added; nil if no reader waits
}

// end returns the number of the next event.
func (l *eventLog) end() Mark {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.first + Mark(len(l.events))
}

// add appends e and drops the oldest events beyond the limits. It never drops e.
func (l *eventLog) add(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.At = l.first + Mark(len(l.events))
	l.events = append(l.events, e)
	l.bytes += e.size()
	for len(l.events) > 1 && (len(l.events) > maxEvents || l.bytes > maxEventBytes) {
		l.bytes -= l.events[0].size()
		l.events[0] = Event{} // frees the data now, before append copies the slice
		l.events = l.events[1:]
		l.first++
	}
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
}

// at returns the event with the number m. If that event was dropped, at returns the oldest event, with Dropped set. If
// the event has not been added yet, at returns a channel that is closed when the next event is added.
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
