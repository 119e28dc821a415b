package rpc

import (
	"context"
	"net/netip"
	"sync"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// budget bounds the number of calls whose message is incomplete, and the bytes of incomplete messages longer than
// small; both in total and per address.
type budget struct {
	calls, callsOf, bytesOf int
	bytes                   *semaphore.Weighted

	mu  sync.Mutex
	all int
	of  map[netip.Addr]use
}

// use is the part of a budget that one address uses.
type use struct{ calls, bytes int }

func newBudget(calls, callsOf, bytesOf int) *budget {
	return &budget{calls: calls, callsOf: callsOf, bytesOf: bytesOf, bytes: semaphore.NewWeighted(maxLarge), of: map[netip.Addr]use{}}
}

// enter counts one more call until leave is called. It returns ResourceExhausted if the budget is full.
func (b *budget) enter(from netip.Addr) (leave func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.all >= b.calls:
		return nil, errBusy("%d unfinished calls", b.calls)
	case b.of[from].calls >= b.callsOf:
		return nil, errBusy("%d unfinished calls from one address", b.callsOf)
	}
	b.all++
	b.add(from, use{calls: 1})
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.all--
		b.add(from, use{calls: -1})
	}, nil
}

// add adds n, which may be negative, to the use of an address. The caller holds mu.
func (b *budget) add(from netip.Addr, n use) {
	u := b.of[from]
	u.calls, u.bytes = u.calls+n.calls, u.bytes+n.bytes
	if u == (use{}) {
		delete(b.of, from)
		return
	}
	b.of[from] = u
}

// reserve reserves bytes for a message until release is called. It waits for bytes that other addresses use, and
// returns ResourceExhausted if the address itself uses too many.
func (b *budget) reserve(ctx context.Context, from netip.Addr, bytes int) (release func(), err error) {
	b.mu.Lock()
	if b.of[from].bytes+bytes > b.bytesOf {
		b.mu.Unlock()
		return nil, errBusy("%d bytes of unfinished messages from one address", b.bytesOf)
	}
	b.add(from, use{bytes: bytes})
	b.mu.Unlock()
	giveBack := func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.add(from, use{bytes: -bytes})
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
