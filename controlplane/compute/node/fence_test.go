package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (w *world) fence(id cloud.NodeID) (f *Fence) {
	w.t.Helper()
	require.NoError(w.t, w.records.Local(func(v *store.View) (err error) { f, err = FenceOf(v, id); return err }))
	return f
}

// leadershipHook calls a function at each call of Leader.
type leadershipHook struct {
	leader.Leadership
	called func()
}

func (l leadershipHook) Leader() (uint64, uint64) {
	l.called()
	return l.Leadership.Leader()
}

// TestHeartbeatWhileFencing writes the Fence record of a host while the host sends a heartbeat. The heartbeat must not
// renew the lease: the record allows that VMs of the host start elsewhere.
func TestHeartbeatWhileFencing(t *testing.T) {
	w := newWorld(t)
	w.follow(1)
	s, a := w.members[1], w.host(1, 1)
	ctx := limited(t)
	_, err := a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)
	fenced, err := s.FenceLost(ctx, a.id)
	require.NoError(t, err)
	require.False(t, fenced, "the host has just sent a heartbeat")

	w.pass((LostTime + 1000) * time.Millisecond)
	calls := 0
	s.opts.Leadership = leadershipHook{s.opts.Leadership, func() {
		if calls++; calls == 2 { // the last check of heartbeat
			fenced, err := s.FenceLost(ctx, a.id)
			require.True(t, err == nil && fenced, "%v", err)
		}
	}}
	_, err = s.heartbeat(ctx, cloud.Node{ID: a.id, Name: "rack-1", Declared: cloud.NodeReady})
	require.True(t, fault.Is(err, fault.Unavailable), "the lease of a fenced host is renewed: %v", err)
	require.NotNil(t, w.fence(a.id))
	lost, err := s.Lost()
	require.NoError(t, err)
	require.Equal(t, []cloud.NodeID{a.id}, lost)

	require.True(t, s.fencings.begin(a.id))
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
	refused(t, err, codes.Unavailable, "has begun to fence this host")
	s.fencings.end(a.id)
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)
	require.Nil(t, w.fence(a.id), "the host answers again")
	lost, err = s.Lost()
	require.NoError(t, err)
	require.Empty(t, lost)
}

// TestLostHosts checks which silent hosts are lost. The time of silence begins at the start of the leader's term. An
// evicted or banned host runs on without heartbeats, so it is lost only if a caller has confirmed that it is off.
func TestLostHosts(t *testing.T) {
	w := newWorld(t)
	stop := w.follow(1)
	s := w.members[1]
	ctx := auth.With(limited(t), &cloud.Caller{User: "root"}, auth.RPC)
	silent, evicted, banned := w.host(1, 1), w.host(1, 2), w.host(1, 3)
	w.place(evicted.id, "vm", &Placed{Project: "web"})
	w.update(func(tx *store.Tx) error { hostKeys.Put(tx, &banned.id, keyText(make([]byte, 32))); return nil })
	lost := func() []cloud.NodeID {
		require.Eventually(t, func() bool { return len(s.Fleet()) == 3 }, 10*time.Second, time.Millisecond)
		all, err := s.Lost()
		require.NoError(t, err)
		return all
	}
	_, err := s.Evict(ctx, evicted.id, true)
	require.NoError(t, err)
	_, err = s.Ban(ctx, banned.id, "", "stolen")
	require.NoError(t, err)
	w.pass((LostTime - 5000) * time.Millisecond)
	require.Empty(t, lost(), "the lease of the hosts may not have ended")
	w.pass(6 * time.Second)
	require.Equal(t, []cloud.NodeID{silent.id}, lost())
	for _, id := range []cloud.NodeID{evicted.id, banned.id} {
		_, err = s.FenceByHand(ctx, id, true)
		require.NoError(t, err)
	}
	require.Equal(t, []cloud.NodeID{silent.id, evicted.id, banned.id}, lost())
	_, err = s.FenceByHand(ctx, "00000000-0000-7000-a000-000000000099", true)
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)

	stop()
	w.follow(1)
	require.Empty(t, lost(), "a new leader does not know when the last heartbeat was sent")
	w.pass(cloud.HeartbeatTimeout*time.Millisecond + time.Second)
	require.Equal(t, []cloud.NodeID{evicted.id, banned.id}, lost(), "a caller has confirmed that they are off")
}
