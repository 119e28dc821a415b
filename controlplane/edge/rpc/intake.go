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

// Limits of the memory that a gRPC server uses for calls whose messages have not reached a handler:
const (
	// MaxStreams is the maximum number of concurrent calls on one connection. Clients queue further calls themselves.
	// It is higher than the limits on the streams of one user, so that a client gets the error of those limits instead
	// of queueing calls.
	MaxStreams = 512
	// MaxHeaders is the maximum size of the headers of a call, in bytes. A token, which is sent in a header, has less
	// than 9 KiB.
	MaxHeaders = 16 << 10
	// MaxOpen is the limit, in bytes, of a message of a method that callers may call without a credential.
	MaxOpen = window
	// ReceiveTime is the time limit for the arrival of a message. It starts with the headers of the call or, in a
	// client stream, with the message's first byte. If the message is longer than the constant small, it starts again
	// when the length is known. A client must then send a message of MaxPlain bytes at 1.3 Mbit/s at least.
	ReceiveTime = 10 * time.Second
	// PartTime replaces ReceiveTime for the parts of an image upload, because they may be ten times as large as other
	// messages.
	PartTime = time.Minute

	// window is how many bytes of a call a client may send before the server reads its message: the initial
	// flow-control window of an HTTP/2 stream. It is the smallest that gRPC supports.
	window = 64<<10 - 1
	// connWindow is the flow-control window of a connection, in bytes. gRPC reopens it independently of what handlers
	// read, so it limits the throughput of a connection, not memory.
	connWindow = 1 << 20
	// small is the maximum size in bytes of a message that is read only after it has arrived completely; such a message
	// fits into window. The server begins to read a longer message when its length is known and its bytes are reserved.
	small = 32 << 10
)

// Limits of one server. Calls beyond them get ResourceExhausted. The first five count concurrent calls whose message is
// incomplete:
const (
	// maxUnproven is the maximum number of concurrent calls of unauthenticated callers. A call holds at most MaxHeaders
	// plus window bytes. Its buffers are up to 1.5 times as large: 112 KiB per call, 224 MiB in total.
	maxUnproven = 2048
	// maxUnprovenOf is the maximum number of concurrent calls of unauthenticated callers from one address.
	maxUnprovenOf = 512
	// maxProven is the maximum number of concurrent calls of authenticated callers. Calls to methods of another
	// protocol (Admission.Foreign) are counted separately, with the same maximum.
	maxProven = 2048
	// maxProvenOf is the maximum number of concurrent calls of authenticated callers from one address.
	maxProvenOf = 1024
	// maxProvenBy is the maximum number of concurrent calls of one holder of a credential, from all addresses. All
	// users of an org count as one holder. A user or host without an org is a holder of its own.
	maxProvenBy = 512
	// maxConns is the maximum number of open connections; further ones are closed. Each uses 48 KiB for buffers once it
	// has received data.
	maxConns = 16384
	// maxConnsOf is the maximum number of open connections from one address.
	maxConnsOf = 1024
	// maxLarge is the maximum number of bytes that are reserved for long messages (longer than the constant small) at a
	// time. It applies separately to unauthenticated callers, to authenticated ones, and to authenticated callers of
	// another protocol. Further messages wait for up to the time limit of a message, such as ReceiveTime.
	maxLarge = 64 << 20
	// maxLargeOf is the maximum number of bytes of incomplete long messages (longer than the constant small) from one
	// address at a time. Further ones get ResourceExhausted.
	maxLargeOf = 32 << 20
	// maxUnprovenLargeOf replaces maxLargeOf for unauthenticated callers, so that one address can use at most a quarter
	// of maxLarge. It exceeds the maximum message size of the other protocol (Admission.Foreign).
	maxUnprovenLargeOf = maxLarge / 4
	// maxLargeBy is the maximum number of bytes of incomplete long messages (longer than the constant small) of one
	// holder of a credential at a time. A holder is an org, or a user or host without an org. The limit equals the size
	// of the longest message.
	maxLargeBy = 16 << 20
)

// refusalLimits limits the rate of ResourceExhausted responses to one holder of a credential. Responses above the rate
// are delayed, to slow down a client that sends calls without a pause.
var refusalLimits = delay.Limits{Burst: 100, Every: 20 * time.Millisecond, Longest: time.Second}

// Admission is the result of an Intake's admit function, which decides about a call by its headers.
type Admission struct {
	// Proven is true if the caller showed a valid credential. For a method of another protocol it is also true if the
	// caller is on loopback.
	Proven bool
	// Holder identifies the holder of the credential, for the limits per holder (maxProvenBy, maxLargeBy,
	// refusalLimits). It is empty for an unauthenticated caller.
	Holder string
	// Limit is the maximum length in bytes of each message of the call.
	Limit int
	// Most is true if Limit is the server's limit for all methods. A longer message then gets the error that gRPC
	// itself would return, ResourceExhausted. If Most is false, it gets a TooLarge fault.
	Most bool
	// Time is the time limit for the arrival of a message; 0 means ReceiveTime.
	Time time.Duration
	// Foreign is true for a method of another protocol, such as etcd's, whose errors are gRPC's own. Authenticated
	// callers of such methods have a budget of their own. One address may use all of it, because these callers are the
	// operator's programs, which often run on one host. Unauthenticated callers of such methods share the budget of all
	// other unauthenticated callers.
	Foreign bool
}

// Intake decides which messages a gRPC server reads, and limits the memory of incomplete messages. Without it a client
// could fill the server's memory with calls whose message it never completes: gRPC reads the message of a unary call
// before any interceptor runs, and stores one message per open stream.
//
//   - The function admit decides by the headers of a call. If it refuses the call, the message is not read.
//   - Until its message is read, at most one flow-control window of the message is in memory.
//   - A message is read once it has arrived completely. If it is longer than the window allows, it is read once its
//     announced length is within the call's limit and has been reserved in a budget.
//   - A call ends with an error if its message does not arrive in time, or exceeds a limit.
//
// Each connection is wrapped in a meter, which parses the lengths of messages. Credentials are not checked in the gRPC
// tap handle: it runs on the connection's reading goroutine, which a verification must not block, and gRPC (1.85) leaks
// the deadline timer of a call that the tap handle refuses, until the deadline that the client set.
type Intake struct {
	admit   func(ctx context.Context, method string) (context.Context, Admission, error)
	streams int           // most calls per connection
	time    time.Duration // ReceiveTime; less in tests

	// methods holds the full names of the registered methods. The meters do not track calls of other methods, because
	// gRPC itself refuses them.
	methods   map[string]bool
	meters    sync.Map // the *meter of each connection, by its remote net.Addr
	admitting *budget  // calls while admit runs; separate, so that they do not block calls in the other budgets
	unproven  *budget
	proven    *budget
	foreign   *budget
	conns     *budget
	refusals  *delay.Answers // delays RESOURCE_EXHAUSTED responses, by Admission.Holder
}

// NewIntake returns an Intake for one server that allows the given number of streams per connection. The Intake calls
// the function admit for each call, which decides by the call's headers. admit runs in the call's own goroutine and may
// block. The interceptor and the handler of a unary call get the context that admit returns, even if admit returns an
// error. The interceptor of a stream has already run when admit is called.
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

// Settings returns the server options that an Intake requires, with the listener's credentials. Nil credentials mean
// plaintext.
func (i *Intake) Settings(c credentials.TransportCredentials) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(metered{c, i}), grpc.InTapHandle(i.tap), grpc.ReadBufferSize(0), grpc.MaxHeaderListSize(MaxHeaders),
		grpc.MaxConcurrentStreams(uint32(i.streams)), experimental.BufferPool(buffers),
		grpc.StaticStreamWindowSize(window), grpc.StaticConnWindowSize(connWindow),
	}
}

// metered wraps each connection that the embedded credentials accept in a meter, which tracks the messages that arrive.
// It closes connections above the limits. Nil credentials mean plaintext.
type metered struct {
	credentials.TransportCredentials
	intake *Intake
}

// ServerHandshake implements credentials.TransportCredentials. It refuses connections above the limits. It wraps every
// other connection in a meter, which tracks the messages that arrive.
func (m metered) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	leave, err := m.intake.conns.enter(NetworkOf(raw.RemoteAddr()), "")
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

// tap is the tap handle of the gRPC server, which runs when the headers of a call have arrived. It makes the
// connection's meter track the call, and puts the meter's value for the call into the context.
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

// receiver receives the messages of one call within the limits of its Admission.
type receiver struct {
	intake *Intake
	method string
	call   *call
	from   netip.Addr
	begin  time.Time
	Admission
}

// receiver returns the receiver of a call for which admit has not run yet. The caller must call call.forget when the
// call ends.
func (i *Intake) receiver(ctx context.Context, method string) (*receiver, error) {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return nil, status.Error(codes.Internal, "the connection of the call is not registered")
	}
	return &receiver{intake: i, method: method, call: c, from: Network(ctx), begin: time.Now()}, nil
}

// Network returns the client address of a call, for limits per address: an IPv4 address, or the first 64 bits of an
// IPv6 address, since a host usually has a /64 for itself. It returns the zero Addr if the client does not have a TCP
// address.
func Network(ctx context.Context) netip.Addr {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return netip.Addr{}
	}
	return NetworkOf(p.Addr)
}

// NetworkOf returns what Network returns for a client with the given address.
func NetworkOf(from net.Addr) netip.Addr {
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

// admits calls the Intake's admit function, stores its result in r.Admission, and returns its context. While the
// function runs, a call whose message is incomplete counts against the budget r.intake.admitting. many is true for a
// client stream.
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

// receive waits until the next message may be read, and reads it by calling recv. The result refused is true if the
// error does not come from recv. many is true for a client stream, whose messages may arrive at any time.
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

// wait waits until the next message can be read, and returns its length as poll does. It returns an error when the time
// limit has passed. many is true for a client stream. The time limit starts with the headers of the call or, in a
// client stream, with the first byte of the message. Before that byte the stream is idle and counts against no budget.
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
			return 0, nil // recv returns the reason why ctx ended
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

// large reserves length bytes in the call's budget and then reads a message of that length with recv, within the time
// limit.
func (r *receiver) large(call context.Context, length int, recv func() error) (refused bool, err error) {
	ctx, cancel := context.WithTimeout(call, r.time())
	defer cancel()
	done, err := r.budget().reserve(ctx, r.from, r.Holder, length)
	if err != nil {
		return true, err
	}
	received := make(chan error, 1)
	// If the time limit ends first, large returns before this goroutine has ended. The call then ends soon, so recv
	// returns and the goroutine ends too.
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
