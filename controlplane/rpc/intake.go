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

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of what a gRPC server holds of calls whose messages have not reached a handler.
const (
	// MaxStreams is how many calls one connection may have open. Clients queue further calls themselves. It is above the
	// bounds on the streams of one user, so that a client meets an error there before its own queue here.
	MaxStreams = 512
	// MaxHeaders bounds the headers of a call, in bytes. A token has less than 9 KiB.
	MaxHeaders = 16 << 10
	// MaxOpen bounds a message of a method that callers without a credential may call, in bytes.
	MaxOpen = window
	// ReceiveTime is how long a message may take to arrive: from the headers of its call or, where a client may send several,
	// from when the message began. A message longer than small has that long again from when its length is known. MaxPlain
	// bytes need 1.3 Mbit/s.
	ReceiveTime = 10 * time.Second
	// PartTime is ReceiveTime for image parts, which are ten times as large as other messages.
	PartTime = time.Minute

	// window is what a client may send of a call before the server reads its message, in bytes: the flow-control window of a
	// stream, which HTTP/2 does not let be smaller.
	window = 64<<10 - 1
	// connWindow is the same for all calls of a connection together. gRPC opens it again whatever handlers read: it bounds
	// the throughput of one connection, not memory.
	connWindow = 1 << 20
	// small is the longest message that is only read once it has arrived as a whole; it fits the window. A longer one is
	// read from when its length is known and its bytes are reserved.
	small = 32 << 10
)

// Bounds of one server. A further call is ResourceExhausted. The first five are on calls whose message is incomplete.
const (
	// maxUnproven bounds those of callers who have not proved who they are. Each holds at most MaxHeaders and a window, in
	// buffers half as large again: 112 KiB, and all of them 224 MiB.
	maxUnproven = 2048
	// maxUnprovenOf bounds those of them that come from one address.
	maxUnprovenOf = 512
	// maxProven bounds those of callers with a valid credential, and apart from them those of another protocol's methods.
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
	// maxLargeBy bounds the bytes of those of one org, or of one user or host without one. It is the longest message.
	maxLargeBy = 16 << 20
)

// Admission is what Admit finds out about a call from its headers.
type Admission struct {
	// Proven says that the caller showed a valid credential.
	Proven bool
	// Holder is whose credential it is, for maxProvenBy and maxLargeBy; empty when the caller has proved nothing.
	Holder string
	// Limit is the longest message that the call may send, in bytes.
	Limit int
	// Most says that the server takes no longer message of any method: the error is gRPC's own, ResourceExhausted.
	Most bool
	// Time is how long a message may take to arrive; 0 is ReceiveTime.
	Time time.Duration
	// Foreign says that the method is another protocol's: its errors are gRPC's own. Its calls have a budget of their own, of
	// which one address may have all: the callers are the operator's programs, often on one host and without a credential.
	Foreign bool
}

// Intake decides which calls of a gRPC server may have their messages read, and bounds the memory of those that are
// incomplete. Without it a client fills the server's memory with calls that it never finishes: gRPC reads the message of
// a unary call before any interceptor runs, and holds as many as there are streams.
//
//   - A call that Admit refuses is refused by its headers; none of its message is read.
//   - Until its message is read a call holds a flow-control window of it and not more.
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

	// methods are those that are registered: only their calls are followed, because gRPC answers others by itself.
	methods  map[string]bool
	meters   sync.Map // of *meter by net.Addr
	judged   *budget  // calls that admit has not answered; apart, so that strangers do not keep out who has a credential
	unproven *budget
	proven   *budget
	foreign  *budget
	conns    *budget
}

// NewIntake makes an Intake of one server with connections of so many streams. admit decides by the headers of a call; it
// runs in the call's own goroutine and may block. The context that it returns is that of the handler of a unary call.
func NewIntake(streams int, admit func(ctx context.Context, method string) (context.Context, Admission, error)) *Intake {
	return &Intake{
		admit: admit, streams: streams, methods: map[string]bool{}, time: ReceiveTime, judged: newBudget(maxUnproven, maxUnprovenOf, 0), unproven: newBudget(maxUnproven, maxUnprovenOf, maxLargeOf),
		proven: newBudget(maxProven, maxProvenOf, maxLargeOf), foreign: newBudget(maxProven, maxProven, math.MaxInt),
		conns: newBudget(maxConns, maxConnsOf, 0),
	}
}

// buffers holds what connections read. gRPC's own pool would give a frame of 5 KiB a buffer of 16.
var buffers = mem.NewTieredBufferPool(256, 1<<10, 3<<9, 2<<10, 3<<10, 4<<10, 6<<10, 8<<10, 12<<10, 16<<10, 32<<10, 64<<10, 1<<20)

// Settings are the options of the server. Credentials may be nil for plaintext.
func (i *Intake) Settings(c credentials.TransportCredentials) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(metered{c, i}), grpc.InTapHandle(i.tap), grpc.ReadBufferSize(0), grpc.MaxHeaderListSize(MaxHeaders),
		grpc.MaxConcurrentStreams(uint32(i.streams)), experimental.BufferPool(buffers),
		grpc.StaticStreamWindowSize(window), grpc.StaticConnWindowSize(connWindow),
	}
}

// metered wraps the connections of other credentials, or of none.
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

// receiver makes the receiver of a call that has not been admitted. The call must be forgotten when it ends.
func (i *Intake) receiver(ctx context.Context, method string) (*receiver, error) {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return nil, status.Error(codes.Internal, "the call's connection is not metered")
	}
	return &receiver{intake: i, method: method, call: c, from: network(ctx), begin: time.Now()}, nil
}

// network is the address of the other end of a call's connection; of IPv6 the first 64 bits, which one host has for itself.
func network(ctx context.Context) netip.Addr {
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

// admits calls admit. Meanwhile a call whose message is incomplete counts against a budget of its own.
func (r *receiver) admits(ctx context.Context, many bool) (_ context.Context, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	if !r.call.arrived(many) {
		leave, err := r.intake.judged.enter(r.from, "")
		if err != nil {
			return ctx, err
		}
		defer leave()
	}
	ctx, r.Admission, err = r.intake.admit(ctx, r.method)
	return ctx, err
}

// receive waits for the next message and reads it with recv. refused says that the error is not recv's. many says that the
// client may send several messages, at its own pace.
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

// wait waits until the fate of the next message is known. A message is given time from the headers of its call, one of many
// from when it began: before that the call counts as idle.
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
	case r.Foreign:
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
	// It ends when the call does, which it does when this returns.
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
