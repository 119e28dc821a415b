package rpc

import (
	"context"
	"net/netip"
	"sync"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// budget bounds the number of calls whose message is incomplete, and the bytes of incomplete messages longer than small:
// in total, per address, and per holder of a credential.
type budget struct {
	calls, callsOf, bytesOf int
	bytes                   *semaphore.Weighted

	mu  sync.Mutex
	all int
	of  map[share]use
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

// parts returns the shares that a call counts for. holder is empty for an unauthenticated caller.
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
	return &budget{calls: calls, callsOf: callsOf, bytesOf: bytesOf, bytes: semaphore.NewWeighted(maxLarge), of: map[share]use{}}
}

// enter counts one more call until leave is called. It returns ResourceExhausted if the budget or a share is full.
func (b *budget) enter(from netip.Addr, holder string) (leave func(), err error) {
	parts := b.parts(from, holder)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all >= b.calls {
		return nil, errBusy("%d unfinished calls", b.calls)
	}
	for _, p := range parts {
		if b.of[p.share].calls >= p.calls {
			return nil, errBusy("%d unfinished calls from one %s", p.calls, p.name)
		}
	}
	b.all++
	b.add(parts, use{calls: 1})
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.all--
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
	parts := b.parts(from, holder)
	b.mu.Lock()
	for _, p := range parts {
		if b.of[p.share].bytes+bytes > p.bytes {
			b.mu.Unlock()
			return nil, errBusy("%d bytes of unfinished messages from one %s", p.bytes, p.name)
		}
	}
	b.add(parts, use{bytes: bytes})
	b.mu.Unlock()
	giveBack := func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.add(parts, use{bytes: -bytes})
	}
	if b.bytes.Acquire(ctx, int64(bytes)) != nil {
		giveBack()
		return nil, errBusy("%d bytes of unfinished messages", maxLarge)
	}
	return func() { b.bytes.Release(int64(bytes)); giveBack() }, nil
}

func errBusy(format string, args ...any) error {
	return refusal{fault.New(fault.ResourceExhausted, "this member already has "+format+": try again", args...).MayRetry()}
}

// refusal is a Fault that is a gRPC status as well, for the interceptors of other protocols.
type refusal struct{ *fault.Fault }

// GRPCStatus is the status of the Fault.
func (r refusal) GRPCStatus() *status.Status { return Status(r.Fault) }

// Unwrap gives the Fault.
func (r refusal) Unwrap() error { return r.Fault }
