package rest

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// keepAliveEvery is the time between two comment lines in a stream of events. With them, the server notices a client
// that is gone, and proxies do not close the connection as idle.
const keepAliveEvery = 15 * time.Second

// Event is one server-sent event (WHATWG HTML, section 9.2). Data is sent as JSON on one line.
type Event struct {
	Name string
	Data any
}

// EventHandler handles a request whose response is a stream of server-sent events. It authorizes the call, and calls
// send for each event until the context of r ends. An error that it returns before the first event is sent like the
// error of a Handler, with its HTTP status. After the first event the status has already been sent. An error is then
// sent as the data of a last event with the name "error".
type EventHandler func(r *http.Request, send func(Event) error) error

// events is the response of an EventHandler.
type events func(send func(Event) error) error

// HandleEvents adds a GET route, like Handle, whose response is a stream of server-sent events. Callers need a valid
// token. A stream has no time limit. It ends when the caller's token becomes invalid, or when the client reads nothing
// for chunkTime.
func (s *Server) HandleEvents(path string, as auth.Method, h EventHandler, options ...Option) {
	route := newRoute(http.MethodGet, path, as, "", options)
	route.Content = "text/event-stream"
	s.open(route, func(_ *Response, r *http.Request) (any, error) {
		opened, err := s.openStream(route, r)
		if err != nil {
			return nil, err
		}
		return events(func(send func(Event) error) error {
			return opened(func(r *http.Request) error { return h(r, send) })
		}), nil
	})
}

// openStream authenticates the caller of a stream. The returned function runs the stream: it counts the stream against
// the limits of its caller, and calls run with a request whose context ends when the caller's token becomes invalid.
func (s *Server) openStream(route Route, r *http.Request) (func(run func(*http.Request) error) error, error) {
	r, token, err := s.authenticate(r)
	if err == nil {
		err = route.checkStrict(r)
	}
	if err != nil {
		s.reportFailure(r, route.As, err)
		return nil, err
	}
	return func(run func(*http.Request) error) (err error) {
		defer func() {
			s.reportFailure(r, route.As, err)
			if err == nil {
				auth.ReportSuccess(s.opts.Audit, auth.CallerOf(r.Context()), route.As)
			}
		}()
		ctx := r.Context()
		if s.opts.OpenStream != nil {
			opened, leave, err := s.opts.OpenStream(ctx, token)
			if err != nil {
				return err
			}
			defer leave()
			ctx = opened
		}
		err = run(r.WithContext(ctx))
		var ended *fault.Fault
		if err != nil && errors.As(context.Cause(ctx), &ended) {
			return ended
		}
		return err
	}, nil
}

// errHeadOnly ends the stream of a HEAD request at its first event.
var errHeadOnly = errors.New("a HEAD request has no body")

// sendEvents sends the response of an EventHandler. It returns whether a part of the response was sent, like answer.
func (s *Server) sendEvents(w http.ResponseWriter, r *http.Request, data events, id string) (bool, error) {
	out := &eventWriter{control: http.NewResponseController(w), w: w, head: r.Method == http.MethodHead}
	err := func() error {
		stop := make(chan struct{})
		var background sync.WaitGroup
		defer background.Wait()
		defer close(stop) // also after a panic, because the response must not be written to then
		background.Go(func() { out.keepAlive(stop) })
		return data(out.send)
	}()
	switch {
	case err == nil && !out.began:
		return out.began, out.begin() // a stream without events
	case err == nil || !out.began || errors.Is(err, errHeadOnly):
		if errors.Is(err, errHeadOnly) {
			err = nil
		}
		return out.began, err
	case r.Context().Err() != nil || out.failed != nil:
		return true, nil // the client has closed the connection, or does not read
	}
	status, body := failure(s.faultOf(r, id, err), s.opts.Service, "")
	return true, out.send(Event{"error", struct {
		Status int `json:"status"`
		*errorBody
	}{status, body.Error}})
}

// eventWriter writes server-sent events to a response.
type eventWriter struct {
	control *http.ResponseController
	head    bool

	mu     sync.Mutex // guards the fields below
	w      http.ResponseWriter
	began  bool
	failed error // the error of the first write that failed
}

// begin sends the header of the response.
func (e *eventWriter) begin() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.beginLocked()
}

func (e *eventWriter) beginLocked() error {
	if e.began {
		return nil
	}
	e.began = true
	e.extendDeadline()
	e.w.Header().Set("Content-Type", "text/event-stream")
	e.w.Header().Set("Cache-Control", "no-store")
	e.w.Header().Set("X-Content-Type-Options", "nosniff")
	e.w.WriteHeader(http.StatusOK)
	return e.flush()
}

// send writes an event. If the client does not read, send blocks for at most chunkTime and then returns an error.
func (e *eventWriter) send(event Event) error {
	data, err := json.Marshal(event.Data)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.beginLocked(); err != nil {
		return err
	}
	if e.head {
		return errHeadOnly
	}
	return e.write("event: " + event.Name + "\ndata: " + string(data) + "\n\n")
}

// keepAlive writes a comment line every keepAliveEvery after the first event, until stop is closed.
func (e *eventWriter) keepAlive(stop <-chan struct{}) {
	tick := time.NewTicker(keepAliveEvery)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		e.mu.Lock()
		if e.began && !e.head {
			_ = e.write(":\n\n") // write keeps the error
		}
		e.mu.Unlock()
	}
}

// write writes text and flushes it. The caller holds e.mu. After a failed write, all later ones return the same error.
func (e *eventWriter) write(text string) error {
	if e.failed == nil {
		e.extendDeadline()
		_, e.failed = e.w.Write([]byte(text))
	}
	if e.failed == nil {
		e.failed = e.flush()
	}
	return e.failed
}

// extendDeadline gives the client chunkTime to read what is written next. The response writers of tests have no
// deadlines, so the error is ignored.
func (e *eventWriter) extendDeadline() { _ = e.control.SetWriteDeadline(time.Now().Add(chunkTime)) }

func (e *eventWriter) flush() error {
	if err := e.control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}
