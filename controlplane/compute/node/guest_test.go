package node

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestGuestCall calls a guest agent through a follower. The leader must send the request to the host's agent, and the
// caller must get the result or the error that the agent sends back.
func TestGuestCall(t *testing.T) {
	w := newWorld(t)
	a := w.host(1, 1)
	w.enableFeature(a.id, cloud.FeatureGuestCalls)
	s := a.watch(t)
	s.all()
	type end struct {
		result *agentv1.GuestResult
		err    error
	}
	request := &agentv1.GuestRequest{VmId: string(testVM(1)), Call: &agentv1.GuestRequest_Password{Password: &agentv1.GuestPassword{Username: "root", Password: "secret"}}}
	before := w.records.Revision()
	for _, c := range []struct {
		name  string
		parts []*agentv1.SendGuestResultRequest
		kind  fault.Kind
		says  string
	}{
		{"a result in parts", encoded(t, &agentv1.GuestResult{Stdout: bytes.Repeat([]byte("x"), 300<<10), ExitCode: 3}), 0, ""},
		{"an error", []*agentv1.SendGuestResultRequest{{}, {Error: "no guest agent runs"}}, fault.FailedPrecondition, "no guest agent runs"},
		{"a busy agent", []*agentv1.SendGuestResultRequest{{Error: "16 calls in progress", Reason: agentBusy}}, fault.Unavailable, "16 calls in progress"},
		{"more than 2 MiB", encoded(t, &agentv1.GuestResult{Stdout: make([]byte, maxGuestResult)}), fault.Unavailable, "sent more than"},
		{"no result", []*agentv1.SendGuestResultRequest{{Data: []byte("\xff\xff")}}, fault.Unavailable, "an invalid message"},
	} {
		ended := make(chan end, 1)
		go func() {
			result, err := w.members[2].CallGuest(limited(t), cloud.Tenant{Org: "acme", Project: "web"}, a.id, request)
			ended <- end{result, err}
		}()
		m := s.next()
		require.Len(t, m.GetGuestRequests(), 1)
		r := m.GetGuestRequests()[0]
		require.Equal(t, "secret", r.GetPassword().GetPassword())
		stream, err := a.SendGuestResult(limited(t))
		require.NoError(t, err)
		require.NoError(t, stream.Send(&agentv1.SendGuestResultRequest{RequestId: r.GetRequestId()}))
		for _, part := range c.parts {
			_ = stream.Send(part) // the reader may have ended
		}
		_, _ = stream.CloseAndRecv()
		got := <-ended
		if c.says == "" {
			require.NoError(t, got.err, c.name)
			require.EqualValues(t, 3, got.result.GetExitCode())
			require.Len(t, got.result.GetStdout(), 300<<10)
		} else {
			require.True(t, fault.Is(got.err, c.kind), "%s: %v", c.name, got.err)
			require.ErrorContains(t, got.err, c.says, c.name)
		}
		canceled := s.next().GetGuestRequests()[0]
		require.True(t, canceled.GetCancel())
		require.Equal(t, r.GetRequestId(), canceled.GetRequestId())
	}
	require.Equal(t, before, w.records.Revision(), "a call must not change a record")
}

// TestInterruptedGuestCall breaks the stream of a host before the result. A request to run a program must not be marked
// as retryable, because a repeat runs the program again. The other requests may be repeated.
func TestInterruptedGuestCall(t *testing.T) {
	w := newWorld(t)
	a := w.host(1, 1)
	w.enableFeature(a.id, cloud.FeatureGuestCalls)
	s := a.watch(t)
	s.all()
	call := func(r *agentv1.GuestRequest) *fault.Fault {
		ended := make(chan error, 1)
		go func() {
			_, err := w.members[2].CallGuest(limited(t), cloud.Tenant{Org: "acme", Project: "web"}, a.id, r)
			ended <- err
		}()
		ctx, cancel := context.WithCancel(limited(t))
		stream, err := a.SendGuestResult(ctx)
		require.NoError(t, err)
		require.NoError(t, stream.Send(&agentv1.SendGuestResultRequest{RequestId: s.next().GetGuestRequests()[0].GetRequestId()}))
		require.Eventually(t, func() bool {
			w.members[1].guests.mu.Lock()
			defer w.members[1].guests.mu.Unlock()
			for _, one := range w.members[1].guests.open {
				select {
				case <-one.accepted:
					return true
				default:
				}
			}
			return false
		}, 10*time.Second, time.Millisecond)
		cancel()
		f, ok := fault.From(<-ended)
		require.True(t, ok)
		require.Equal(t, fault.Unavailable, f.Kind)
		require.True(t, s.next().GetGuestRequests()[0].GetCancel())
		return f
	}
	f := call(&agentv1.GuestRequest{Call: &agentv1.GuestRequest_Password{Password: &agentv1.GuestPassword{}}})
	require.True(t, f.Retry)
	f = call(&agentv1.GuestRequest{Call: &agentv1.GuestRequest_Command{Command: &agentv1.GuestCommand{Command: []string{"reboot"}}}})
	require.False(t, f.Retry, "a client would run the program again")
	require.Contains(t, f.Message, "may have been started")
}

// TestGuestCallOfOldAgent checks that a call through an agent that does not know GuestRequests is refused at once.
func TestGuestCallOfOldAgent(t *testing.T) {
	w := newWorld(t)
	a := w.host(1, 1)
	s := a.watch(t)
	s.all()
	_, err := w.members[2].CallGuest(limited(t), cloud.Tenant{Org: "acme", Project: "web"}, a.id, &agentv1.GuestRequest{})
	f, ok := fault.From(err)
	require.True(t, ok, "%v", err)
	require.Equal(t, []any{fault.FailedPrecondition, "HOST_TOO_OLD", false}, []any{f.Kind, f.Reason, f.Retry})
}

// enableFeature records that the agent of a host has a feature.
func (w *world) enableFeature(id cloud.NodeID, feature string) {
	w.update(func(tx *store.Tx) error {
		n, err := Nodes.Get(tx, string(id))
		if err != nil {
			return err
		}
		if n == nil {
			n = &cloud.Node{ID: id}
		}
		n.Features = map[string]string{feature: ""}
		Nodes.Put(tx, n, string(id))
		return nil
	})
}

// encoded returns the messages with which an agent sends a result.
func encoded(t *testing.T, r *agentv1.GuestResult) (out []*agentv1.SendGuestResultRequest) {
	t.Helper()
	data, err := proto.Marshal(r)
	require.NoError(t, err)
	for len(data) > 0 {
		n := min(len(data), 64<<10)
		out = append(out, &agentv1.SendGuestResultRequest{Data: data[:n]})
		data = data[n:]
	}
	return out
}

// TestGuestCallLimits checks that the concurrent calls of one project and one org on a host are limited, and that
// another org can still make calls.
func TestGuestCallLimits(t *testing.T) {
	w := newWorld(t)
	s := w.members[1]
	s.openSession("host", func(error) {})
	w.enableFeature("host", cloud.FeatureGuestCalls)
	ctx, cancel := context.WithCancel(limited(t))
	ends := make(chan error, maxGuestCalls)
	open := 0
	call := func(org cloud.OrgID, project cloud.ProjectID) error {
		ended := make(chan error, 1)
		go func() {
			ended <- s.callGuestOnLeader(ctx, guestCall{Tenant: cloud.Tenant{Org: org, Project: project}, Node: "host"}, func([]byte) error { return nil })
		}()
		var err error
		require.Eventually(t, func() bool {
			s.guests.mu.Lock()
			defer s.guests.mu.Unlock()
			select {
			case err = <-ended:
				return true
			default:
				return len(s.guests.open) == open+1
			}
		}, 10*time.Second, time.Millisecond)
		if err == nil {
			open++
			go func() { ends <- <-ended }()
		}
		return err
	}
	refused := func(err error, kind fault.Kind) {
		t.Helper()
		require.True(t, fault.Is(err, kind), "%v", err)
	}
	for range maxProjectGuestCalls {
		require.NoError(t, call("evil", "one"))
	}
	refused(call("evil", "one"), fault.ResourceExhausted)
	for range maxOrgGuestCalls - maxProjectGuestCalls {
		require.NoError(t, call("evil", "two"))
	}
	refused(call("evil", "three"), fault.ResourceExhausted)
	for i := range maxGuestCalls - maxOrgGuestCalls {
		require.NoError(t, call("acme", cloud.ProjectID(fmt.Sprint("p", i/maxProjectGuestCalls))))
	}
	refused(call("third", "web"), fault.Unavailable)
	cancel()
	for range open {
		require.ErrorIs(t, <-ends, context.Canceled)
	}
	require.Empty(t, s.guests.open)
}
