package node

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// user is a user of an open console over member 2.
type user struct {
	input  chan []byte
	output chan ConsoleOutput
	end    chan error
}

func (w *world) openConsole(host cloud.NodeID, vm cloud.VMID) *user {
	u := &user{input: make(chan []byte), output: make(chan ConsoleOutput, 10), end: make(chan error, 1)}
	ctx := limited(w.t)
	go func() {
		u.end <- w.members[2].OpenConsole(ctx, ConsoleRequest{
			Tenant: cloud.Tenant{Org: "acme", Project: "web"}, Node: host, VM: vm, Kind: agentv1.ConsoleKind_CONSOLE_KIND_SERIAL, FromOffset: new(int64(7)),
		}, ConsolePipe{
			Recv: func(ctx context.Context) ([]byte, error) {
				select {
				case data, more := <-u.input:
					if !more {
						return nil, io.EOF
					}
					return data, nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			},
			Send: func(out ConsoleOutput) error { u.output <- out; return nil },
		})
	}()
	return u
}

// TestOpenConsole opens consoles through a follower, and ends them in every possible way. Data must pass in both
// directions, and only the host of the VM may answer. An agent that does not know consoles must get no request.
func TestOpenConsole(t *testing.T) {
	w := newWorld(t)
	a, b := w.host(1, 1), w.host(1, 2)
	require.ErrorContains(t, <-w.openConsole(a.id, testVM(1)).end, "not connected")
	s := a.watch(t)
	s.all()
	f, ok := fault.From(<-w.openConsole(a.id, testVM(1)).end)
	require.True(t, ok)
	require.Equal(t, []any{fault.FailedPrecondition, "HOST_TOO_OLD", false}, []any{f.Kind, f.Reason, f.Retry})
	w.enableFeature(a.id, cloud.FeatureConsoles)
	b.watch(t).all()
	nextRequest := func() *agentv1.OpenConsoleRequest {
		m := s.next()
		require.Len(t, m.GetOpenConsoles(), 1)
		return m.GetOpenConsoles()[0]
	}
	answer := func(a agent, id string) agentv1.AgentService_StreamConsoleClient {
		out, err := a.StreamConsole(limited(t))
		require.NoError(t, err)
		require.NoError(t, out.Send(&agentv1.StreamConsoleRequest{RequestId: id}))
		return out
	}
	refusal := errors.New("the host has refused it")
	for name, c := range map[string]struct {
		end  func(out agentv1.AgentService_StreamConsoleClient, u *user)
		want error // nil if the console ends without an error
		kind fault.Kind
		why  string
	}{
		"the user closes it": {end: func(out agentv1.AgentService_StreamConsoleClient, u *user) {
			u.input <- []byte("exit\n")
			close(u.input)
			for _, want := range []string{"exit\n", ""} {
				in, err := out.Recv()
				require.NoError(t, err)
				require.Equal(t, want, string(in.GetData()))
				require.Equal(t, want == "", in.GetEnd())
			}
			require.Empty(t, u.end, "the console must not end before the host has written the input")
			require.NoError(t, out.CloseSend())
		}},
		"the VM stops": {end: func(out agentv1.AgentService_StreamConsoleClient, _ *user) { require.NoError(t, out.CloseSend()) }},
		"it is taken over": {func(out agentv1.AgentService_StreamConsoleClient, _ *user) {
			require.NoError(t, out.Send(&agentv1.StreamConsoleRequest{Error: "taken", Reason: "CONSOLE_TAKEN_OVER"}))
		}, refusal, fault.FailedPrecondition, "CONSOLE_TAKEN_OVER"},
		"an unknown reason": {func(out agentv1.AgentService_StreamConsoleClient, _ *user) {
			require.NoError(t, out.Send(&agentv1.StreamConsoleRequest{Error: "x", Reason: "EVIL"}))
		}, refusal, fault.FailedPrecondition, ""},
		"the agent is starting": {func(out agentv1.AgentService_StreamConsoleClient, _ *user) {
			require.NoError(t, out.Send(&agentv1.StreamConsoleRequest{Error: "x", Reason: agentStarting}))
		}, refusal, fault.Unavailable, ""},
		"QEMU closes the port": {func(out agentv1.AgentService_StreamConsoleClient, _ *user) {
			require.NoError(t, out.Send(&agentv1.StreamConsoleRequest{Error: "x", Reason: consoleLost}))
		}, refusal, fault.Unavailable, ""},
		"too much input": {func(_ agentv1.AgentService_StreamConsoleClient, u *user) { u.input <- make([]byte, MaxConsoleInput+1) }, refusal, fault.InvalidArgument, ""},
	} {
		t.Run(name, func(t *testing.T) {
			u := w.openConsole(a.id, testVM(1))
			ask := nextRequest()
			require.Equal(t, string(testVM(1)), ask.GetVmId())
			require.EqualValues(t, 7, ask.GetFromOffset())
			_, err := answer(b, ask.GetRequestId()).Recv()
			refused(t, err, codes.NotFound, "no reader waits")
			out := answer(a, ask.GetRequestId())
			require.NoError(t, out.Send(&agentv1.StreamConsoleRequest{Offset: 7}))
			require.Equal(t, ConsoleOutput{Offset: 7}, <-u.output)
			_, err = answer(a, ask.GetRequestId()).Recv()
			refused(t, err, codes.AlreadyExists, "another stream already answers")
			u.input <- []byte("ls\n")
			in, err := out.Recv()
			require.NoError(t, err)
			require.Equal(t, "ls\n", string(in.GetData()))
			require.NoError(t, out.Send(&agentv1.StreamConsoleRequest{Data: []byte("file"), Offset: 11}))
			require.Equal(t, ConsoleOutput{Data: []byte("file"), Offset: 11}, <-u.output)

			c.end(out, u)
			err = <-u.end
			if c.want == nil {
				require.NoError(t, err)
			} else {
				f, ok := fault.From(err)
				require.True(t, ok, "%v", err)
				require.Equal(t, c.kind, f.Kind)
				require.Equal(t, c.why, f.Reason)
			}
			canceled := nextRequest()
			require.True(t, canceled.GetCancel())
			require.Equal(t, ask.GetRequestId(), canceled.GetRequestId())
			_, err = out.Recv() // the member ends its side too, although the VM prints nothing
			require.ErrorIs(t, err, io.EOF)
		})
	}
}

// TestOpenConsolesAreBounded checks the limits of open consoles of a VM, a project, an org and a host.
func TestOpenConsolesAreBounded(t *testing.T) {
	h := newOpenConsoles()
	n := 0
	add := func(org, project string, vm int) error {
		n++
		_, err := h.add(string(rune(n)), "host", cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)}, testVM(vm))
		return err
	}
	for range maxVMOpenConsoles {
		require.NoError(t, add("a", "a1", 1))
	}
	require.True(t, fault.Is(add("a", "a1", 1), fault.ResourceExhausted))
	for range maxProjectOpenConsoles - maxVMOpenConsoles {
		require.NoError(t, add("a", "a1", 2))
	}
	require.True(t, fault.Is(add("a", "a1", 3), fault.ResourceExhausted))
	for i := range maxOrgOpenConsoles - maxProjectOpenConsoles {
		require.NoError(t, add("a", "a2", 10+i))
	}
	require.True(t, fault.Is(add("a", "a3", 40), fault.ResourceExhausted))
	for i := range maxOpenConsoles - maxOrgOpenConsoles {
		require.NoError(t, add([]string{"b", "c"}[i%2], []string{"b1", "c1"}[i%2], 50+i))
	}
	require.True(t, fault.Is(add("d", "d1", 100), fault.Unavailable))
}

// TestUserDoesNotRead checks that a console ends if its user does not read the output.
func TestUserDoesNotRead(t *testing.T) {
	unblock := make(chan struct{})
	defer close(unblock)
	send := sendWithin(time.Millisecond, func(ConsoleOutput) error { <-unblock; return nil })
	require.True(t, fault.Is(send(ConsoleOutput{}), fault.DeadlineExceeded))
	broken := errors.New("the connection broke")
	require.Equal(t, broken, sendWithin(time.Hour, func(ConsoleOutput) error { return broken })(ConsoleOutput{}))
}
