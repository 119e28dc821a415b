// Package watch serves streams of etcd's Watch: many watches over one stream, each from its own revision.
//
// It reads events from the engine and speaks etcdserverpb; who the client is and what it may see is asked through
// Options.Permit. It must not know gRPC, members or consensus.
//
// A stream has one goroutine that sends, which owns all of its watches, and one that receives. A watch costs no
// goroutine and no queue: the engine tells the stream which watches have something to see, and the stream asks them in
// turn for one batch each while the client takes what is sent. A batch is read only when the server lets the stream
// send: then the client has taken what was sent before, and the member has memory for one more. So a slow client holds
// back nothing but itself, and memory is bounded by the requests that wait (16), the keys of the watches (maxKeyBytes)
// and the batch that is being sent.
//
// # Progress
//
// A revision in a header that carries no event says that all events up to it were sent: it is read from the watch, never
// from the engine (etcd#15220). What a client asks for is answered when nothing is left to send, and not at all while a
// watch of the stream begins in the future, or there is none; etcd drops the question too when something is left.
//
// # Choices
//
//   - A revision is sent whole, in one answer, unless the watch asked for fragments.
//   - A revision with more than Options.FragmentBytes is cut for a watch with fragments where that size is reached;
//     answers hold about batchBytes, or one revision, otherwise.
//   - An event whose past was compacted before it could be read ends a watch with prev_kv: etcd leaves prev_kv out.
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

// Options of streams; all are required.
type Options struct {
	Engine *mvcc.Engine
	// Header makes the header of an answer as of a revision.
	Header func(revision int64) *pb.ResponseHeader
	// Permit says whether the client whose context it is may watch [key, end). It answers one of etcd's errors.
	Permit func(ctx context.Context, key, end []byte) error
	// Progress is the time between two notices to a watch that asked for them and sees no events; a tenth is added at
	// random, so that not all are sent at once.
	Progress time.Duration
	// FragmentBytes is how large an answer to a watch with fragments becomes.
	FragmentBytes int
}

// invalidID stands for no watch, or all.
const invalidID = -1

// Texts that clients know.
const (
	duplicateID = "mvcc: duplicate watch ID provided on the WatchStream"
	emptyRange  = "mvcc: watcher range is empty"
)

// Bounds on the watches of one stream. Each watch costs the member about 1 KiB plus its keys. A watch beyond the bounds
// is refused and the stream stays open. etcd has no such bounds.
const (
	maxWatches  = 1 << 16
	maxKeyBytes = 16 << 20
)

// Texts of refusals that are not etcd's.
const (
	tooManyWatches = "etcdserver: too many watches on this stream: open another one"
	tooManyKeys    = "etcdserver: the keys of the watches on this stream are too long together: open another one"
)

// batchBytes is about how many bytes of keys and values a batch has, unless one revision has more. It is less than
// etcd's 1 MiB because the bytes that clients have not taken are bounded, and a stream that waits for its client holds
// one batch.
const batchBytes = 256 << 10

// waiting is how many requests of a stream may wait to be carried out.
const waiting = 16

// Send sends an answer. It calls make once the stream may send, and sends nothing if make returns nil. It returns the
// error of make.
type Send func(make func() (*pb.WatchResponse, error)) error

// Stream is the watches of one client's stream.
type Stream struct {
	opts *Options
	ctx  context.Context
	send Send

	// Owned by Serve.
	watches  map[int64]*watch
	nextID   int64
	keyBytes int  // of the ranges of all watches
	asked    bool // for progress, and not answered
	notices  *time.Ticker
	now      context.Context // ended: Next returns what is there
	progress <-chan time.Time

	wake chan struct{} // capacity 1

	mu    sync.Mutex
	ready []*watch // that may have something to see
}

// watch is one watch of a stream.
type watch struct {
	stream   *Stream
	id       int64
	from     int64
	keyBytes int // of its range
	w        *mvccwatch.Watcher
	noPut    bool
	noDelete bool
	prevKV   bool
	fragment bool
	notify   bool
	quiet    bool              // nothing was sent since the last notice was due
	held     []mvccwatch.Event // the begin of a revision that is sent whole

	queued bool // in stream.ready; guarded by stream.mu
	closed bool // no longer in stream.watches
}

// Serve answers the requests that receive returns until ctx or the client ends the stream, or an answer cannot be sent.
// receive is called by a goroutine that ends when receive fails, which it must once Serve has returned.
func Serve(ctx context.Context, opts *Options, receive func() (*pb.WatchRequest, error), send Send) error {
	now, cancel := context.WithCancel(context.Background())
	cancel()
	s := &Stream{opts: opts, ctx: ctx, send: send, watches: map[int64]*watch{}, now: now, wake: make(chan struct{}, 1)}
	defer s.close()
	requests := make(chan *pb.WatchRequest, waiting)
	ended := make(chan error, 1)
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			r, err := receive()
			if errors.Is(err, io.EOF) {
				return // the client asks nothing more, and goes on listening
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
			if err := s.carryOut(r); err != nil {
				return err
			}
		case <-s.wake:
			if err := s.drain(); err != nil {
				return err
			}
		case <-s.progress:
			if err := s.notice(); err != nil {
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
	if s.notices != nil {
		s.notices.Stop()
	}
	for _, w := range s.watches {
		w.w.Close()
	}
}

// carryOut does what the client asks for.
func (s *Stream) carryOut(r *pb.WatchRequest) error {
	switch r := r.RequestUnion.(type) {
	case *pb.WatchRequest_CreateRequest:
		if r.CreateRequest != nil {
			return s.create(r.CreateRequest)
		}
	case *pb.WatchRequest_CancelRequest:
		if w := s.watches[r.CancelRequest.GetWatchId()]; r.CancelRequest != nil && w != nil {
			revision := w.w.Progress()
			s.remove(w)
			return s.answer(&pb.WatchResponse{Header: s.opts.Header(revision), WatchId: w.id, Canceled: true})
		}
	case *pb.WatchRequest_ProgressRequest:
		s.asked = true
		return s.answerProgress()
	}
	return nil
}

// create starts a watch.
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
		Key: key, End: end, FromRevision: r.StartRevision, PrevKV: r.PrevKv, MaxBytes: min(batchBytes, s.opts.FragmentBytes), Notify: w.ready,
	})
	s.watches[id] = w
	w.keyBytes = len(key) + len(end)
	s.keyBytes += w.keyBytes
	if w.notify && s.notices == nil {
		s.notices = time.NewTicker(s.opts.Progress + rand.N(s.opts.Progress/10+1))
		s.progress = s.notices.C
	}
	// A client that named no revision goes on from this one after it was cut off.
	revision := w.w.Progress()
	if r.StartRevision > 0 {
		revision = s.opts.Engine.Revision()
	}
	if err := s.answer(&pb.WatchResponse{Header: s.opts.Header(revision), WatchId: id, Created: true}); err != nil {
		return err
	}
	w.ready()
	return nil
}

// answer sends an answer that is there already.
func (s *Stream) answer(r *pb.WatchResponse) error {
	return s.send(func() (*pb.WatchResponse, error) { return r, nil })
}

// refuse answers a request for a watch that cannot be had.
func (s *Stream) refuse(reason string) error {
	return s.answer(&pb.WatchResponse{
		Header: s.opts.Header(s.opts.Engine.Revision()), WatchId: invalidID, Created: true, Canceled: true, CancelReason: reason,
	})
}

func (s *Stream) remove(w *watch) {
	delete(s.watches, w.id)
	s.keyBytes -= w.keyBytes
	w.closed = true
	w.w.Close()
}

// ready queues the watch. The engine calls it too, and must not wait for it.
func (w *watch) ready() {
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

// drain sends one batch of each watch that is ready. Those that have more to see queue again by themselves.
func (s *Stream) drain() error {
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
		if err := s.pass(w); err != nil {
			return err
		}
	}
	if s.asked {
		return s.answerProgress()
	}
	return nil
}

// pass sends the next batch of a watch, if there is one.
func (s *Stream) pass(w *watch) error {
	var rest []*pb.WatchResponse
	err := s.send(func() (*pb.WatchResponse, error) {
		all, err := s.next(w)
		if len(all) > 0 {
			rest = all[1:]
			return all[0], err
		}
		return nil, err
	})
	for _, r := range rest {
		if err != nil {
			return err
		}
		err = s.answer(r)
	}
	return err
}

// next returns the next batch of a watch as answers, or how the watch ended. There is more than one answer if the watch
// has fragments.
func (s *Stream) next(w *watch) ([]*pb.WatchResponse, error) {
	batch, err := w.w.Next(s.now)
	// The rest of a revision is read at once: otherwise each watch of the stream could hold the beginning of one.
	for err == nil && batch.Partial && !w.fragment {
		w.held = append(w.held, batch.Events...)
		batch, err = w.w.Next(s.now)
	}
	if err != nil {
		return s.end(w, err)
	}
	events := batch.Events
	if len(w.held) > 0 {
		events, w.held = append(w.held, events...), nil
	}
	last := events[len(events)-1].KV.ModRevision
	out := w.events(events)
	if len(out) == 0 && !batch.Partial {
		return nil, nil
	}
	w.quiet = false
	r := &pb.WatchResponse{Header: s.opts.Header(max(batch.Revision, last)), WatchId: w.id, Events: out}
	if !w.fragment {
		return []*pb.WatchResponse{r}, nil
	}
	return s.fragments(r, batch.Partial), nil
}

// end returns the answer that a watch is over, or nothing if it only has nothing to see.
func (s *Stream) end(w *watch, err error) ([]*pb.WatchResponse, error) {
	if errors.Is(err, context.Canceled) {
		return nil, nil
	}
	revision := s.opts.Engine.Revision()
	r := &pb.WatchResponse{Header: s.opts.Header(revision), WatchId: w.id, Canceled: true}
	var compacted *mvcc.CompactedError
	switch {
	case errors.As(err, &compacted):
		r.CompactRevision = compacted.CompactRevision
	// The client goes on from where it was, elsewhere or here: it does after an error that says unavailable.
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

// notice tells watches that see no events how far they are.
func (s *Stream) notice() error {
	for _, w := range s.watches {
		if !w.notify {
			continue
		}
		if !w.quiet {
			w.quiet = true
			continue
		}
		revision, current := w.current()
		if !current || revision < w.from {
			continue
		}
		if err := s.answer(&pb.WatchResponse{Header: s.opts.Header(revision), WatchId: w.id}); err != nil {
			return err
		}
	}
	return nil
}

// current is how far a watch is, and whether that is as far as it could be.
func (w *watch) current() (revision int64, current bool) {
	revision = w.w.Progress()
	w.stream.mu.Lock()
	defer w.stream.mu.Unlock()
	return revision, !w.queued && len(w.held) == 0
}

// answerProgress answers the client's question once nothing is left to send.
func (s *Stream) answerProgress() error {
	least := int64(-1)
	for _, w := range s.watches {
		revision, current := w.current()
		if !current {
			return nil // asked again after the next batch
		}
		if revision < w.from {
			s.asked = false
			return nil
		}
		if least < 0 || revision < least {
			least = revision
		}
	}
	s.asked = false
	if least < 0 {
		return nil
	}
	return s.answer(&pb.WatchResponse{Header: s.opts.Header(least), WatchId: invalidID})
}
