// Package watch serves etcd's Watch streams: many watches over one stream, each with its own start revision.
//
// A Stream reads events from the engine and uses the messages of etcdserverpb; Options.Permit checks the client's
// permissions. The package must not depend on gRPC, members or consensus.
//
// A stream has two goroutines: one receives requests, and the other manages all watches of the stream and sends
// responses. A watch needs no goroutine and no queue: the engine notifies the stream which watches may have events, and
// the stream sends one batch of events for each of them in turn. A batch is read only when Send calls its argument, the
// function make. By then the client has received the previous data, and the member has memory for another batch. So a
// slow client delays only its own stream. The memory of a stream is limited to the waiting requests (at most 16), the
// keys of the watches (at most maxKeyBytes) and the batch that is being sent.
//
// # Progress
//
// The revision in a header without events means that all events up to that revision were sent. The revision is
// therefore read from the watch, never from the engine (etcd#15220). The response to a progress request is sent once no
// events are left to send. The request is ignored if a watch of the stream starts at a future revision, or if the
// stream has no watch. etcd also ignores the request when events are left to send.
//
// # Decisions
//
//   - All events of a revision are sent in one response, unless the watch requested fragments.
//   - For a watch with fragments, a revision with more than Options.FragmentBytes is split at that size. Otherwise
//     a response contains about batchBytes, or one revision.
//   - A watch with prev_kv is canceled if the previous value of an event was compacted before it could be read; etcd
//     leaves out prev_kv.
package watch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	mvccwatch "github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// Options configures streams; all fields are required.
type Options struct {
	Engine *mvcc.Engine
	// Header returns a response header with the given revision.
	Header func(revision int64) *pb.ResponseHeader
	// Permit checks whether the client of ctx may watch [key, end). It returns one of etcd's errors.
	Permit func(ctx context.Context, key, end []byte) error
	// Progress is the interval of progress notifications to a watch that requested them and has no events. Up to a
	// tenth is added at random, so that streams do not send at the same time.
	Progress time.Duration
	// FragmentBytes is the maximum size of a response to a watch with fragments, in bytes, unless a single event is
	// larger.
	FragmentBytes int
}

// invalidID is the watch ID in responses that belong to no watch, or to all watches of the stream.
const invalidID = -1

// etcd's reasons for refusing a watch. Clients parse these texts, so they must not change.
const (
	duplicateID = "mvcc: duplicate watch ID provided on the WatchStream"
	emptyRange  = "mvcc: watcher range is empty"
)

// Limits of the watches of one stream: their number, and the total size of their keys. Each watch costs the member
// about 1 KiB plus its keys. A watch beyond the limits is refused, and the stream remains open. etcd has no such
// limits.
const (
	maxWatches  = 1 << 16
	maxKeyBytes = 16 << 20
)

// Reasons for refusing a watch that etcd does not have.
const (
	tooManyWatches = "etcdserver: too many watches on this stream: open another stream"
	tooManyKeys    = "etcdserver: the keys of the watches on this stream exceed 16 MiB in total: open another stream"
)

// batchBytes is the approximate size of the keys and values in a batch; one revision may be larger. It is less than
// etcd's 1 MiB, because the memory for unsent data is limited, and each stream that waits for its client has one batch
// in memory.
const batchBytes = 256 << 10

// maxQueuedRequests is the maximum number of requests per stream that were received but not yet handled.
const maxQueuedRequests = 16

// Send sends a response. It waits until the stream may send, and then calls the function make, which returns the
// response. If make returns no response, Send sends nothing and returns the error of make.
type Send func(make func() (*pb.WatchResponse, error)) error

// Stream holds the watches of one client stream.
type Stream struct {
	opts *Options
	ctx  context.Context
	send Send

	// The following fields are used only by the goroutine that runs Serve.
	watches           map[int64]*watch
	nextID            int64
	keyBytes          int  // total bytes of the range bounds of all watches
	progressRequested bool // a progress request has no response yet
	progressTicker    *time.Ticker
	canceled          context.Context // a canceled context, with which Watcher.Next does not wait
	progressTick      <-chan time.Time

	wake chan struct{} // capacity 1; receives a value when a watch was added to ready

	mu    sync.Mutex
	ready []*watch // watches that may have events
}

// watch holds the state of one watch of a stream.
type watch struct {
	stream   *Stream
	id       int64
	from     int64
	keyBytes int // bytes of the watch's range bounds
	w        *mvccwatch.Watcher
	noPut    bool
	noDelete bool
	prevKV   bool
	fragment bool
	notify   bool
	idle     bool              // no events were sent since the last tick of progressTicker
	partial  []mvccwatch.Event // events of an incomplete revision, sent once the rest has been read

	queued bool // the watch is in stream.ready; guarded by stream.mu
	closed bool // the watch was removed from stream.watches
}

// Serve serves one watch stream. The function receive returns the client's requests, which Serve handles, and the
// function send sends responses with events. Serve returns when ctx ends, a response cannot be sent, or receive fails.
// If receive returns io.EOF, the client sends no more requests, but the stream continues. A goroutine calls receive and
// ends when receive fails, so receive must fail once Serve has returned.
func Serve(ctx context.Context, opts *Options, receive func() (*pb.WatchRequest, error), send Send) error {
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	s := &Stream{opts: opts, ctx: ctx, send: send, watches: map[int64]*watch{}, canceled: canceled, wake: make(chan struct{}, 1)}
	defer s.close()
	requests := make(chan *pb.WatchRequest, maxQueuedRequests)
	ended := make(chan error, 1)
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			r, err := receive()
			if errors.Is(err, io.EOF) {
				return // the client sends no more requests, but still receives
			}
			if err != nil {
				ended <- err
				return
			}
			select {
			case requests <- r:
			case <-done:
				return
			}
		}
	}()
	for {
		select {
		case r := <-requests:
			if err := s.handle(r); err != nil {
				return err
			}
		case <-s.wake:
			if err := s.sendReady(); err != nil {
				return err
			}
		case <-s.progressTick:
			if err := s.sendProgress(); err != nil {
				return err
			}
		case err := <-ended:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *Stream) close() {
	if s.progressTicker != nil {
		s.progressTicker.Stop()
	}
	for _, w := range s.watches {
		w.w.Close()
	}
}

// handle executes a client's request: it creates a watch, cancels one, or responds with the stream's progress.
func (s *Stream) handle(r *pb.WatchRequest) error {
	switch r := r.RequestUnion.(type) {
	case *pb.WatchRequest_CreateRequest:
		if r.CreateRequest != nil {
			return s.create(r.CreateRequest)
		}
	case *pb.WatchRequest_CancelRequest:
		if w := s.watches[r.CancelRequest.GetWatchId()]; r.CancelRequest != nil && w != nil {
			revision := w.w.Progress()
			s.remove(w)
			return s.respond(&pb.WatchResponse{Header: s.opts.Header(revision), WatchId: w.id, Canceled: true})
		}
	case *pb.WatchRequest_ProgressRequest:
		s.progressRequested = true
		return s.respondProgress()
	}
	return nil
}

// create starts a watch. If the request is refused, it sends the reason to the client.
func (s *Stream) create(r *pb.WatchCreateRequest) error {
	key, end := r.Key, r.RangeEnd
	if len(key) == 0 {
		key = []byte{0}
	}
	id := r.WatchId
	for id == 0 && s.watches[s.nextID] != nil {
		s.nextID++
	}
	switch {
	case r.StartRevision < 0:
		return s.refuse(rpctypes.ErrCompacted.Error())
	case id != 0 && s.watches[id] != nil:
		return s.refuse(duplicateID)
	case len(end) > 0 && !(len(end) == 1 && end[0] == 0) && bytes.Compare(key, end) >= 0:
		return s.refuse(emptyRange)
	case len(s.watches) >= maxWatches:
		return s.refuse(tooManyWatches)
	case s.keyBytes+len(key)+len(end) > maxKeyBytes:
		return s.refuse(tooManyKeys)
	}
	if err := s.opts.Permit(s.ctx, key, end); err != nil {
		return s.refuse(err.Error())
	}
	if id == 0 {
		id = s.nextID
		s.nextID++
	}
	w := &watch{stream: s, id: id, from: r.StartRevision, prevKV: r.PrevKv, fragment: r.Fragment, notify: r.ProgressNotify}
	for _, f := range r.Filters {
		w.noPut = w.noPut || f == pb.WatchCreateRequest_NOPUT
		w.noDelete = w.noDelete || f == pb.WatchCreateRequest_NODELETE
	}
	w.w = s.opts.Engine.Watch(mvccwatch.Options{
		Key: key, End: end, FromRevision: r.StartRevision, PrevKV: r.PrevKv, MaxBytes: min(batchBytes, s.opts.FragmentBytes), Notify: w.queue,
	})
	s.watches[id] = w
	w.keyBytes = len(key) + len(end)
	s.keyBytes += w.keyBytes
	if w.notify && s.progressTicker == nil {
		s.progressTicker = time.NewTicker(s.opts.Progress + rand.N(s.opts.Progress/10+1))
		s.progressTick = s.progressTicker.C
	}
	// A client that gave no start revision resumes, after a disconnect, from the revision in this header.
	revision := w.w.Progress()
	if r.StartRevision > 0 {
		revision = s.opts.Engine.Revision()
	}
	if err := s.respond(&pb.WatchResponse{Header: s.opts.Header(revision), WatchId: id, Created: true}); err != nil {
		return err
	}
	w.queue()
	return nil
}

// respond sends the given response.
func (s *Stream) respond(r *pb.WatchResponse) error {
	return s.send(func() (*pb.WatchResponse, error) { return r, nil })
}

// refuse sends the response that refuses a create request, with the reason.
func (s *Stream) refuse(reason string) error {
	return s.respond(&pb.WatchResponse{
		Header: s.opts.Header(s.opts.Engine.Revision()), WatchId: invalidID, Created: true, Canceled: true, CancelReason: reason,
	})
}

func (s *Stream) remove(w *watch) {
	delete(s.watches, w.id)
	s.keyBytes -= w.keyBytes
	w.closed = true
	w.w.Close()
}

// queue adds the watch to stream.ready and wakes the goroutine of Serve. The engine calls queue when there may be new
// events; queue must not block the engine.
func (w *watch) queue() {
	s := w.stream
	s.mu.Lock()
	first := !w.queued
	if first {
		w.queued = true
		s.ready = append(s.ready, w)
	}
	s.mu.Unlock()
	if !first {
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// sendReady sends one batch of events of each watch in s.ready. The engine calls queue again for a watch that has more
// events.
func (s *Stream) sendReady() error {
	s.mu.Lock()
	list := s.ready
	s.ready = nil
	for _, w := range list {
		w.queued = false
	}
	s.mu.Unlock()
	for _, w := range list {
		if w.closed {
			continue
		}
		if err := s.sendBatch(w); err != nil {
			return err
		}
	}
	if s.progressRequested {
		return s.respondProgress()
	}
	return nil
}

// sendBatch sends the next batch of events of a watch, if there is one.
func (s *Stream) sendBatch(w *watch) error {
	var more []*pb.WatchResponse
	err := s.send(func() (*pb.WatchResponse, error) {
		all, err := s.nextResponses(w)
		if len(all) > 0 {
			more = all[1:]
			return all[0], err
		}
		return nil, err
	})
	for _, r := range more {
		if err != nil {
			return err
		}
		err = s.respond(r)
	}
	return err
}

// nextResponses reads the next batch of events of a watch. It returns the responses that contain the batch, or the
// response that cancels the watch. Only a watch with fragments may need more than one response for a batch.
func (s *Stream) nextResponses(w *watch) ([]*pb.WatchResponse, error) {
	batch, err := w.w.Next(s.canceled)
	// Without fragments, the rest of a revision is read at once. Otherwise every watch of the stream could have an
	// incomplete revision in memory.
	for err == nil && batch.Partial && !w.fragment {
		w.partial = append(w.partial, batch.Events...)
		batch, err = w.w.Next(s.canceled)
	}
	if err != nil {
		return s.cancelResponse(w, err)
	}
	events := batch.Events
	if len(w.partial) > 0 {
		events, w.partial = append(w.partial, events...), nil
	}
	last := events[len(events)-1].KV.ModRevision
	out := w.events(events)
	if len(out) == 0 && !batch.Partial {
		return nil, nil
	}
	w.idle = false
	r := &pb.WatchResponse{Header: s.opts.Header(max(batch.Revision, last)), WatchId: w.id, Events: out}
	if !w.fragment {
		return []*pb.WatchResponse{r}, nil
	}
	return s.fragments(r, batch.Partial), nil
}

// cancelResponse handles an error of Watcher.Next. If the error only means that there are no events, it returns
// nothing. If the events were compacted, it returns the response that cancels the watch. Otherwise it returns the error
// that ends the stream.
func (s *Stream) cancelResponse(w *watch, err error) ([]*pb.WatchResponse, error) {
	if errors.Is(err, context.Canceled) {
		return nil, nil
	}
	revision := s.opts.Engine.Revision()
	r := &pb.WatchResponse{Header: s.opts.Header(revision), WatchId: w.id, Canceled: true}
	var compacted *mvcc.CompactedError
	switch {
	case errors.As(err, &compacted):
		r.CompactRevision = compacted.CompactRevision
	// These errors have the code Unavailable and end the stream; the client then resumes its watches here or on another
	// member.
	case errors.Is(err, mvcc.ErrRestored):
		return nil, rpctypes.ErrGRPCLeaderChanged
	case errors.Is(err, mvcc.ErrClosed):
		return nil, rpctypes.ErrGRPCStopped
	default:
		return nil, fmt.Errorf("read events: %w", err)
	}
	s.remove(w)
	return []*pb.WatchResponse{r}, nil
}

// sendProgress sends progress notifications to the watches that requested them and had no events since the last call.
func (s *Stream) sendProgress() error {
	for _, w := range s.watches {
		if !w.notify {
			continue
		}
		if !w.idle {
			w.idle = true
			continue
		}
		revision, current := w.current()
		if !current || revision < w.from {
			continue
		}
		if err := s.respond(&pb.WatchResponse{Header: s.opts.Header(revision), WatchId: w.id}); err != nil {
			return err
		}
	}
	return nil
}

// current returns the revision that the watch has progressed to. The result current reports whether all events up to
// that revision were sent.
func (w *watch) current() (revision int64, current bool) {
	revision = w.w.Progress()
	w.stream.mu.Lock()
	defer w.stream.mu.Unlock()
	return revision, !w.queued && len(w.partial) == 0
}

// respondProgress responds to a progress request with the lowest revision among those that the watches of the stream
// have progressed to. While events are left to send, it does nothing; sendReady calls it again. If a watch starts at a
// future revision, or the stream has no watch, the request is ignored.
func (s *Stream) respondProgress() error {
	lowest := int64(-1)
	for _, w := range s.watches {
		revision, current := w.current()
		if !current {
			return nil // sendReady calls respondProgress again
		}
		if revision < w.from {
			s.progressRequested = false
			return nil
		}
		if lowest < 0 || revision < lowest {
			lowest = revision
		}
	}
	s.progressRequested = false
	if lowest < 0 {
		return nil
	}
	return s.respond(&pb.WatchResponse{Header: s.opts.Header(lowest), WatchId: invalidID})
}
