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
	// MaxStreams is how many calls one connection may have open. Clients queue further calls themselves. It is above the
	// bounds on the streams of one user, so that a client meets an error there before its own queue here.
	MaxStreams = 512
	// MaxHeaders bounds the headers of a call, in bytes. A token has less than 9 KiB.
	MaxHeaders = 16 << 10
	// MaxOpen bounds a message of a method that callers without a credential may call, in bytes.
	MaxOpen = window
	// ReceiveTime is the time limit for the arrival of a message, from the headers of its call or, in a client stream,
	// from the message's first byte. A message longer than small has the same time again from when its length is known.
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

// Bounds of one server. A further call is ResourceExhausted. The first five are on calls whose message is incomplete.
const (
	// maxUnproven bounds the calls of unauthenticated callers. Each holds at most MaxHeaders and a window, in buffers
	// up to 1.5 times as large: 112 KiB each, 224 MiB in total.
	maxUnproven = 2048
	// maxUnprovenOf bounds those of them that come from one address.
	maxUnprovenOf = 512
	// maxProven bounds the calls of callers with a valid credential and, separately, the calls that such callers make to
	// another protocol's methods (Admission.Foreign).
	maxProven = 2048
	// maxProvenOf bounds those of them that come from one address.
	maxProvenOf = 1024
	// maxProvenBy bounds those of them of one org, or of one user or host without one, from however many addresses.
	maxProvenBy = 512
	// maxConns bounds the connections; a further one is closed. Each has 48 KiB of buffers when it has been used.
	maxConns = 16384
	// maxConnsOf bounds the connections from one address.
	maxConnsOf = 1024
	// maxLarge bounds the bytes of all messages longer than small that are incomplete. Further ones wait for ReceiveTime.
	maxLarge = 64 << 20
	// maxLargeOf bounds the bytes of those that come from one address. A further one is ResourceExhausted.
	maxLargeOf = 32 << 20
	// maxUnprovenLargeOf is maxLargeOf for unauthenticated callers, so that fewer than four addresses cannot use all bytes
	// of such callers. It is longer than the longest message of another protocol.
	maxUnprovenLargeOf = maxLarge / 4
	// maxLargeBy bounds the bytes of those of one org, or of one user or host without one. It is the longest message.
	maxLargeBy = 16 << 20
)

// refusalLimits are the limits of the answers RESOURCE_EXHAUSTED to calls of one holder of a credential. A client that
// makes too many calls and does not wait between them gets later answers late.
var refusalLimits = delay.Limits{Burst: 100, Every: 20 * time.Millisecond, Longest: time.Second}

// Admission is the result of an Intake's admit function for a call.
type Admission struct {
	// Proven says that the caller showed a valid credential or, for a foreign method, that it is on loopback.
	Proven bool
	// Holder identifies the holder of the credential for maxProvenBy, maxLargeBy and refusalLimits. It is empty for an
	// unauthenticated caller.
	Holder string
	// Limit is the longest message that the call may send, in bytes.
	Limit int
	// Most is set if Limit is the server's limit for all methods: a longer message then gets gRPC's own error,
	// ResourceExhausted.
	Most bool
	// Time is how long a message may take to arrive; 0 is ReceiveTime.
	Time time.Duration
	// Foreign is set for a method of another protocol, such as etcd's: its errors are gRPC's own. Proven callers of such
	// methods have a separate budget, which one address may use up: they are the operator's programs, often on one host.
	// Others count as unauthenticated callers.
	Foreign bool
}

// Intake decides which calls of a gRPC server may have their messages read, and bounds the memory of those that are
// incomplete. Without it a client fills the server's memory with calls that it never finishes: gRPC reads the message of
// a unary call before any interceptor runs, and holds as many as there are streams.
//
//   - A call that admit refuses is refused by its headers; its message is not read.
//   - Until its message is read, a call holds at most one flow-control window of the message.
//   - A message is read once it has arrived as a whole, or, if it is longer than that window allows, once its announced
//     length is within the call's limit and was reserved from a budget.
//   - A message that does not arrive in time ends its call, as does one that is over a bound.
//
// Lengths are known from a meter on each connection. The tap handle refuses nothing: it runs on the connection's reading
// goroutine, which a verification must not block, and gRPC (1.85) leaks the deadline timer of a call that the tap handle
// refuses, for as long as the client asked.
type Intake struct {
	admit   func(ctx context.Context, method string) (context.Context, Admission, error)
	streams int           // per connection
	time    time.Duration // ReceiveTime, less in tests

	// methods holds the registered methods. Calls of other methods are not metered, because gRPC answers them itself.
	methods  map[string]bool
	meters   sync.Map // of *meter by net.Addr
	judged   *budget  // calls that admit has not answered; apart, so that strangers do not keep out who has a credential
	unproven *budget
	proven   *budget
	foreign  *budget
	conns    *budget
	refusals *delay.Answers // of RESOURCE_EXHAUSTED, by Admission.Holder
}

// NewIntake makes an Intake of one server with connections of so many streams. admit decides by the headers of a call; it
// runs in the call's own goroutine and may block. The context that it returns, also with an error, is that of the
// interceptor and the handler of a unary call. The interceptor of a stream runs before admit.
func NewIntake(streams int, admit func(ctx context.Context, method string) (context.Context, Admission, error)) *Intake {
	return &Intake{
		admit: admit, streams: streams, methods: map[string]bool{}, time: ReceiveTime,
		judged: newBudget(maxUnproven, maxUnprovenOf, 0), unproven: newBudget(maxUnproven, maxUnprovenOf, maxUnprovenLargeOf),
		proven: newBudget(maxProven, maxProvenOf, maxLargeOf), foreign: newBudget(maxProven, maxProven, math.MaxInt),
		conns: newBudget(maxConns, maxConnsOf, 0), refusals: delay.New(refusalLimits),
	}
}

// buffers is the pool for the data that connections read. gRPC's default pool would use a buffer of 16 KiB for a frame
// of 5 KiB.
var buffers = mem.NewTieredBufferPool(256, 1<<10, 3<<9, 2<<10, 3<<10, 4<<10, 6<<10, 8<<10, 12<<10, 16<<10, 32<<10, 64<<10, 1<<20)

// Settings returns the options of a server behind i. Nil credentials mean plaintext.
func (i *Intake) Settings(c credentials.TransportCredentials) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(metered{c, i}), grpc.InTapHandle(i.tap), grpc.ReadBufferSize(0), grpc.MaxHeaderListSize(MaxHeaders),
		grpc.MaxConcurrentStreams(uint32(i.streams)), experimental.BufferPool(buffers),
		grpc.StaticStreamWindowSize(window), grpc.StaticConnWindowSize(connWindow),
	}
}

// metered wraps each connection that other credentials accept in a meter; nil credentials mean plaintext.
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

// tap puts the call into its context.
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
		return nil, status.Error(codes.Internal, "the call's connection is not metered")
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

// admits calls admit and returns its context. Meanwhile a call whose message is incomplete counts against a budget of
// its own.
func (r *receiver) admits(ctx context.Context, many bool) (admitted context.Context, err error) {
	defer func() {
		if p := recover(); p != nil {
			admitted, err = ctx, fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	if !r.call.arrived(many) {
		leave, err := r.intake.judged.enter(r.from, "")
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

// wait waits until the next message can be read, or fails when its time is over. The time begins with the headers of
// the call or, in a client stream, with the first byte of the message; before that byte the stream is idle and not
// counted.
func (r *receiver) wait(ctx context.Context, many bool) (int, error) {
	counted, late := false, (<-chan time.Time)(nil)
	for {
		if length, ready := r.call.poll(small, many); ready {
			return length, nil
		}
		if !counted && (!many || r.call.begun()) {
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
			return 0, nil // recv returns why
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

// large reads a message of a known length, within the budget for such messages and in time.
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
