package transport

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestErrorsAreForwarded checks that a command on another member returns the same error as on the member itself, except
// internal errors, which become a RemoteError.
func TestErrorsAreForwarded(t *testing.T) {
	w := newTestCluster(t, 2)
	one, two := w.servers[1], w.servers[2]
	full := fault.New(fault.ResourceExhausted, "no host fits").WithReason("NO_HOST_FITS").With("host-1", "is full").
		With("and", uint64(7)).With("deep", map[string]any{"er": map[string]any{"x": "y"}}).MayRetry().Because(errors.New("secret cause"))
	full.Field = "spec"
	f := func(_ context.Context, ask string) (string, error) {
		switch ask {
		case "fault":
			return "", full
		case "wrapped fault":
			return "", errors.Join(errors.New("while testing"), full)
		case "ours":
			return "", errors.New("the disk is gone")
		case "not leader":
			return "", leader.ErrNotLeader
		}
		return "heard " + ask, nil
	}
	leadertest.Handle(one.commands, "test.echo", leader.Once, f)
	echo := leadertest.Handle(two.commands, "test.echo", leader.Once, f)
	ctx := limited(t)

	got, err := echo(ctx, "hello")
	require.NoError(t, err)
	require.Equal(t, "heard hello", got)
	for _, ask := range []string{"fault", "wrapped fault"} {
		_, err = echo(ctx, ask)
		f, ok := fault.From(err)
		require.True(t, ok, "%v", err)
		require.NoError(t, errors.Unwrap(f), "the cause of an error is not sent to other members")
		want, have := *full, *f
		require.JSONEq(t, inJSON(t, want), inJSON(t, have), "the fault differs from that on the leader")
		require.Equal(t, fault.ResourceExhausted, f.Kind)
		require.Equal(t, uint64(7), f.Details["and"])
	}
	_, err = echo(ctx, "ours")
	var remote *leader.RemoteError
	require.ErrorAs(t, err, &remote)
	require.Equal(t, "the disk is gone", remote.Text)
	_, err = two.mesh.Call(ctx, 1, "test.echo", []byte("\x6anot leader"), nil)
	require.ErrorIs(t, err, leader.ErrNotLeader)
	w.leadership.Elect(2)
	_, err = two.mesh.Call(ctx, 1, "test.echo", []byte("\x65hello"), nil)
	require.ErrorIs(t, err, leader.ErrNotLeader, "a member that does not lead does not forward the command")
	w.leadership.Elect(1)
	_, err = two.mesh.Call(ctx, 1, "test.unknown", nil, nil)
	require.True(t, fault.Is(err, fault.Unimplemented))
	_, err = two.mesh.Call(ctx, 1, "test.echo", []byte("\xff"), nil)
	require.ErrorAs(t, err, &remote)
}

func inJSON(t *testing.T, f fault.Fault) string {
	b, err := json.Marshal(f)
	require.NoError(t, err)
	return string(b)
}

// TestCallerAndDeadlineAreForwarded checks that a forwarded command runs with the caller that the first member
// verified, and with the deadline of the call.
func TestCallerAndDeadlineAreForwarded(t *testing.T) {
	w := newTestCluster(t, 2)
	type seen struct {
		Caller   *cloud.Caller
		Deadline time.Time
	}
	f := func(ctx context.Context, _ string) (seen, error) {
		at, _ := ctx.Deadline()
		return seen{auth.CallerOf(ctx), at}, nil
	}
	leadertest.Handle(w.servers[1].commands, "test.who", leader.Repeatable, f)
	who := leadertest.Handle(w.servers[2].commands, "test.who", leader.Repeatable, f)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	deadline, _ := ctx.Deadline()

	got, err := who(ctx, "")
	require.NoError(t, err)
	require.Nil(t, got.Caller, "a request without a caller arrives without a caller")
	ada := &cloud.Caller{
		User: "ada", Proof: cloud.ProofPassword, Scope: cloud.Tenant{Org: "acme", Project: "web"}, RequestID: "r-1", IdempotencyKey: "k-1",
		Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: "acme", Project: "web"}},
	}
	got, err = who(auth.With(ctx, ada, auth.REST), "")
	require.NoError(t, err)
	require.Equal(t, ada, got.Caller)
	require.WithinDuration(t, deadline, got.Deadline, 2*time.Second)
	got, err = who(limited(t), "")
	require.NoError(t, err)
	require.False(t, got.Deadline.IsZero())
}

// TestCallerCancels cancels calls. The caller must get the error of its context, and the context of the command on the
// other member must end.
func TestCallerCancels(t *testing.T) {
	w := newTestCluster(t, 2)
	began, ended := make(chan struct{}, 2), make(chan error, 2)
	wait := func(ctx context.Context, _ string) (string, error) {
		began <- struct{}{}
		<-ctx.Done()
		ended <- ctx.Err()
		return "", ctx.Err()
	}
	leadertest.Handle(w.servers[1].commands, "test.wait", leader.Once, wait)
	leadertest.HandleStream(w.servers[1].commands, "test.drip", func(ctx context.Context, q string, send func([]byte) error) error {
		if err := send([]byte("one drop")); err != nil {
			return err
		}
		_, err := wait(ctx, q)
		return err
	})
	ctx, cancel := context.WithCancel(limited(t))
	go func() { <-began; cancel() }()
	_, err := w.servers[2].mesh.Call(ctx, 1, "test.wait", []byte("\x60"), nil)
	require.Equal(t, context.Canceled, err)
	require.Equal(t, context.Canceled, <-ended)

	ctx, cancel = context.WithCancel(limited(t))
	var drops []string
	err = w.servers[2].mesh.Open(ctx, 1, "test.drip", []byte("\x60"), nil, func(b []byte) error {
		drops = append(drops, string(b))
		<-began
		cancel()
		return nil
	})
	require.Equal(t, context.Canceled, err)
	require.Equal(t, context.Canceled, <-ended)
	require.Equal(t, []string{"one drop"}, drops)

	ctx, cancel = context.WithTimeout(limited(t), 50*time.Millisecond)
	defer cancel()
	_, err = w.servers[2].mesh.Call(ctx, 1, "test.wait", []byte("\x60"), nil)
	require.Equal(t, context.DeadlineExceeded, err)
}

// TestStreams checks that a forwarded stream delivers all pieces in order, and then the error of the command.
func TestStreams(t *testing.T) {
	w := newTestCluster(t, 2)
	leadertest.HandleStream(w.servers[1].commands, "test.count", func(_ context.Context, n int, send func([]byte) error) error {
		for i := range n {
			if err := send([]byte{byte(i)}); err != nil {
				return err
			}
		}
		if n == 3 {
			return fault.New(fault.FailedPrecondition, "three is enough")
		}
		return nil
	})
	ctx := limited(t)
	var got []byte
	take := func(b []byte) error { got = append(got, b...); return nil }
	require.NoError(t, w.servers[2].mesh.Open(ctx, 1, "test.count", []byte{5}, nil, take))
	require.Equal(t, []byte{0, 1, 2, 3, 4}, got)
	got = nil
	err := w.servers[2].mesh.Open(ctx, 1, "test.count", []byte{3}, nil, take)
	require.True(t, fault.Is(err, fault.FailedPrecondition))
	require.Equal(t, []byte{0, 1, 2}, got)
	full := errors.New("the reader is full")
	require.ErrorIs(t, w.servers[2].mesh.Open(ctx, 1, "test.count", []byte{5}, nil, func([]byte) error { return full }), full)
	require.True(t, fault.Is(w.servers[2].mesh.Open(ctx, 1, "test.unknown", nil, nil, take), fault.Unimplemented))
	w.leadership.Elect(2)
	require.ErrorIs(t, w.servers[2].mesh.Open(ctx, 1, "test.count", []byte{5}, nil, take), leader.ErrNotLeader)
}

// TestExchanges checks that a forwarded exchange receives and delivers all pieces in order, and then the error of the
// command. If the caller's pipe fails or the caller cancels, the exchange must end.
func TestExchanges(t *testing.T) {
	w := newTestCluster(t, 2)
	ended := make(chan error, 1)
	leadertest.HandleExchange(w.servers[1].commands, "test.echo", func(ctx context.Context, last string, pipe leader.Pipe) error {
		for {
			b, err := pipe.Recv(ctx)
			switch {
			case errors.Is(err, io.EOF) && last == "":
				return nil
			case errors.Is(err, io.EOF):
				return fault.New(fault.FailedPrecondition, "%s", last)
			case err != nil:
				ended <- err
				return err
			}
			if err := pipe.Send(b); err != nil {
				return err
			}
		}
	})
	ctx := limited(t)
	var got []byte
	// pipe sends n pieces, waits until each of them has come back, and then calls end.
	pipe := func(n int, end func(context.Context) error) leader.Pipe {
		got = nil
		left, back := n, make(chan struct{}, n)
		return leader.Pipe{
			Recv: func(ctx context.Context) ([]byte, error) {
				if left--; left >= 0 {
					return []byte{byte(left)}, nil
				}
				for range n {
					<-back
				}
				return nil, end(ctx)
			},
			Send: func(b []byte) error {
				got = append(got, b...)
				back <- struct{}{}
				return nil
			},
		}
	}
	atEnd := func(context.Context) error { return io.EOF }
	mesh := w.servers[2].mesh
	require.NoError(t, mesh.Exchange(ctx, 1, "test.echo", []byte("\x60"), nil, pipe(5, atEnd)))
	require.Equal(t, []byte{4, 3, 2, 1, 0}, got)
	err := mesh.Exchange(ctx, 1, "test.echo", []byte("\x63end"), nil, pipe(2, atEnd))
	require.True(t, fault.Is(err, fault.FailedPrecondition))
	require.Equal(t, []byte{1, 0}, got)

	broken := pipe(1, func(context.Context) error { return errors.New("the source broke") })
	require.Error(t, mesh.Exchange(ctx, 1, "test.echo", []byte("\x60"), nil, broken))
	require.ErrorIs(t, <-ended, context.Canceled)
	canceled, cancel := context.WithCancel(ctx)
	waiting := pipe(1, func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	})
	require.Equal(t, context.Canceled, mesh.Exchange(canceled, 1, "test.echo", []byte("\x60"), nil, waiting))
	require.ErrorIs(t, <-ended, context.Canceled)

	require.True(t, fault.Is(mesh.Exchange(ctx, 1, "test.unknown", nil, nil, pipe(0, atEnd)), fault.Unimplemented))
	w.leadership.Elect(2)
	require.ErrorIs(t, mesh.Exchange(ctx, 1, "test.echo", []byte("\x60"), nil, pipe(0, atEnd)), leader.ErrNotLeader)
}

// TestNotSent checks that ErrNotSent is returned only for calls that certainly did not reach the other member.
func TestNotSent(t *testing.T) {
	// silent is a member whose process hangs: its kernel accepts connections, but nothing responds.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { silent.Close() })
	w := newTestCluster(t, 3, 3)
	ctx := limited(t)
	m, err := New(Options{
		Self: 2, Members: map[uint64]string{1: w.addresses[1], 2: w.addresses[2], 3: w.addresses[3], 4: silent.Addr().String()},
		Certificate: issued(t, w.authority, "member", "2", time.Now()), Authority: w.authority, Log: w.servers[1].mesh.opts.Log,
	})
	require.NoError(t, err)
	for member, what := range map[uint64]string{3: "a stopped member", 4: "a member that does not respond", 2: "the member itself", 9: "an unknown member"} {
		_, err := m.Call(ctx, member, "test", nil, nil)
		require.ErrorIs(t, err, leader.ErrNotSent, what)
		require.ErrorIs(t, m.Open(ctx, member, "test", nil, nil, nil), leader.ErrNotSent, what)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	_, err = m.Call(gone, 4, "test", nil, nil)
	require.Equal(t, context.Canceled, err, "the end of the caller's context does not mean that the request was not sent")

	// If the member stops while the command runs, the error must be none of those that mean a known outcome.
	began := make(chan struct{})
	leadertest.Handle(w.servers[1].commands, "test.die", leader.Once, func(ctx context.Context, _ string) (string, error) {
		close(began)
		<-ctx.Done()
		return "", ctx.Err()
	})
	go func() { <-began; w.servers[1].server.Stop() }()
	_, err = m.Call(ctx, 1, "test.die", []byte("\x60"), nil)
	require.Error(t, err)
	require.NotErrorIs(t, err, leader.ErrNotSent)
	require.NotErrorIs(t, err, leader.ErrNotLeader)
	_, isFault := fault.From(err)
	require.False(t, isFault)
	var remote *leader.RemoteError
	require.False(t, errors.As(err, &remote))
	done, stop := context.WithCancel(ctx)
	stop()
	m.runner = w.servers[2].runner
	m.Run(done) // Run returns at once and closes the connections
	_, err = m.Call(ctx, 1, "test", nil, nil)
	require.ErrorIs(t, err, leader.ErrNotSent, "no request is sent after Run has returned")
}
