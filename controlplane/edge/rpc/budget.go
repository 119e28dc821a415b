package rpc

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// budget bounds the number of calls whose message is incomplete, and the bytes of incomplete messages longer than
// small: in total, per address, and per holder of a credential.
type budget struct {
	calls, callsOf, bytesOf int

	mu    sync.Mutex
	all   use
	of    map[share]use
	queue []*waiter // waiters for bytes, oldest first
}

// maxPasses is how many later messages may reserve their bytes before a message that waits. With 0 a message of 16 MiB
// would block all later ones although there is room for them; without a limit small messages could block it forever.
const maxPasses = 64

// waiter is a message that waits for bytes.
type waiter struct {
	bytes  int
	passes int           // how many later messages have reserved their bytes meanwhile
	ready  chan struct{} // closed when the bytes are reserved
}

// share identifies an address or a holder of a credential.
type share struct {
	network netip.Addr
	holder  string
}

// part is a share with its bounds.
type part struct {
	share
	calls, bytes int
	name         string
}

// parts returns the shares that a call counts for. The caller holds b.mu. holder is empty for an unauthenticated caller.
func (b *budget) parts(from netip.Addr, holder string) []part {
	parts := []part{{share{network: from}, b.callsOf, b.bytesOf, "address"}}
	if holder != "" {
		parts = append(parts, part{share{holder: holder}, min(b.callsOf, maxProvenBy), min(b.bytesOf, maxLargeBy), "org, user or host"})
	}
	return parts
}

// use is the part of a budget that one share uses.
type use struct{ calls, bytes int }

func newBudget(calls, callsOf, bytesOf int) *budget {
	return &budget{calls: calls, callsOf: callsOf, bytesOf: bytesOf, of: map[share]use{}}
}

// enter counts one more call until leave is called. It returns ResourceExhausted if the budget or a share is full.
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

// add adds n, which may be negative, to the use of each share. The caller holds mu.
func (b *budget) add(parts []part, n use) {
	for _, p := range parts {
		u := b.of[p.share]
		u.calls, u.bytes = u.calls+n.calls, u.bytes+n.bytes
		if b.of[p.share] = u; u == (use{}) {
			delete(b.of, p.share)
		}
	}
}

// reserve reserves bytes for a message until release is called. It waits for bytes that other shares use, and returns
// ResourceExhausted if one of the call's own shares uses too many.
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

// free releases bytes of each share, and the reserved ones of the total: 0 if the message was still waiting. The caller
// holds mu.
func (b *budget) free(parts []part, reserved, bytes int) {
	b.all.bytes -= reserved
	b.add(parts, use{bytes: -bytes})
	b.grant()
}

// grant reserves the bytes of the waiting messages that fit, the oldest first. A message that was passed maxPasses
// times keeps all later ones waiting until it fits. The caller holds mu.
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

// refusal is a Fault that is also a gRPC status, for the interceptors of other protocols.
type refusal struct{ *fault.Fault }

// GRPCStatus returns the status of the Fault.
func (r refusal) GRPCStatus() *status.Status { return Status(r.Fault) }

// Unwrap returns the Fault.
func (r refusal) Unwrap() error { return r.Fault }
