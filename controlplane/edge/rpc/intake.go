package rpc

import (
	"context"
	"fmt"
	"math"
	"net"
	"net/netip"
	"runtime/debug"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/trivet-cloud/trivet/controlplane/edge/delay"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of the memory that a gRPC server uses for calls whose messages have not reached a handler.
const (
	// MaxStreams is how many calls one connection may have open. Clients queue further calls themselves. It is above
	// the limits on the streams of one user, so that a client gets the error of these limits before it queues.
	MaxStreams = 512
	// MaxHeaders bounds the headers of a call, in bytes. A token has less than 9 KiB.
	MaxHeaders = 16 << 10
	// MaxOpen bounds a message of a method that callers without a credential may call, in bytes.
	MaxOpen = window
	// ReceiveTime is the time limit for the arrival of a message, from the headers of its call or, in a client stream,
	// from the message's first byte. For a message longer than small the time starts again when the length is known.
	// MaxPlain bytes then need 1.3 Mbit/s.
	ReceiveTime = 10 * time.Second
	// PartTime is ReceiveTime for image parts, which are ten times as large as other messages.
	PartTime = time.Minute

	// window is how many bytes of a call a client may send before the server reads its message: the initial
	// flow-control window of an HTTP/2 stream, the smallest that gRPC supports.
	window = 64<<10 - 1
	// connWindow is the flow-control window of a connection. gRPC reopens it independently of what handlers read, so it
	// bounds the throughput of a connection, not memory.
	connWindow = 1 << 20
	// small is the size up to which a message is read only after it has arrived completely; it fits the window. The
	// server begins to read a longer message when its length is known and its bytes are reserved.
	small = 32 << 10
)

// Bounds of one server. A further call gets ResourceExhausted. The first five bounds apply to calls whose message is
// incomplete.
const (
	// maxUnproven bounds the calls of unauthenticated callers. Each holds at most MaxHeaders and a window, in buffers
	// up to 1.5 times as large: 112 KiB each, 224 MiB in total.
	maxUnproven = 2048
	// maxUnprovenOf bounds the unauthenticated calls from one address.
	maxUnprovenOf = 512
	// maxProven bounds the calls of authenticated callers and, separately, their calls to methods of another protocol
	// (Admission.Foreign).
	maxProven = 2048
	// maxProvenOf bounds the authenticated calls from one address.
	maxProvenOf = 1024
	// maxProvenBy bounds the authenticated calls of one org, or of one user or host without an org, from all addresses.
	maxProvenBy = 512
	// maxConns bounds the connections; a further one is closed. Each uses 48 KiB for buffers once it has received data.
	maxConns = 16384
	// maxConnsOf bounds the connections from one address.
	maxConnsOf = 1024
	// maxLarge bounds the bytes of all incomplete messages that are longer than small. Further messages wait for up to
	// ReceiveTime.
	maxLarge = 64 << 20
	// maxLargeOf bounds the bytes of such messages from one address. A further message gets ResourceExhausted.
	maxLargeOf = 32 << 20
	// maxUnprovenLargeOf is maxLargeOf for unauthenticated callers, so that it takes at least four addresses to use up
	// the bytes of such callers. It is longer than the longest message of another protocol.
	maxUnprovenLargeOf = maxLarge / 4
	// maxLargeBy bounds the bytes of such messages of one org, or of one user or host without an org. It is the size of
	// the longest message.
	maxLargeBy = 16 << 20
)

// refusalLimits limits the rate of RESOURCE_EXHAUSTED responses to one holder of a credential. Responses above the rate
// are delayed, to slow down a client that makes too many calls without waiting between them.
var refusalLimits = delay.Limits{Burst: 100, Every: 20 * time.Millisecond, Longest: time.Second}

// Admission is the result of an Intake's admit function for a call.
type Admission struct {
	// Proven reports that the caller showed a valid credential or, for a foreign method, that it is on loopback.
	Proven bool
	// Holder identifies the holder of the credential for maxProvenBy, maxLargeBy and refusalLimits. It is empty for an
	// unauthenticated caller.
	Holder string
	// Limit is the longest message that the call may send, in bytes.
	Limit int
	// Most is set if Limit is the server's limit for all methods. A longer message then gets gRPC's own error,
	// ResourceExhausted.
	Most bool
	// Time is the time limit for the arrival of a message; 0 means ReceiveTime.
	Time time.Duration
	// Foreign is set for a method of another protocol, such as etcd's. Its errors are gRPC's own. Authenticated callers
	// of such methods have a separate budget, which one address may use up: they are the operator's programs, often on
	// one host. Other callers of such methods count as unauthenticated.
	Foreign bool
}

// Intake decides for which calls of a gRPC server the messages are read, and bounds the memory of incomplete messages.
// Otherwise a client could fill the server's memory with calls that it never finishes: gRPC reads the message of a
// unary call before any interceptor runs, and holds one per open stream.
//
//   - A call that admit refuses is refused by its headers; its message is not read.
//   - Until its message is read, a call holds at most one flow-control window of the message.
//   - A message is read once it has arrived completely. If it is longer than the window allows, it is read once its
//     announced length is within the call's limit and has been reserved in a budget.
//   - A call ends with an error if its message does not arrive in time, or exceeds a bound.
//
// A meter on each connection parses the lengths of messages. The tap handle never refuses a call because of its
// credentials: it runs on the connection's reading goroutine, which a verification must not block, and gRPC (1.85)
// leaks the deadline timer of a call that the tap handle refuses, for as long as the deadline that the client set.
type Intake struct {
	admit   func(ctx context.Context, method string) (context.Context, Admission, error)
	streams int           // per connection
	time    time.Duration // ReceiveTime, less in tests

	// methods holds the registered methods. Calls of other methods are not metered, because gRPC answers them itself.
	methods   map[string]bool
	meters    sync.Map // of *meter by net.Addr
	admitting *budget  // calls while admit runs; separate, so that unauthenticated callers do not keep out callers with a credential
	unproven  *budget
	proven    *budget
	foreign   *budget
	conns     *budget
	refusals  *delay.Answers // of RESOURCE_EXHAUSTED, by Admission.Holder
}

// NewIntake returns an Intake for one server that allows the given number of streams per connection. admit decides by
// the headers of a call. It runs in the call's own goroutine and may block. The context that it returns, also with an
// error, is passed to the interceptor and the handler of a unary call. The interceptor of a stream runs before admit.
func NewIntake(streams int, admit func(ctx context.Context, method string) (context.Context, Admission, error)) *Intake {
	return &Intake{
		admit: admit, streams: streams, methods: map[string]bool{}, time: ReceiveTime,
		admitting: newBudget(maxUnproven, maxUnprovenOf, 0), unproven: newBudget(maxUnproven, maxUnprovenOf, maxUnprovenLargeOf),
		proven: newBudget(maxProven, maxProvenOf, maxLargeOf), foreign: newBudget(maxProven, maxProven, math.MaxInt),
		conns: newBudget(maxConns, maxConnsOf, 0), refusals: delay.New(refusalLimits),
	}
}

// buffers is the pool of buffers for received data. It has more sizes than gRPC's default pool, which would use a
// buffer of 16 KiB for a frame of 5 KiB.
var buffers = mem.NewTieredBufferPool(256, 1<<10, 3<<9, 2<<10, 3<<10, 4<<10, 6<<10, 8<<10, 12<<10, 16<<10, 32<<10, 64<<10, 1<<20)

// Settings returns the server options that i needs. Nil credentials mean plaintext.
func (i *Intake) Settings(c credentials.TransportCredentials) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(metered{c, i}), grpc.InTapHandle(i.tap), grpc.ReadBufferSize(0), grpc.MaxHeaderListSize(MaxHeaders),
		grpc.MaxConcurrentStreams(uint32(i.streams)), experimental.BufferPool(buffers),
		grpc.StaticStreamWindowSize(window), grpc.StaticConnWindowSize(connWindow),
	}
}

// metered wraps each connection that the embedded credentials accept in a meter. Nil credentials mean plaintext.
type metered struct {
	credentials.TransportCredentials
	intake *Intake
}

// ServerHandshake implements credentials.TransportCredentials.
func (m metered) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	leave, err := m.intake.conns.enter(networkOf(raw.RemoteAddr()), "")
	if err != nil {
		return nil, nil, err
	}
	leave = sync.OnceFunc(leave)
	if m.TransportCredentials == nil {
		return newMeter(raw, m.intake, leave), nil, nil
	}
	conn, info, err := m.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		leave()
		return nil, nil, err
	}
	return newMeter(conn, m.intake, leave), info, nil
}

// Info implements credentials.TransportCredentials.
func (m metered) Info() credentials.ProtocolInfo {
	if m.TransportCredentials == nil {
		return credentials.ProtocolInfo{SecurityProtocol: "insecure"}
	}
	return m.TransportCredentials.Info()
}

// Clone implements credentials.TransportCredentials.
func (m metered) Clone() credentials.TransportCredentials {
	if m.TransportCredentials == nil {
		return m
	}
	return metered{m.TransportCredentials.Clone(), m.intake}
}

type callKey struct{}

// tap is the tap handle of the server. It adds the call to its context.
func (i *Intake) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	p, ok := peer.FromContext(ctx)
	if !ok || ctx.Err() != nil || !i.methods[info.FullMethodName] {
		return ctx, nil
	}
	m, ok := i.meters.Load(p.Addr)
	if !ok {
		return ctx, nil
	}
	c := m.(*meter).open()
	if c == nil {
		m.(*meter).Close()
		return ctx, status.Error(codes.ResourceExhausted, "too many unfinished calls on this connection")
	}
	return context.WithValue(ctx, callKey{}, c), nil
}

// receiver receives the messages of one call.
type receiver struct {
	intake *Intake
	method string
	call   *call
	from   netip.Addr
	begin  time.Time
	Admission
}

// receiver returns the receiver of a call that has not been admitted yet. Call call.forget when the call ends.
func (i *Intake) receiver(ctx context.Context, method string) (*receiver, error) {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return nil, status.Error(codes.Internal, "the connection of the call is not registered")
	}
	return &receiver{intake: i, method: method, call: c, from: Network(ctx), begin: time.Now()}, nil
}

// Network returns the client address of a call for bounds per address: an IPv4 address, or the first 64 bits of an IPv6
// address, since a host usually has a /64 for itself. It returns the zero Addr if the client is not at a TCP address.
func Network(ctx context.Context) netip.Addr {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return netip.Addr{}
	}
	return networkOf(p.Addr)
}

func networkOf(from net.Addr) netip.Addr {
	tcp, ok := from.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	a := tcp.AddrPort().Addr().Unmap().WithZone("")
	if a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return a
}

// admits calls the Intake's admit function and returns its context. If the message is incomplete, the call counts
// against the budget r.intake.admitting meanwhile.
func (r *receiver) admits(ctx context.Context, many bool) (admitted context.Context, err error) {
	defer func() {
		if p := recover(); p != nil {
			admitted, err = ctx, fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	if !r.call.hasNext(many) {
		leave, err := r.intake.admitting.enter(r.from, "")
		if err != nil {
			return ctx, err
		}
		defer leave()
	}
	admitted, r.Admission, err = r.intake.admit(ctx, r.method)
	return admitted, err
}

// receive waits for the next message and reads it with recv. refused is set if the error is not from recv. many is set
// for a client stream, whose messages may come at any time.
func (r *receiver) receive(ctx context.Context, many bool, recv func() error) (refused bool, err error) {
	length, ready := r.call.poll(small, many)
	if !ready {
		if length, err = r.wait(ctx, many); err != nil {
			return true, err
		}
	}
	switch {
	case length > r.Limit && (r.Foreign || r.Most):
		return true, status.Errorf(codes.ResourceExhausted, "grpc: received message larger than max (%d vs. %d)", length, r.Limit)
	case length > r.Limit:
		return true, refusal{fault.New(fault.TooLarge, "the message is larger than %d bytes", r.Limit)}
	case length > 0:
		return r.large(ctx, length, recv)
	}
	return false, recv()
}

// wait waits until the next message can be read, and returns an error when the time limit has passed. The time starts
// with the headers of the call or, in a client stream, with the first byte of the message. Before that byte the stream
// is idle and does not count against a budget.
func (r *receiver) wait(ctx context.Context, many bool) (int, error) {
	counted, late := false, (<-chan time.Time)(nil)
	for {
		if length, ready := r.call.poll(small, many); ready {
			return length, nil
		}
		if !counted && (!many || r.call.hasPart()) {
			leave, err := r.budget().enter(r.from, r.Holder)
			if err != nil {
				return 0, err
			}
			defer leave()
			left := r.time()
			if !many {
				left -= time.Since(r.begin)
			}
			timer := time.NewTimer(left)
			defer timer.Stop()
			counted, late = true, timer.C
		}
		select {
		case <-r.call.changed:
		case <-late:
			return 0, errLate(r.time())
		case <-ctx.Done():
			return 0, nil // recv returns the reason
		}
	}
}

func (r *receiver) budget() *budget {
	switch {
	case r.Foreign && r.Proven:
		return r.intake.foreign
	case r.Proven:
		return r.intake.proven
	}
	return r.intake.unproven
}

func (r *receiver) time() time.Duration {
	if r.Time > 0 {
		return r.Time
	}
	return r.intake.time
}

func errLate(after time.Duration) error {
	return refusal{fault.New(fault.DeadlineExceeded, "the message did not arrive within %s", after)}
}

// large reads a message of a known length, after reserving its length in the budget, within the time limit.
func (r *receiver) large(call context.Context, length int, recv func() error) (refused bool, err error) {
	ctx, cancel := context.WithTimeout(call, r.time())
	defer cancel()
	done, err := r.budget().reserve(ctx, r.from, r.Holder, length)
	if err != nil {
		return true, err
	}
	received := make(chan error, 1)
	// The goroutine ends when the call ends, which follows the return of large.
	go func() {
		defer done()
		received <- recv()
	}()
	select {
	case err := <-received:
		return false, err
	case <-ctx.Done():
		if err := endedBy(call); err != nil {
			return true, err
		}
		return true, errLate(r.time())
	}
}
