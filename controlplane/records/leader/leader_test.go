package leader_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// lossyMembers counts the calls between members and makes the first len(errs) of them fail with these errors: before
// the command runs, or after it if lost is set.
type lossyMembers struct {
	leadertest.Members
	errs  []error
	lost  bool
	calls int
}

func (m *lossyMembers) Call(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller) ([]byte, error) {
	m.calls++
	if len(m.errs) > 0 {
		err := m.errs[0]
		m.errs = m.errs[1:]
		if m.lost {
			m.Members.Call(ctx, member, command, body, caller)
		}
		return nil, err
	}
	return m.Members.Call(ctx, member, command, body, caller)
}

func (m *lossyMembers) Open(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, send func([]byte) error) error {
	m.calls++
	return m.Members.Open(ctx, member, command, body, caller, send)
}

func (m *lossyMembers) Exchange(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, pipe leader.Pipe) error {
	m.calls++
	return m.Members.Exchange(ctx, member, command, body, caller, pipe)
}

type sum struct{ A, B int }

// pair returns members 1 and 2 with the command f, and for each of them a function that calls the command from that
// member.
func pair(l *leadertest.Leadership, mode leader.Mode, f func(context.Context, sum) (int, error)) (*lossyMembers, []func(context.Context, sum) (int, error)) {
	w := &lossyMembers{Members: leadertest.Members{}}
	var calls []func(context.Context, sum) (int, error)
	for id := uint64(1); id <= 2; id++ {
		w.Members[id] = leader.NewCommands(id, l, w)
		calls = append(calls, leadertest.Handle(w.Members[id], "sum", mode, f))
	}
	return w, calls
}

func TestCommandRunsOnTheLeader(t *testing.T) {
	l := leadertest.NewLeadership(1)
	w, on := pair(l, leader.Once, func(ctx context.Context, q sum) (int, error) {
		require.Equal(t, cloud.UserID("ada"), auth.CallerOf(ctx).User, "the command runs with the caller of the request")
		return q.A + q.B, nil
	})
	ctx := auth.With(t.Context(), &cloud.Caller{User: "ada"}, auth.REST)
	for i, call := range on {
		got, err := call(ctx, sum{1, 2})
		require.NoError(t, err)
		require.Equal(t, 3, got)
		require.Equal(t, i, w.calls)
	}
}

func TestFaultsAreForwarded(t *testing.T) {
	_, on := pair(leadertest.NewLeadership(1), leader.Once, func(context.Context, sum) (int, error) {
		return 0, fault.New(fault.NotFound, "no such sum")
	})
	_, err := on[1](t.Context(), sum{})
	require.True(t, fault.Is(err, fault.NotFound))
}

// TestLostCalls makes calls to the leader fail. A call that was not sent, or that reached a member that does not lead,
// must be sent again. A call whose response was lost must be sent again only if it is repeatable.
func TestLostCalls(t *testing.T) {
	broken := errors.New("connection reset")
	for _, c := range []struct {
		name string
		mode leader.Mode
		key  string
		errs []error
		lost bool
		runs int
		kind fault.Kind
	}{
		{name: "not sent", errs: []error{leader.ErrNotSent, leader.ErrNotSent}, runs: 1},
		{name: "not the leader", errs: []error{leader.ErrNotLeader}, runs: 1},
		{name: "answer lost", errs: []error{broken}, lost: true, runs: 1, kind: fault.Unavailable},
		{name: "answer lost, keyed command without a key", mode: leader.Keyed, errs: []error{broken}, lost: true, runs: 1, kind: fault.Unavailable},
		{name: "answer lost, keyed command with a key", mode: leader.Keyed, key: "k", errs: []error{broken}, lost: true, runs: 2},
		{name: "answer lost, key of a command that is not keyed", key: "k", errs: []error{broken}, lost: true, runs: 1, kind: fault.Unavailable},
		{name: "answer lost, repeatable command", mode: leader.Repeatable, errs: []error{broken}, lost: true, runs: 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			runs := 0
			w, on := pair(leadertest.NewLeadership(1), c.mode, func(context.Context, sum) (int, error) { runs++; return 7, nil })
			w.errs, w.lost = c.errs, c.lost
			got, err := on[1](auth.With(t.Context(), &cloud.Caller{User: "ada", IdempotencyKey: c.key}, auth.REST), sum{})
			require.Equal(t, c.runs, runs, c.name)
			if c.kind != fault.Internal {
				require.True(t, fault.Is(err, c.kind), c.name)
				return
			}
			require.NoError(t, err, c.name)
			require.Equal(t, 7, got)
		})
	}
}

// TestCallerCancels cancels a call while its command runs on the leader. The caller must get the error of its context,
// not that of the connection.
func TestCallerCancels(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	w, on := pair(leadertest.NewLeadership(1), leader.Repeatable, func(context.Context, sum) (int, error) { cancel(); return 0, nil })
	w.errs, w.lost = []error{errors.New("rpc error: dial tcp 127.0.0.2:2380")}, true
	_, err := on[1](ctx, sum{})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1, w.calls)
}

func TestStreamsComeFromTheLeader(t *testing.T) {
	l := leadertest.NewLeadership(1)
	w := &lossyMembers{Members: leadertest.Members{}}
	for id := uint64(1); id <= 2; id++ {
		w.Members[id] = leader.NewCommands(id, l, w)
		read := leadertest.HandleStream(w.Members[id], "count", func(_ context.Context, n int, send func([]byte) error) error {
			for i := range n {
				if err := send([]byte{byte(i)}); err != nil {
					return err
				}
			}
			return fault.New(fault.NotFound, "no more")
		})
		var got []byte
		err := read(t.Context(), 3, func(b []byte) error { got = append(got, b...); return nil })
		require.True(t, fault.Is(err, fault.NotFound))
		require.Equal(t, []byte{0, 1, 2}, got)
	}
	require.Equal(t, 1, w.calls)
}

// TestExchangesRunOnTheLeader calls an exchange from the leader and from another member. Each piece that the caller
// sends must come back, and then the error of the exchange.
func TestExchangesRunOnTheLeader(t *testing.T) {
	l := leadertest.NewLeadership(1)
	w := &lossyMembers{Members: leadertest.Members{}}
	for id := uint64(1); id <= 2; id++ {
		w.Members[id] = leader.NewCommands(id, l, w)
		echo := leadertest.HandleExchange(w.Members[id], "echo", func(ctx context.Context, n int, pipe leader.Pipe) error {
			for {
				b, err := pipe.Recv(ctx)
				if errors.Is(err, io.EOF) {
					return fault.New(fault.NotFound, "no more")
				}
				if err != nil {
					return err
				}
				if err := pipe.Send(bytes.Repeat(b, n)); err != nil {
					return err
				}
			}
		})
		in, got := [][]byte{{'a'}, {'b'}}, ""
		err := echo(t.Context(), 2, leader.Pipe{
			Recv: func(context.Context) (b []byte, err error) {
				if len(in) == 0 {
					return nil, io.EOF
				}
				b, in = in[0], in[1:]
				return b, nil
			},
			Send: func(b []byte) error { got += string(b); return nil },
		})
		require.True(t, fault.Is(err, fault.NotFound))
		require.Equal(t, "aabb", got)
	}
	require.Equal(t, 1, w.calls)
}

func TestNoLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := leadertest.NewLeadership(0)
		_, on := pair(l, leader.Once, func(context.Context, sum) (int, error) { return 7, nil })
		_, err := on[0](t.Context(), sum{})
		require.True(t, fault.Is(err, fault.Unavailable))
		require.ErrorContains(t, err, "no leader")

		go func() { time.Sleep(time.Second); l.Elect(2) }()
		got, err := on[0](t.Context(), sum{})
		require.NoError(t, err)
		require.Equal(t, 7, got)
	})
}

// TestTasksFollowTheLeader checks that tasks run only on the leader, stop when it is no longer the leader, and start
// again in a new term.
func TestTasksFollowTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := leadertest.NewLeadership(2)
		var runs, running atomic.Int64
		tasks := &leader.Tasks{
			Self: 1, Leadership: l, Log: slog.New(slog.DiscardHandler), Ready: func(context.Context) error { return nil },
			List: []leader.Task{{Name: "count", Every: time.Second, Run: func(ctx context.Context) error {
				runs.Add(1)
				running.Add(1)
				defer running.Add(-1)
				return errors.New("again")
			}}},
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { tasks.Run(ctx); close(done) }()
		time.Sleep(5 * time.Second)
		require.Zero(t, runs.Load())
		l.Elect(1)
		time.Sleep(2500 * time.Millisecond)
		require.EqualValues(t, 3, runs.Load())
		l.Elect(2)
		time.Sleep(5 * time.Second)
		require.EqualValues(t, 3, runs.Load())
		l.Elect(1)
		time.Sleep(500 * time.Millisecond)
		require.EqualValues(t, 4, runs.Load())
		cancel()
		<-done
		require.Zero(t, running.Load())
	})
}

// TestGateRunsOnTheLeader checks that only the leader calls its gate, with the verified caller, whichever member
// received the call. A command that the gate refuses must not run.
func TestGateRunsOnTheLeader(t *testing.T) {
	runs := 0
	w, on := pair(leadertest.NewLeadership(1), leader.Repeatable, func(context.Context, sum) (int, error) { runs++; return 7, nil })
	left := 3
	w.Members[1].SetGate(func(ctx context.Context) error {
		require.Equal(t, cloud.UserID("ada"), auth.CallerOf(ctx).User)
		if left == 0 {
			return fault.New(fault.Throttled, "enough").MayRetryAfter(time.Minute)
		}
		left--
		return nil
	})
	w.Members[2].SetGate(func(context.Context) error { t.Error("the gate of a follower was called"); return nil })
	ctx := auth.With(t.Context(), &cloud.Caller{User: "ada"}, auth.REST)
	for i := range 10 {
		_, err := on[i%2](ctx, sum{})
		require.Equal(t, i >= 3, fault.Is(err, fault.Throttled), "call %d: %v", i, err)
	}
	require.Equal(t, 3, runs)
}
