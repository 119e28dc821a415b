package watch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// testStore is an engine to which writes are applied without consensus.
type testStore struct {
	*mvcc.Engine
	t  *testing.T
	mu sync.Mutex
}

func newTestStore(t *testing.T) *testStore {
	e, err := mvcc.Open(vfs.NewMem(), "kv", mvcc.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return &testStore{Engine: e, t: t}
}

func (s *testStore) apply(data []byte, err error) int64 {
	s.t.Helper()
	require.NoError(s.t, err)
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.Apply([]command.Command{{Index: s.Applied().Index + 1, Term: 1, Data: data}})
	require.NoError(s.t, err)
	require.Equal(s.t, command.RefusedNot, r[0].Refused)
	return r[0].Revision
}

func (s *testStore) put(key, value string) int64 {
	return s.apply(command.EncodeProgram(command.Program{Steps: []command.Step{{Kind: command.StepPut, Key: []byte(key), Value: []byte(value)}}}))
}

// putAll puts the keys in one revision.
func (s *testStore) putAll(value []byte, keys ...string) int64 {
	var steps []command.Step
	for _, k := range keys {
		steps = append(steps, command.Step{Kind: command.StepPut, Key: []byte(k), Value: value})
	}
	return s.apply(command.EncodeProgram(command.Program{Steps: steps}))
}

func (s *testStore) remove(key string) int64 {
	return s.apply(command.EncodeProgram(command.Program{Steps: []command.Step{{Kind: command.StepDelete, Key: []byte(key)}}}))
}

// client is the client of a watch stream that Serve serves.
type client struct {
	t         *testing.T
	requests  chan *pb.WatchRequest
	responses chan *pb.WatchResponse
	ended     chan error
	stop      context.CancelFunc
}

func openStream(t *testing.T, s *testStore, change ...func(*Options)) *client {
	o := &Options{
		Engine: s.Engine, Header: func(revision int64) *pb.ResponseHeader { return &pb.ResponseHeader{Revision: revision} },
		Permit:   func(context.Context, []byte, []byte) error { return nil },
		Progress: time.Hour, FragmentBytes: 3 << 19,
	}
	for _, f := range change {
		f(o)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &client{t: t, requests: make(chan *pb.WatchRequest), responses: make(chan *pb.WatchResponse), ended: make(chan error, 1), stop: cancel}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.ended <- Serve(ctx, o, func() (*pb.WatchRequest, error) {
			select {
			case r, ok := <-c.requests:
				if !ok {
					return nil, io.EOF
				}
				return r, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}, func(make func() (*pb.WatchResponse, error)) error {
			r, err := make()
			if r == nil {
				return err
			}
			select {
			case c.responses <- r:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return c
}

func (c *client) create(r *pb.WatchCreateRequest) {
	c.requests <- &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: r}}
}

func (c *client) progress() {
	c.requests <- &pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}
}

func (c *client) cancel(id int64) {
	c.requests <- &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}}
}

func (c *client) next() *pb.WatchResponse {
	c.t.Helper()
	select {
	case r := <-c.responses:
		return r
	case err := <-c.ended:
		c.t.Fatalf("the stream ended: %v", err)
	case <-time.After(20 * time.Second):
		c.t.Fatal("no response within 20 s")
	}
	return nil
}

// mustCreate creates a watch and returns its ID.
func (c *client) mustCreate(r *pb.WatchCreateRequest) int64 {
	c.t.Helper()
	c.create(r)
	a := c.next()
	require.True(c.t, a.Created)
	require.False(c.t, a.Canceled, a.CancelReason)
	return a.WatchId
}

func text(r *pb.WatchResponse) (s string) {
	for _, e := range r.Events {
		if e.Type == mvccpb.Event_DELETE {
			s += fmt.Sprintf("-%s@%d ", e.Kv.Key, e.Kv.ModRevision)
		} else {
			s += fmt.Sprintf("%s=%s@%d ", e.Kv.Key, e.Kv.Value, e.Kv.ModRevision)
		}
	}
	return s
}

func TestWatchReceivesEvents(t *testing.T) {
	s := newTestStore(t)
	s.put("a", "0")
	c := openStream(t, s)
	c.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("c"), PrevKv: true})
	created := c.next()
	require.True(t, created.Created)
	require.EqualValues(t, 2, created.Header.Revision)
	s.put("a", "1")
	one := c.next()
	s.put("z", "1")
	s.remove("a")
	require.Equal(t, "a=1@3 ", text(one))
	require.Equal(t, "0", string(one.Events[0].PrevKv.Value))
	two := c.next()
	require.Equal(t, "-a@5 ", text(two))
	require.Equal(t, "1", string(two.Events[0].PrevKv.Value))
	require.EqualValues(t, 5, two.Header.Revision)
}

func TestWatchFromOldRevision(t *testing.T) {
	s := newTestStore(t)
	for i := range 5 {
		s.put("a", fmt.Sprint(i))
	}
	c := openStream(t, s)
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), StartRevision: 3})
	require.Equal(t, "a=1@3 a=2@4 a=3@5 a=4@6 ", text(c.next()))
	s.put("a", "5")
	require.Equal(t, "a=5@7 ", text(c.next()))
}

func TestFilters(t *testing.T) {
	s := newTestStore(t)
	c := openStream(t, s)
	noPut := c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}})
	noDelete := c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NODELETE}})
	s.put("a", "1")
	r := c.next()
	require.Equal(t, noDelete, r.WatchId)
	require.Equal(t, "a=1@2 ", text(r))
	s.remove("a")
	r = c.next()
	require.Equal(t, noPut, r.WatchId)
	require.Equal(t, "-a@3 ", text(r))
}

func TestWatchIDs(t *testing.T) {
	s := newTestStore(t)
	c := openStream(t, s)
	require.EqualValues(t, 0, c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a")}))
	require.EqualValues(t, 1, c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), WatchId: 1}))
	require.EqualValues(t, 2, c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a")}), "an ID that is in use is skipped")
	c.create(&pb.WatchCreateRequest{Key: []byte("a"), WatchId: 1})
	r := c.next()
	require.True(t, r.Created && r.Canceled)
	require.EqualValues(t, -1, r.WatchId)
	require.Equal(t, duplicateID, r.CancelReason)
	c.cancel(1)
	r = c.next()
	require.True(t, r.Canceled)
	require.EqualValues(t, 1, r.WatchId)
	require.EqualValues(t, 1, c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), WatchId: 1}))
	c.cancel(99) // there is no such watch, so there is no response
	c.create(&pb.WatchCreateRequest{Key: []byte("b"), RangeEnd: []byte("a")})
	require.Equal(t, emptyRange, c.next().CancelReason)
	c.create(&pb.WatchCreateRequest{Key: []byte("b"), StartRevision: -1})
	require.Equal(t, rpctypes.ErrCompacted.Error(), c.next().CancelReason)
}

func TestWatchWithoutPermissionIsRefused(t *testing.T) {
	s := newTestStore(t)
	c := openStream(t, s, func(o *Options) {
		o.Permit = func(_ context.Context, key, _ []byte) error {
			if string(key) == "secret" {
				return rpctypes.ErrGRPCPermissionDenied
			}
			return nil
		}
	})
	c.create(&pb.WatchCreateRequest{Key: []byte("secret")})
	r := c.next()
	require.True(t, r.Created && r.Canceled)
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied.Error(), r.CancelReason)
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("other")})
	s.put("secret", "1")
	s.put("other", "1")
	require.Equal(t, "other=1@3 ", text(c.next()))
}

func TestWatchFromCompactedRevisionIsCanceled(t *testing.T) {
	s := newTestStore(t)
	for range 5 {
		s.put("a", "x")
	}
	s.apply(command.EncodeCompact(4), nil)
	c := openStream(t, s)
	id := c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), StartRevision: 3})
	r := c.next()
	require.True(t, r.Canceled)
	require.Equal(t, id, r.WatchId)
	require.EqualValues(t, 4, r.CompactRevision)
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), StartRevision: 4})
	require.Equal(t, "a=x@4 a=x@5 a=x@6 ", text(c.next()))
}

// TestProgressNeverAheadOfEvents checks that a progress response is never sent before all events up to its revision
// (etcd#15220).
func TestProgressNeverAheadOfEvents(t *testing.T) {
	s := newTestStore(t)
	c := openStream(t, s)
	const keys = 10
	for i := range keys {
		c.mustCreate(&pb.WatchCreateRequest{Key: []byte(fmt.Sprint("k", i)), StartRevision: 2})
	}
	const writes = 500
	go func() {
		for i := range writes {
			s.put(fmt.Sprint("k", i%keys), "v")
		}
	}()
	requestCtx, stop := context.WithCancel(t.Context())
	var requester sync.WaitGroup
	requester.Go(func() {
		request := &pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}
		for {
			select {
			case c.requests <- request:
			case <-requestCtx.Done():
				return
			}
		}
	})
	// Read until all events have arrived and a progress response has their last revision.
	seen := map[int64]bool{}
	for progress := int64(0); progress < writes+1; {
		r := c.next()
		for _, e := range r.Events {
			require.Greater(t, e.Kv.ModRevision, progress, "an event up to the reported progress")
			require.False(t, seen[e.Kv.ModRevision])
			seen[e.Kv.ModRevision] = true
		}
		if len(r.Events) == 0 {
			require.EqualValues(t, -1, r.WatchId)
			require.GreaterOrEqual(t, r.Header.Revision, progress)
			progress = r.Header.Revision
			for at := int64(2); at <= progress; at++ {
				require.True(t, seen[at], "progress was reported before the event of revision %d", at)
			}
		}
	}
	require.Len(t, seen, writes)
	// Pending responses are discarded when the stream ends.
	stop()
	go func() {
		for range c.responses {
		}
	}()
	requester.Wait()
	c.stop()
	<-c.ended
	close(c.responses)
}

// TestProgressOfNewWatch checks that the progress of a new watch is at least the revision at which it was created
// (etcd#17507).
func TestProgressOfNewWatch(t *testing.T) {
	s := newTestStore(t)
	s.put("a", "1")
	c := openStream(t, s)
	c.create(&pb.WatchCreateRequest{Key: []byte("zzz")})
	created := c.next()
	require.True(t, created.Created)
	c.progress()
	r := c.next()
	require.EqualValues(t, -1, r.WatchId)
	require.GreaterOrEqual(t, r.Header.Revision, created.Header.Revision)
	s.put("other", "1")
	c.progress()
	require.EqualValues(t, 3, c.next().Header.Revision, "progress increases without events of the watched key")
}

func TestProgressIsSentAfterPendingEvents(t *testing.T) {
	s := newTestStore(t)
	for range 3000 { // three batches
		s.put("a", "x")
	}
	c := openStream(t, s)
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), StartRevision: 2})
	c.progress()
	events := 0
	for {
		r := c.next()
		if len(r.Events) == 0 {
			require.EqualValues(t, -1, r.WatchId)
			require.EqualValues(t, 3001, r.Header.Revision)
			break
		}
		events += len(r.Events)
	}
	require.Equal(t, 3000, events)
}

// TestWatchFromFutureRevision checks that a watch with a future start revision gets neither events nor progress of
// earlier revisions (etcd#20221).
func TestWatchFromFutureRevision(t *testing.T) {
	s := newTestStore(t)
	s.put("a", "1")
	c := openStream(t, s, func(o *Options) { o.Progress = time.Millisecond })
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), StartRevision: 5, ProgressNotify: true})
	c.progress() // no response, since the watch begins at revision 5
	s.put("a", "2")
	s.put("a", "3")
	s.put("a", "4")
	r := c.next()
	require.Equal(t, "a=4@5 ", text(r))
}

func TestProgressNotify(t *testing.T) {
	s := newTestStore(t)
	c := openStream(t, s, func(o *Options) { o.Progress = time.Millisecond })
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("quiet")})
	id := c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a"), ProgressNotify: true})
	s.put("other", "1")
	for {
		r := c.next()
		require.Equal(t, id, r.WatchId)
		require.Empty(t, r.Events)
		if r.Header.Revision == 2 {
			break
		}
	}
}

func TestFragments(t *testing.T) {
	s := newTestStore(t)
	c := openStream(t, s, func(o *Options) { o.FragmentBytes = 64 << 10 })
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte("l"), Fragment: true})
	unfragmented := c.mustCreate(&pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte("l")})
	s.putAll(make([]byte, 20<<10), "k1", "k2", "k3", "k4", "k5", "k6", "k7")
	var fragmentEvents, fragmentCount int
	var all *pb.WatchResponse
	for done := false; !done || all == nil; {
		r := c.next()
		if r.WatchId == unfragmented {
			require.False(t, r.Fragment)
			all = r
			continue
		}
		fragmentCount++
		fragmentEvents += len(r.Events)
		require.LessOrEqual(t, proto.Size(r), 64<<10)
		done = !r.Fragment
	}
	require.Equal(t, 7, fragmentEvents)
	require.Greater(t, fragmentCount, 1)
	require.Len(t, all.Events, 7, "one revision is one response")
}

// TestRevisionIsOneResponse checks that all events of a revision are sent in one response, even if they do not fit into
// a batch.
func TestRevisionIsOneResponse(t *testing.T) {
	s := newTestStore(t)
	var keys []string
	for i := range 5000 {
		keys = append(keys, fmt.Sprintf("k%04d", i))
	}
	c := openStream(t, s)
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte("l")})
	revision := s.putAll([]byte("v"), keys...)
	r := c.next()
	require.Len(t, r.Events, 5000)
	require.Equal(t, revision, r.Header.Revision)
	s.apply(command.EncodeProgram(command.Program{Steps: []command.Step{{Kind: command.StepDelete, Key: []byte("k"), End: []byte("l")}}}))
	require.Len(t, c.next().Events, 5000)
}

// TestGoroutinesOfManyWatches checks that the number of goroutines is limited by the number of streams, whatever the
// number of watches.
func TestGoroutinesOfManyWatches(t *testing.T) {
	s := newTestStore(t)
	const streams, each = 100, 100
	before := runtime.NumGoroutine()
	clients := make([]*client, streams)
	for i := range clients {
		clients[i] = openStream(t, s)
		for j := range each {
			clients[i].mustCreate(&pb.WatchCreateRequest{Key: []byte(fmt.Sprintf("k%d", i*each+j))})
		}
	}
	require.LessOrEqual(t, runtime.NumGoroutine()-before, 3*streams)
	require.Equal(t, streams*each, s.Stats().Watchers)
	s.put("k4242", "x")
	require.Equal(t, "k4242=x@2 ", text(clients[42].next()))
	for _, c := range clients {
		c.stop()
		<-c.ended
		c.ended <- nil
	}
	require.Zero(t, s.Stats().Watchers)
}

// TestSlowClientDelaysNoOtherStream checks that a client that does not read delays neither writes nor other streams.
func TestSlowClientDelaysNoOtherStream(t *testing.T) {
	s := newTestStore(t)
	slow, quick := openStream(t, s), openStream(t, s)
	slow.mustCreate(&pb.WatchCreateRequest{Key: []byte("a")})
	quick.mustCreate(&pb.WatchCreateRequest{Key: []byte("a")})
	for i := range 2000 {
		s.put("a", fmt.Sprint(i))
	}
	last := func(c *client) {
		for next := int64(2); next < 2002; {
			for _, e := range c.next().Events {
				require.Equal(t, next, e.Kv.ModRevision)
				next++
			}
		}
	}
	last(quick)
	last(slow)
}

func TestStreamContinuesAfterClientCloseSend(t *testing.T) {
	s := newTestStore(t)
	c := openStream(t, s)
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a")})
	close(c.requests)
	s.put("a", "1")
	require.Equal(t, "a=1@2 ", text(c.next()))
	c.stop()
	require.True(t, errors.Is(<-c.ended, context.Canceled))
	c.ended <- nil
}

// TestStreamEndsWhenEngineCloses checks that streams end with ErrGRPCStopped when the engine is closed, because clients
// use another member after that error.
func TestStreamEndsWhenEngineCloses(t *testing.T) {
	e, err := mvcc.Open(vfs.NewMem(), "kv", mvcc.Options{})
	require.NoError(t, err)
	c := openStream(t, &testStore{Engine: e, t: t})
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a")})
	require.NoError(t, e.Close())
	require.Equal(t, rpctypes.ErrGRPCStopped, <-c.ended)
	c.ended <- nil
}

// TestKeyBytesOfStreamAreLimited checks that a watch is refused if the total size of the keys of a stream's watches
// would exceed the limit, and that canceling a watch makes room for another.
func TestKeyBytesOfStreamAreLimited(t *testing.T) {
	s := newTestStore(t)
	c := openStream(t, s)
	long := bytes.Repeat([]byte("k"), 1<<20)
	for range maxKeyBytes >> 20 {
		c.mustCreate(&pb.WatchCreateRequest{Key: long})
	}
	c.create(&pb.WatchCreateRequest{Key: []byte("a")})
	r := c.next()
	require.True(t, r.Canceled)
	require.Equal(t, tooManyKeys, r.CancelReason)
	c.cancel(0)
	require.True(t, c.next().Canceled)
	c.mustCreate(&pb.WatchCreateRequest{Key: []byte("a")})
	require.Equal(t, maxKeyBytes>>20, s.Stats().Watchers)
}

// TestRevisionIsReadWhole checks that all events of a revision larger than a batch are read in one call of make.
// Otherwise each watch of the stream could have an incomplete revision in memory.
func TestRevisionIsReadWhole(t *testing.T) {
	s := newTestStore(t)
	var keys []string
	for i := range 20 {
		keys = append(keys, fmt.Sprintf("k%02d", i))
	}
	s.putAll(make([]byte, batchBytes/4), keys...)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	requests := make(chan *pb.WatchRequest, 1)
	requests <- &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{
		CreateRequest: &pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte("l"), StartRevision: 2},
	}}
	var sizes []int // numbers of events in the responses after the response to the creation; 0 for no response
	o := &Options{
		Engine: s.Engine, Header: func(revision int64) *pb.ResponseHeader { return &pb.ResponseHeader{Revision: revision} },
		Permit: func(context.Context, []byte, []byte) error { return nil }, Progress: time.Hour, FragmentBytes: 3 << 19,
	}
	err := Serve(ctx, o, func() (*pb.WatchRequest, error) {
		select {
		case r := <-requests:
			return r, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}, func(make func() (*pb.WatchResponse, error)) error {
		r, err := make()
		if r.GetCreated() {
			return err
		}
		if sizes = append(sizes, len(r.GetEvents())); len(r.GetEvents()) > 0 {
			cancel()
		}
		return err
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, len(keys), sizes[0])
}
