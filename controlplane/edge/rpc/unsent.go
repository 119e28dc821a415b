package rpc

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of the bytes of messages that are in memory because the clients of streams have not read them. gRPC keeps such
// a message completely until its last byte is written to the connection, even if the handler has returned. A message
// that several streams send counts once per stream.
const (
	// MaxOrgUnsent is the limit for the streams of one org, in bytes. It is a quarter of MaxUnsent, so that fewer than
	// four orgs cannot make the streams of others wait.
	MaxOrgUnsent = 16 << 20
	// MaxUnsent is the limit for all streams of a member together, in bytes.
	MaxUnsent = 64 << 20
	// streamUnsent is how many bytes of earlier messages of a stream may be unsent when it sends one more. It is less
	// than the 64 KiB after which SendMsg blocks inside gRPC, where the stream could not be ended when its token
	// becomes invalid.
	streamUnsent = 32 << 10
	// reservation is how many bytes count as unsent while a stream builds its next message, whose size is not known yet.
	// It is the size of a large message, so that streams that build messages at the same time cannot exceed the limits
	// by many messages.
	reservation = 1 << 20
	// stallTime is the time after which a stream may be ended because its client has read nothing. This frees bytes for
	// waiting streams.
	stallTime = 5 * time.Second
	// closeTime is the time that the client of an ended stream has to read the remaining messages before its connection
	// is closed.
	closeTime = 2 * time.Second
	// tidyEvery is the time between two runs of endStalledStreams while a stream waits.
	tidyEvery = 250 * time.Millisecond
)

// unsent counts the bytes of messages that the clients of streams have not read.
type unsent struct {
	mu    *sync.Mutex // guards all below
	all   gate
	orgs  map[string]*gate
	flows map[*flow]struct{}
	timer *time.Timer // runs endStalledStreams; nil while no stream waits
}

func (u *unsent) init(mu *sync.Mutex) {
	*u = unsent{mu: mu, all: gate{most: MaxUnsent}, orgs: map[string]*gate{}, flows: map[*flow]struct{}{}}
}

// gate limits the unsent bytes of the streams of one org, or of all streams of the member. A stream may send while
// used is less than most. Streams that have to wait for this send in the order in which they came.
type gate struct {
	org   string
	most  int64
	used  int64 // unsent bytes and reservations
	flows int   // number of flows whose bytes count in this gate
	queue []chan struct{}
}

// enter makes a reservation for a stream that wants to send and returns nil. If the limit is reached, or other streams
// wait, it returns a channel that pass closes when it has made the reservation.
func (g *gate) enter() (turn chan struct{}) {
	if g.used < g.most && len(g.queue) == 0 {
		g.used += reservation
		return nil
	}
	turn = make(chan struct{})
	g.queue = append(g.queue, turn)
	return turn
}

// pass makes reservations for waiting streams, the first one first, until the limit is reached.
func (g *gate) pass() {
	for g.used < g.most && len(g.queue) > 0 {
		g.used += reservation
		close(g.queue[0])
		g.queue = g.queue[1:]
	}
}

// abandon is called for a stream that does not send after all. turn is the result of enter. If the stream still waits,
// abandon removes it from the queue. Otherwise it cancels the stream's reservation.
func (g *gate) abandon(turn chan struct{}) {
	if i := slices.Index(g.queue, turn); turn != nil && i >= 0 {
		g.queue = slices.Delete(g.queue, i, i+1)
		return
	}
	g.used -= reservation
	g.pass()
}

// flow counts the unsent bytes of one stream.
type flow struct {
	s    *Streams
	end  context.CancelCauseFunc
	slow error // error for end if the client reads nothing; nil means the usual fault

	// The fields below are guarded by unsent.mu.
	gate     *gate
	conn     *conn
	buffered int64
	reserved bool          // the stream builds a message, for which both gates have made a reservation
	since    time.Time     // when the client last read something, or when buffered became more than 0
	drained  chan struct{} // capacity 1: signals that buffered is at most streamUnsent
	ended    bool          // the stream was ended by endStalledStreams
	lost     bool          // the connection is closed, so nothing is buffered
	closed   bool          // the handler has returned
}

// unauthenticated replaces the org ID for the streams of unauthenticated callers. Without it their unsent bytes would
// count together with those of operators, who act in no org. No org has this ID.
const unauthenticated = "unauthenticated callers"

// Bound limits the bytes of messages on ss that the client has not read. SendMsg of the returned stream waits while the
// limits of a tenant's stream are reached. All streams with the same value of client together may have MaxOrgUnsent
// unread bytes. If the stream is ended because the client reads nothing, the context of the returned stream ends with
// the parameter slow as its cause. Call done when the handler has returned. The server must have the option Codec, and
// its listener the credentials of s.Credentials.
func (s *Streams) Bound(ss grpc.ServerStream, client string, slow error) (_ grpc.ServerStream, done func()) {
	ctx, end := context.WithCancelCause(ss.Context())
	f := s.newFlow(ctx, end)
	f.slow = slow
	f.bind(client)
	return &stream{ServerStream: ss, ctx: ctx, flow: f}, func() { f.close(); end(nil) }
}

// Unsent returns the total number of bytes that the clients of all streams have not read. A message that a stream is
// building counts as a reservation.
func (s *Streams) Unsent() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unsent.all.used
}

// Credentials wraps the credentials of a listener, so that s is notified when the connections of its streams are
// closed. Nil credentials mean plaintext.
func (s *Streams) Credentials(c credentials.TransportCredentials) credentials.TransportCredentials {
	return countConns(c, s)
}

// Codec returns the server option that is required for counting unsent bytes in a Streams.
func Codec() grpc.ServerOption { return grpc.ForceServerCodecV2(newCodec()) }

// newFlow returns the flow that counts the unsent bytes of the stream of ctx. The function end must end that stream.
func (s *Streams) newFlow(ctx context.Context, end context.CancelCauseFunc) *flow {
	f := &flow{s: s, end: end, drained: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unsent.flows[f] = struct{}{}
	if f.conn = s.conns[connOf(ctx)]; f.conn != nil {
		f.conn.flows[f] = struct{}{}
	}
	if c := auth.CallerOf(ctx); c != nil && c.Authenticated() {
		f.join("")
	} else {
		f.join(unauthenticated)
	}
	return f
}

// bind makes the stream's unsent bytes count for the given org. It has no effect while bytes are unsent, so call it
// before anything is sent.
func (f *flow) bind(org string) {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	if f.buffered == 0 {
		f.leave()
		f.join(org)
	}
}

func (f *flow) join(org string) {
	u := &f.s.unsent
	g := u.orgs[org]
	if g == nil {
		g = &gate{org: org, most: MaxOrgUnsent}
		u.orgs[org] = g
	}
	g.flows++
	f.gate = g
}

func (f *flow) leave() {
	if f.gate.flows--; f.gate.flows == 0 {
		delete(f.s.unsent.orgs, f.gate.org)
	}
}

// close is called when the stream's handler has returned. It removes f, the counter of the stream's unsent bytes, as
// soon as the client has read everything.
func (f *flow) close() {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	f.closed = true
	f.settle()
}

// settle removes f, the counter of the stream's unsent bytes, if the handler has returned and no bytes are unsent.
func (f *flow) settle() {
	if _, counted := f.s.unsent.flows[f]; !counted || !f.closed || f.buffered > 0 {
		return
	}
	delete(f.s.unsent.flows, f)
	if f.conn != nil {
		delete(f.conn.flows, f)
	}
	f.leave()
}

// ready waits until the stream may send, and makes a reservation for its next message. The stream may send when at most
// streamUnsent bytes of its earlier messages are unsent, and its org and the member are below their limits of unsent
// bytes. After ready has returned nil, hold must be called.
func (f *flow) ready(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	u := &f.s.unsent
	for {
		u.mu.Lock()
		if f.buffered <= streamUnsent {
			break
		}
		u.mu.Unlock()
		select {
		case <-f.drained:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	defer u.mu.Unlock()
	if err := f.enter(ctx, f.gate); err != nil {
		return err
	}
	if err := f.enter(ctx, &u.all); err != nil {
		f.gate.abandon(nil) // the stream waits no longer in the queue of its org
		return err
	}
	f.reserved = true
	return nil
}

// enter waits until g has made a reservation for the stream. It releases the lock while it waits. After an error there
// is no reservation.
func (f *flow) enter(ctx context.Context, g *gate) error {
	turn := g.enter()
	if turn == nil {
		return nil
	}
	u := &f.s.unsent
	if u.timer == nil {
		u.timer = time.AfterFunc(tidyEvery, f.s.endStalledStreams)
	}
	u.mu.Unlock()
	select {
	case <-turn:
	case <-ctx.Done():
	}
	u.mu.Lock()
	if ctx.Err() != nil {
		g.abandon(turn)
		return ctx.Err()
	}
	return nil
}

// hold adds n, which may be 0, to the unsent bytes of the stream, in place of the reservation that ready has made.
func (f *flow) hold(n int64) {
	u := &f.s.unsent
	u.mu.Lock()
	defer u.mu.Unlock()
	if f.reserved {
		f.reserved = false
		f.gate.used -= reservation
		u.all.used -= reservation
	}
	if !f.lost && n > 0 {
		if f.buffered == 0 {
			f.since = time.Now()
		}
		f.buffered += n
		f.gate.used += n
		u.all.used += n
	}
	f.gate.pass()
	u.all.pass()
}

// release subtracts n from the unsent bytes of the stream. It does nothing if the connection was closed before, because
// Close has then subtracted all of them.
func (f *flow) release(n int64) {
	u := &f.s.unsent
	u.mu.Lock()
	defer u.mu.Unlock()
	if !f.lost {
		f.free(n)
	}
}

func (f *flow) free(n int64) {
	u := &f.s.unsent
	f.since = time.Now()
	f.buffered -= n
	f.gate.used -= n
	u.all.used -= n
	if f.buffered <= streamUnsent {
		select {
		case f.drained <- struct{}{}:
		default:
		}
	}
	f.gate.pass()
	u.all.pass()
	f.settle()
}

// endStalledStreams frees memory for waiting streams. It ends streams whose clients have read nothing for at least
// stallTime, the longest first. It stops when the ended streams have enough unsent bytes for the waiting streams.
func (s *Streams) endStalledStreams() {
	u := &s.unsent
	u.mu.Lock()
	defer u.mu.Unlock()
	waiting := len(u.all.queue) > 0
	for _, g := range u.orgs {
		waiting = waiting || len(g.queue) > 0
	}
	if u.timer = nil; !waiting {
		return
	}
	u.timer = time.AfterFunc(tidyEvery, s.endStalledStreams)
	now := time.Now()
	var stalled []*flow
	soon := map[*gate]int64{} // bytes that become free when the clients or connections of ended streams are gone
	for f := range u.flows {
		switch {
		case f.ended:
			soon[f.gate] += f.buffered
			soon[&u.all] += f.buffered
		case f.buffered > 0 && now.Sub(f.since) >= stallTime:
			stalled = append(stalled, f)
		}
	}
	slices.SortFunc(stalled, func(a, b *flow) int { return a.since.Compare(b.since) })
	for _, f := range stalled {
		for _, g := range []*gate{f.gate, &u.all} {
			if !f.ended && len(g.queue) > 0 && g.used-soon[g] >= g.most/2 {
				soon[f.gate] += f.buffered
				soon[&u.all] += f.buffered
				f.stop()
			}
		}
	}
}

// stop ends the stream. If the client does not read the remaining bytes within closeTime, stop closes the connection,
// because the stream's status can be sent only after those bytes.
func (f *flow) stop() {
	f.ended = true
	slow := f.slow
	if slow == nil {
		slow = fault.New(fault.ResourceExhausted,
			"the stream was ended because its client has read nothing for %s and the member needs the memory: read faster, and open it again", stallTime).
			WithReason("SLOW_READER").MayRetry()
	}
	f.end(slow)
	time.AfterFunc(closeTime, func() {
		f.s.mu.Lock()
		c := f.conn
		stuck := f.buffered > 0
		f.s.mu.Unlock()
		if stuck && c != nil {
			c.Close()
		}
	})
}

// minHeld is the minimum number of bytes that a message counts as, and the minimum capacity of its buffer. gRPC does
// not report the release of smaller buffers.
const minHeld = 1152

// Encoded is an encoded message, which several streams may send.
type Encoded struct{ data []byte }

// Encode encodes m once, for streams that send it.
func Encode(m proto.Message) (*Encoded, error) {
	options := proto.MarshalOptions{}
	data, err := options.MarshalAppend(make([]byte, 0, max(options.Size(m), minHeld)), m)
	return &Encoded{data}, err
}

// Data returns the encoded message. Callers must not modify it.
func (m *Encoded) Data() []byte { return m.data }

// Size returns how many bytes of memory the encoded message uses.
func (m *Encoded) Size() int { return cap(m.data) }

// Lazy is a function that returns the next message of a stream. A handler passes it to SendMsg, which calls it only
// when the client has read most of the earlier messages. So a stream whose client does not read has no further message
// in memory. If the function returns nil, SendMsg sends nothing.
type Lazy func() (*Encoded, error)

// outgoing is an encoded message that the codec passes to gRPC without copying.
type outgoing struct{ buffer mem.Buffer }

// charge is the number of bytes that one message adds to its stream's unsent bytes. They are subtracted once: when gRPC
// releases the message, or when the connection is closed.
type charge struct {
	flow *flow
	n    int64
}

// Get implements mem.BufferPool. gRPC does not call it, because Encode allocates the buffers.
func (c *charge) Get(n int) *[]byte { b := make([]byte, n); return &b }

// Put implements mem.BufferPool. gRPC calls it when the message was written, or when it will never be.
func (c *charge) Put(*[]byte) { c.flow.release(c.n) }

// SendMsg waits until at most streamUnsent bytes of earlier messages are unsent and the org and the member are below
// their limits. It then sends m.
func (s *stream) SendMsg(m any) error {
	if s.flow == nil {
		if late, ok := m.(Lazy); ok {
			e, err := late()
			if err != nil || e == nil {
				return err
			}
			m = &outgoing{mem.SliceBuffer(e.data)}
		}
		return s.ServerStream.SendMsg(m)
	}
	if err := s.flow.ready(s.ctx); err != nil {
		return err
	}
	e, err := s.flow.encode(m)
	if err != nil {
		return err
	}
	if e == nil {
		if _, late := m.(Lazy); late {
			return nil
		}
		return s.ServerStream.SendMsg(m)
	}
	return s.ServerStream.SendMsg(&outgoing{mem.NewBuffer(&e.data, &charge{s.flow, int64(cap(e.data))})})
}

// encode encodes a message that may be sent now, and counts its bytes as unsent. It returns nil if the codec has to
// encode the message, or if m is a Lazy that returned nil. It always removes the stream's reservation, even if a Lazy
// panics.
func (f *flow) encode(m any) (*Encoded, error) {
	var n int64
	defer func() { f.hold(n) }()
	e, err := encoded(m)
	if err == nil && e != nil {
		n = int64(cap(e.data))
	}
	return e, err
}

// encoded returns the message m in encoded form. It returns nil if the codec has to encode m, or if m is a Lazy that
// returned nil.
func encoded(m any) (*Encoded, error) {
	switch m := m.(type) {
	case Lazy:
		return m()
	case proto.Message:
		return Encode(m)
	}
	return nil, nil
}

// codec is gRPC's protobuf codec, which also accepts messages that are already encoded (outgoing).
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(grpcproto.Name)} }

// Marshal implements encoding.CodecV2. It returns an outgoing message without copying it.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if o, ok := v.(*outgoing); ok {
		return mem.BufferSlice{o.buffer}, nil
	}
	return c.CodecV2.Marshal(v)
}
