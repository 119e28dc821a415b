package uplink

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// slowHeartbeats is a client that returns from each heartbeat after the duration in takes, or when its context ends.
type slowHeartbeats struct {
	vmv1.NodeServiceClient
	takes atomic.Int64 // a duration in nanoseconds
}

func (s *slowHeartbeats) HeartbeatNode(ctx context.Context, _ *vmv1.HeartbeatNodeRequest, _ ...grpc.CallOption) (*vmv1.Node, error) {
	select {
	case <-time.After(time.Duration(s.takes.Load())):
		return &vmv1.Node{}, nil
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// TestLeaseStartsWhenHeartbeatIsSent checks that the lease runs from the time at which a heartbeat was sent, not from
// its response. A heartbeat without a response within heartbeatTimeout must not renew the lease, and must end the
// session.
func TestLeaseStartsWhenHeartbeatIsSent(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	a := open(t, t.TempDir(), nil, m)
	synctest.Test(t, func(t *testing.T) {
		beats := &slowHeartbeats{}
		beats.takes.Store(int64(2 * time.Second))
		done := make(chan error, 1)
		start := time.Now()
		go func() { done <- a.sendHeartbeats(t.Context(), beats, 30*time.Second) }()
		time.Sleep(time.Second)
		_, ok := a.Lease()
		require.False(t, ok, "there must be no lease before the response")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		until, ok := a.Lease()
		require.True(t, ok)
		require.Equal(t, start.Add(30*time.Second), until, "the lease begins when the heartbeat was sent")
		time.Sleep(5 * time.Second)
		synctest.Wait()
		until, _ = a.Lease()
		require.Equal(t, start.Add(35*time.Second), until)
		synctest.Wait()
		beats.takes.Store(int64(time.Hour))
		require.Equal(t, codes.DeadlineExceeded, code(<-done))
		until, _ = a.Lease()
		require.Equal(t, start.Add(35*time.Second), until)
	})
}

// refusingHeartbeats is a client that refuses each heartbeat, but not with a code that ends the session.
type refusingHeartbeats struct{ vmv1.NodeServiceClient }

func (refusingHeartbeats) HeartbeatNode(context.Context, *vmv1.HeartbeatNodeRequest, ...grpc.CallOption) (*vmv1.Node, error) {
	return nil, status.Error(codes.InvalidArgument, "no")
}

// TestRefusedHeartbeatsEndTheSession checks that a session ends after cloud.AddressLease without an acknowledged
// heartbeat, and that Contact returns the time at which the last acknowledged heartbeat was sent.
func TestRefusedHeartbeatsEndTheSession(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	a := open(t, t.TempDir(), nil, m)
	synctest.Test(t, func(t *testing.T) {
		_, ok := a.Contact()
		require.False(t, ok)
		began := time.Now()
		require.NoError(t, a.sendHeartbeat(t.Context(), &slowHeartbeats{}, time.Minute))
		sent, ok := a.Contact()
		require.True(t, ok)
		require.Equal(t, began, sent)
		require.ErrorIs(t, a.sendHeartbeats(t.Context(), refusingHeartbeats{}, time.Minute), errUnacknowledged)
		require.GreaterOrEqual(t, time.Since(began), cloud.AddressLease)
		sent, _ = a.Contact()
		require.Equal(t, began, sent)
	})
}

// silentWatch is a client whose watch returns the messages in sent, and then none.
type silentWatch struct {
	agentv1.AgentServiceClient
	grpc.ClientStream
	ctx  context.Context
	sent []*agentv1.WatchResponse
}

func (m *silentWatch) Watch(ctx context.Context, _ *agentv1.WatchRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[agentv1.WatchResponse], error) {
	m.ctx = ctx
	return m, nil
}

func (m *silentWatch) Recv() (*agentv1.WatchResponse, error) {
	if len(m.sent) > 0 {
		next := m.sent[0]
		m.sent = m.sent[1:]
		return next, nil
	}
	<-m.ctx.Done()
	return nil, status.FromContextError(m.ctx.Err()).Err()
}

func (m *silentWatch) Trailer() metadata.MD { return nil }

// TestSilence checks that a watch ends after snapshotTimeout if the member sends no complete snapshot, and that it does
// not end if the member sends nothing after a complete one.
func TestSilence(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	for name, sent := range map[string][]*agentv1.WatchResponse{
		"no message": nil, "an incomplete snapshot": {{Term: 1, Revision: 1}},
	} {
		a := open(t, t.TempDir(), nil, m)
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			err := a.watch(t.Context(), &silentWatch{sent: sent}, func(time.Duration) {})
			require.ErrorIs(t, err, errSilent, name)
			require.Equal(t, snapshotTimeout, time.Since(start))
		})
	}
	a := open(t, t.TempDir(), nil, m)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		err := a.watch(ctx, &silentWatch{sent: []*agentv1.WatchResponse{snapshot(1, 1)}}, func(time.Duration) {})
		require.False(t, errors.Is(err, errSilent))
		require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
	})
}

// TestStoredAssignment checks that the assignment on disk is delivered after storedDelay with Stored set, and that it
// is not delivered if a member has sent an assignment before.
func TestStoredAssignment(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	dir := t.TempDir()
	a := open(t, dir, nil, m).run(t)
	next(t, m.watches)
	m.send <- snapshot(3, 9, "a")
	next(t, a.assigned)
	a.stop()

	a = open(t, dir, nil, m)
	synctest.Test(t, func(t *testing.T) {
		done := make(chan error, 1)
		go func() { done <- a.deliverStored(t.Context()) }()
		time.Sleep(storedDelay - 1)
		synctest.Wait()
		require.Empty(t, a.assigned)
		require.NoError(t, <-done)
		got := <-a.assigned
		require.True(t, got.Stored)
		require.EqualValues(t, 9, got.Revision)
		require.Contains(t, got.VMs, cloud.VMID("a"))
		require.False(t, a.stored.Stored, "the delivery must not set Stored in the original assignment")
	})
	a = open(t, dir, nil, m)
	a.deliver(&Assignment{Term: 3, Revision: 10})
	synctest.Test(t, func(t *testing.T) {
		require.NoError(t, a.deliverStored(t.Context()))
		require.False(t, (<-a.assigned).Stored)
		require.Empty(t, a.assigned)
	})
}

// TestRoute checks which member is next, and the pause before it: about 0.1 s in the first round over the members, then
// longer, and zero after an error that names the leader, but only maxRedirects times in a row.
func TestRoute(t *testing.T) {
	members := []string{"a", "b", "c"}
	var r route
	require.Equal(t, "a", r.next(members))
	r.failed(errors.New("refused"))
	require.Equal(t, 50*time.Millisecond, r.pause(3, 0))
	require.Equal(t, "b", r.next(members))
	r.failed(errors.New("refused"))
	require.Equal(t, "c", r.next(members))
	for range 100 {
		r.failed(errors.New("refused"))
	}
	require.Equal(t, lastPause/2, r.pause(3, 0))
	require.Less(t, r.pause(3, 0.999), lastPause*3/2)
	r.succeeded()
	r.failed(errors.New("gone"))
	require.Equal(t, "a", r.next(members))
	require.Equal(t, "b", r.next(members))

	// Two members each name another member as the leader, again and again.
	m, o := &member{leader: "x"}, &member{leader: "y"}
	followed := 0
	for range 10 {
		r.failed(m.redirect())
		if r.pause(3, 0.5) == 0 {
			followed++
		}
		r.next(members)
		r.failed(o.redirect())
		if r.pause(3, 0.5) == 0 {
			followed++
		}
		r.next(members)
	}
	require.Less(t, followed, 16, "too few pauses between members that name each other as the leader")
	require.Positive(t, followed)

	only := []string{"a"}
	require.Equal(t, "a", r.next(only))
	require.Equal(t, "a", r.next(only))
}
