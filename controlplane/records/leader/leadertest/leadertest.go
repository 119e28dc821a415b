// Package leadertest contains helpers for tests of leader commands and tasks: a Leadership that the test changes, the
// Commands of a single member, and members in one process that forward commands to each other.
package leadertest

import (
	"context"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Leadership is a leader.Leadership that the test changes. It is safe for concurrent use.
type Leadership struct {
	mu      sync.Mutex
	member  uint64
	term    uint64
	changed chan struct{}
}

// NewLeadership returns a Leadership in which the given member leads in term 1. With member 0 there is no leader.
func NewLeadership(member uint64) *Leadership {
	return &Leadership{member: member, term: 1, changed: make(chan struct{})}
}

// Leader implements leader.Leadership. It returns the member of NewLeadership or of the last Elect, and the term.
func (l *Leadership) Leader() (member, term uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.member, l.term
}

// Changed implements leader.Leadership. The channel is closed by the next Elect.
func (l *Leadership) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// Elect begins a new term in which the given member leads. With member 0 the new term has no leader.
func (l *Leadership) Elect(member uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.member = member
	l.term++
	close(l.changed)
	l.changed = make(chan struct{})
}

// Single returns the Commands of a cluster whose only member, 1, leads.
func Single() *leader.Commands { return leader.NewCommands(1, NewLeadership(1), nil) }

// Members holds the Commands of members in one process, by member ID. As a leader.Caller it calls the other member's
// Commands directly.
type Members map[uint64]*leader.Commands

// NewMembers returns the Commands of members 1 to n, which forward commands to each other. The parameter l determines
// which member leads.
func NewMembers(n int, l leader.Leadership) Members {
	m := Members{}
	for id := uint64(1); id <= uint64(n); id++ {
		m[id] = leader.NewCommands(id, l, m)
	}
	return m
}

// Call implements leader.Caller. It runs the command on the other member directly, without a network.
func (m Members) Call(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller) ([]byte, error) {
	return m[member].Serve(ctx, command, body, caller)
}

// Open implements leader.Caller. It runs the stream on the other member directly, without a network.
func (m Members) Open(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, send func([]byte) error) error {
	return m[member].ServeStream(ctx, command, body, caller, send)
}

// Exchange implements leader.Caller. It runs the exchange on the other member directly, without a network.
func (m Members) Exchange(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, pipe leader.Pipe) error {
	return m[member].ServeExchange(ctx, command, body, caller, pipe)
}

// Handle registers f as a command of one member and returns the function that calls the command from that member.
func Handle[Q, A any](c *leader.Commands, name string, mode leader.Mode, f func(context.Context, Q) (A, error)) func(context.Context, Q) (A, error) {
	command := leader.NewCommand(name, mode, func(_ *leader.Commands, ctx context.Context, q Q) (A, error) { return f(ctx, q) })
	leader.Register(c, c, command)
	return func(ctx context.Context, q Q) (A, error) { return command.Call(ctx, c, q) }
}

// HandleStream registers f as a stream of one member and returns the function that calls the stream from that member.
func HandleStream[Q any](c *leader.Commands, name string, f func(context.Context, Q, func([]byte) error) error) func(context.Context, Q, func([]byte) error) error {
	stream := leader.NewStream(name, func(_ *leader.Commands, ctx context.Context, q Q, send func([]byte) error) error {
		return f(ctx, q, send)
	})
	leader.Register(c, c, stream)
	return func(ctx context.Context, q Q, send func([]byte) error) error { return stream.Call(ctx, c, q, send) }
}

// HandleExchange registers f as an exchange of one member and returns the function that calls the exchange from that
// member.
func HandleExchange[Q any](c *leader.Commands, name string, f func(context.Context, Q, leader.Pipe) error) func(context.Context, Q, leader.Pipe) error {
	exchange := leader.NewExchange(name, func(_ *leader.Commands, ctx context.Context, q Q, pipe leader.Pipe) error {
		return f(ctx, q, pipe)
	})
	leader.Register(c, c, exchange)
	return func(ctx context.Context, q Q, pipe leader.Pipe) error { return exchange.Call(ctx, c, q, pipe) }
}
