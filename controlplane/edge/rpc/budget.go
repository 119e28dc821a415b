package rpc

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// budget limits the number of calls whose message is incomplete, and the bytes of incomplete messages longer than the
// constant small. The limits apply in total, per client address, and per holder of a credential.
type budget struct {
	calls, callsOf, bytesOf int

	mu    sync.Mutex
	all   use
	of    map[share]use
	queue []*waiter // messages that wait for bytes, oldest first
}

// maxPasses is the maximum number of later messages that may reserve their bytes before a waiting message. If it were
// 0, a waiting message of 16 MiB would block all later ones although there is room for them. Without a maximum, small
// messages could block a large one forever.
const maxPasses = 64

// waiter is a message that waits until its bytes are reserved.
type waiter struct {
	bytes  int
	passes int           // how many later messages have reserved their bytes before this one
	ready  chan struct{} // closed when the bytes are reserved
}

// share is the key of a counter of calls and bytes. It is either a client address, or a holder of a credential.
type share struct {
	network netip.Addr
	holder  string
}

// part is an address or holder for which a call counts, with its limits: the maximum number of unfinished calls, and of
// bytes of unfinished messages. name describes it in error messages.
type part struct {
	share
	calls, bytes int
	name         string
}

// parts returns the keys and limits under which a call counts: those of its address and, if holder is not empty, those
// of the holder of its credential. The caller must have locked b.mu.
func (b *budget) parts(from netip.Addr, holder string) []part {
	parts := []part{{share{network: from}, b.callsOf, b.bytesOf, "address"}}
	if holder != "" {
		parts = append(parts, part{share{holder: holder}, min(b.callsOf, maxProvenBy), min(b.bytesOf, maxLargeBy), "org, user or host"})
	}
	return parts
}

// use is a number of unfinished calls, and of bytes reserved for unfinished messages.
type use struct{ calls, bytes int }

func newBudget(calls, callsOf, bytesOf int) *budget {
	return &budget{calls: calls, callsOf: callsOf, bytesOf: bytesOf, of: map[share]use{}}
}

// enter adds one unfinished call to the budget. Calling leave removes it. enter returns ResourceExhausted if a limit is
// reached.
func (b *budget) enter(from netip.Addr, holder string) (leave func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	parts := b.parts(from, holder)
	if b.all.calls >= b.calls {
		return nil, errBusy("%d unfinished calls", b.calls)
	}
	for _, p := range parts {
		if b.of[p.share].calls >= p.calls {
			return nil, errBusy("%d unfinished calls from one %s", p.calls, p.name)
		}
	}
	b.all.calls++
	b.add(parts, use{calls: 1})
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.all.calls--
		b.add(parts, use{calls: -1})
	}, nil
}

// add adds n to the counters of each element of parts. The numbers in n may be negative. The caller must have locked
// b.mu.
func (b *budget) add(parts []part, n use) {
	for _, p := range parts {
		u := b.of[p.share]
		u.calls, u.bytes = u.calls+n.calls, u.bytes+n.bytes
		if b.of[p.share] = u; u == (use{}) {
			delete(b.of, p.share)
		}
	}
}

// reserve reserves bytes for a message until release is called. It waits while the total is used up, at most until ctx
// ends. It returns ResourceExhausted if the call's address or holder would exceed its limit, or if ctx ends first.
func (b *budget) reserve(ctx context.Context, from netip.Addr, holder string, bytes int) (release func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	parts := b.parts(from, holder)
	for _, p := range parts {
		if b.of[p.share].bytes+bytes > p.bytes {
			return nil, errBusy("%d bytes of unfinished messages from one %s", p.bytes, p.name)
		}
	}
	b.add(parts, use{bytes: bytes})
	w := &waiter{bytes: bytes, ready: make(chan struct{})}
	b.queue = append(b.queue, w)
	b.grant()
	b.mu.Unlock()
	select {
	case <-w.ready:
	case <-ctx.Done():
	}
	b.mu.Lock()
	if i := slices.Index(b.queue, w); i >= 0 {
		b.queue = slices.Delete(b.queue, i, i+1)
		b.free(parts, 0, bytes)
		return nil, errBusy("%d bytes of unfinished messages", maxLarge)
	}
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.free(parts, bytes, bytes)
	}, nil
}

// free subtracts the given bytes from the counters of each element of parts, and the number reserved from the total.
// reserved is 0 if the message was still waiting, because the total contains no waiting messages. The caller must have
// locked b.mu.
func (b *budget) free(parts []part, reserved, bytes int) {
	b.all.bytes -= reserved
	b.add(parts, use{bytes: -bytes})
	b.grant()
}

// grant reserves bytes for waiting messages, oldest first, as far as they fit into the total limit. Once maxPasses
// later messages have been served before a waiting message, all messages after it wait until it fits. The caller must
// have locked b.mu.
func (b *budget) grant() {
	var waiting []*waiter
	barred := false
	for _, w := range b.queue {
		if barred || b.all.bytes+w.bytes > maxLarge {
			waiting = append(waiting, w)
			barred = barred || w.passes >= maxPasses
			continue
		}
		b.all.bytes += w.bytes
		close(w.ready)
		for _, earlier := range waiting {
			earlier.passes++
			barred = barred || earlier.passes >= maxPasses
		}
	}
	b.queue = waiting
}

func errBusy(format string, args ...any) error {
	return refusal{fault.New(fault.ResourceExhausted, "this member already has "+format+": try again", args...).MayRetry()}
}

// refusal is a fault.Fault that is also a gRPC status, because the interceptors of other protocols expect a status.
type refusal struct{ *fault.Fault }

// GRPCStatus returns the fault as a gRPC status.
func (r refusal) GRPCStatus() *status.Status { return Status(r.Fault) }

// Unwrap returns the fault.Fault.
func (r refusal) Unwrap() error { return r.Fault }
