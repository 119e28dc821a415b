package kv

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/lessor"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
)

func (w *world) grant(t *testing.T, id, ttl int64) *pb.LeaseGrantResponse {
	t.Helper()
	r, err := w.LeaseGrant(t.Context(), &pb.LeaseGrantRequest{ID: id, TTL: ttl})
	require.NoError(t, err)
	return r
}

func (w *world) putWithLease(t *testing.T, key string, lease int64) error {
	t.Helper()
	_, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte(key), Lease: lease})
	return err
}

// waitForLessor waits until the service expires leases as the leader of a term.
func (w *world) waitForLessor(t *testing.T, term uint64) {
	t.Helper()
	require.Eventually(t, func() bool {
		w.lessor.mu.Lock()
		defer w.lessor.mu.Unlock()
		return w.lessor.term == term && w.lessor.lessor != nil
	}, 10*time.Second, time.Millisecond)
}

func TestLeases(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.waitForLessor(t, 2)
	lease := w.grant(t, 7, 100)
	require.EqualValues(t, 7, lease.ID)
	require.EqualValues(t, 100, lease.TTL)
	_, err := w.LeaseGrant(t.Context(), &pb.LeaseGrantRequest{ID: 7, TTL: 100})
	require.Equal(t, rpctypes.ErrGRPCLeaseExist, err)
	_, err = w.LeaseGrant(t.Context(), &pb.LeaseGrantRequest{TTL: lessor.MaxTTL + 1})
	require.Equal(t, rpctypes.ErrGRPCLeaseTTLTooLarge, err)
	short := w.grant(t, 0, 0)
	require.EqualValues(t, 2, short.TTL, "1.5 election timeouts, rounded up to seconds")
	require.Positive(t, short.ID)
	require.Less(t, short.ID, int64(1)<<53)

	require.NoError(t, w.putWithLease(t, "a", 7))
	require.NoError(t, w.putWithLease(t, "b", 7))
	require.Equal(t, rpctypes.ErrGRPCLeaseNotFound, w.putWithLease(t, "c", 8))

	left, err := w.LeaseTimeToLive(t.Context(), &pb.LeaseTimeToLiveRequest{ID: 7, Keys: true})
	require.NoError(t, err)
	require.EqualValues(t, 100, left.GrantedTTL)
	require.InDelta(t, 99, left.TTL, 1)
	require.Equal(t, [][]byte{[]byte("a"), []byte("b")}, left.Keys)
	none, err := w.LeaseTimeToLive(t.Context(), &pb.LeaseTimeToLiveRequest{ID: 8})
	require.NoError(t, err)
	require.EqualValues(t, -1, none.TTL)

	alive, err := w.LeaseKeepAlive(t.Context(), &pb.LeaseKeepAliveRequest{ID: 7})
	require.NoError(t, err)
	require.EqualValues(t, 100, alive.TTL)
	ended, err := w.LeaseKeepAlive(t.Context(), &pb.LeaseKeepAliveRequest{ID: 8})
	require.NoError(t, err)
	require.Zero(t, ended.TTL)

	all, err := w.LeaseLeases(t.Context(), &pb.LeaseLeasesRequest{})
	require.NoError(t, err)
	require.Len(t, all.Leases, 2)

	_, err = w.LeaseRevoke(t.Context(), &pb.LeaseRevokeRequest{ID: 7})
	require.NoError(t, err)
	_, err = w.LeaseRevoke(t.Context(), &pb.LeaseRevokeRequest{ID: 7})
	require.Equal(t, rpctypes.ErrGRPCLeaseNotFound, err)
	_, err = w.LeaseRevoke(t.Context(), &pb.LeaseRevokeRequest{})
	require.Equal(t, rpctypes.ErrGRPCLeaseNotFound, err)
	r, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")})
	require.NoError(t, err)
	require.Empty(t, r.Kvs)
}

// advanceClock moves the service's clock forward, and makes the service check for expired leases.
func (w *world) advanceClock(by time.Duration) {
	w.lessor.mu.Lock()
	defer w.lessor.mu.Unlock()
	w.ahead.Add(int64(by))
	select {
	case w.lessor.wake <- struct{}{}:
	default:
	}
}

func TestLeaderRevokesExpiredLeases(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.waitForLessor(t, 2)
	w.grant(t, 7, 60)
	w.grant(t, 8, 120)
	require.NoError(t, w.putWithLease(t, "a", 7))
	require.NoError(t, w.putWithLease(t, "b", 8))
	w.advanceClock(61 * time.Second)
	require.Eventually(t, func() bool {
		r, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
		return err == nil && len(r.Kvs) == 0
	}, 10*time.Second, time.Millisecond)
	b, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("b")})
	require.NoError(t, err)
	require.Len(t, b.Kvs, 1)
	require.EqualValues(t, 1, w.counters.expired.Load())
}

// TestFollowerRevokesNoLeases checks that a follower does not revoke leases that have expired.
func TestFollowerRevokesNoLeases(t *testing.T) {
	w := newWorld(t)
	w.raft.SetLeader(2, 3)
	w.run(t)
	w.grant(t, 7, 60)
	w.advanceClock(time.Hour)
	require.Zero(t, w.lessor.count())
	require.Error(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		_, err := w.LeaseKeepAlive(ctx, &pb.LeaseKeepAliveRequest{ID: 7})
		return err
	}())
	all, err := w.LeaseLeases(t.Context(), &pb.LeaseLeasesRequest{})
	require.NoError(t, err)
	require.Len(t, all.Leases, 1)
}

// TestDeposedLeaderRevokesNoLeases checks that the engine refuses revocations of a leader that was paused while another
// member became the leader. The old leader's proposals are forwarded to the new leader, so only the engine can refuse
// them (etcd#15247).
func TestDeposedLeaderRevokesNoLeases(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.waitForLessor(t, 2)
	w.grant(t, 7, 60)
	// Another member writes the lessor record while the old leader's revocation is in flight.
	asked := make(chan struct{})
	w.raft.BeforeNextPropose(func() {
		p, err := w.localPolicy()
		require.NoError(t, err)
		other := lessorRecord{term: 3, member: 2}
		data, err := command.EncodeProgram(command.Program{Epoch: p.epoch, Steps: []command.Step{
			{Kind: command.StepSetRecord, Key: []byte(recordLessor), Value: other.encode()},
		}})
		require.NoError(t, err)
		r, err := w.raft.Apply(data)
		require.NoError(t, err)
		require.Equal(t, command.RefusedNot, r.Refused)
		close(asked)
	})
	w.advanceClock(61 * time.Second)
	<-asked
	exists := func() bool {
		snap := w.engine.Snapshot()
		defer snap.Close()
		_, ok, err := snap.Lease(7)
		require.NoError(t, err)
		return ok
	}
	// The old leader stops expiring leases.
	require.Eventually(t, func() bool {
		w.lessor.mu.Lock()
		defer w.lessor.mu.Unlock()
		return w.lessor.term == 0 || !exists()
	}, 10*time.Second, time.Millisecond)
	require.True(t, exists(), "the old leader ended the lease")
	require.Zero(t, w.counters.expired.Load())
}

func TestNewLeaderRestartsTTLs(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.waitForLessor(t, 2)
	w.grant(t, 7, 60)
	w.advanceClock(50 * time.Second)
	w.raft.SetLeader(2, 3)
	require.Eventually(t, func() bool { return w.lessor.count() == 0 }, 10*time.Second, time.Millisecond)
	w.advanceClock(50 * time.Second)
	w.raft.SetLeader(1, 4)
	w.waitForLessor(t, 4)
	left, err := w.LeaseTimeToLive(t.Context(), &pb.LeaseTimeToLiveRequest{ID: 7})
	require.NoError(t, err)
	require.Greater(t, left.TTL, int64(55))
}

// TestRenewalWaitsForRevocation checks that a renewal of an expired lease returns after the lease was revoked, and
// reports that the lease does not exist.
func TestRenewalWaitsForRevocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := leaseExpiry{wake: make(chan struct{}, 1)}
		now := time.Duration(0)
		require.NoError(t, e.start(2, func() ([]command.Lease, error) { return []command.Lease{{ID: 7, TTL: 60}}, nil },
			func() time.Duration { return now }))
		now = 61 * time.Second
		type result struct {
			leaseResponse
			err error
		}
		renewed := make(chan result, 1)
		go func() {
			r, err := e.renew(t.Context(), 7, 2, now)
			renewed <- result{r, err}
		}()
		synctest.Wait()
		require.Empty(t, renewed, "the lease is not revoked yet")
		e.observe(mvcc.LeaseChanges{Revoked: []int64{7}}, now)
		require.Equal(t, result{}, <-renewed)
	})
}

// TestRenewalDuringRevocation checks that LeaseKeepAlive returns TTL 0 for a lease whose revocation is in flight.
func TestRenewalDuringRevocation(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.waitForLessor(t, 2)
	w.grant(t, 7, 60)
	release := make(chan struct{})
	proposed := make(chan struct{})
	w.raft.BeforeNextPropose(func() {
		close(proposed)
		<-release
	})
	w.advanceClock(61 * time.Second)
	<-proposed
	ttl := make(chan int64)
	go func() {
		r, err := w.LeaseKeepAlive(t.Context(), &pb.LeaseKeepAliveRequest{ID: 7})
		if err != nil {
			ttl <- -1
			return
		}
		ttl <- r.TTL
	}()
	close(release)
	require.Zero(t, <-ttl)
}

// TestKeepAliveIsForwardedToLeader checks that a follower sends a renewal to the leader, and sends it again after
// ErrNotLeader.
func TestKeepAliveIsForwardedToLeader(t *testing.T) {
	peers := &followerPeers{}
	follower := newWorld(t, func(o *Options) { o.Transport = peers })
	leaderWorld := newWorld(t, func(o *Options) { o.Transport = &peers.leader })
	follower.raft.SetLeader(9, 2)
	leaderWorld.run(t)
	leaderWorld.waitForLessor(t, 2)
	leaderWorld.grant(t, 7, 60)
	peers.refusals = 2
	r, err := follower.LeaseKeepAlive(t.Context(), &pb.LeaseKeepAliveRequest{ID: 7})
	require.NoError(t, err)
	require.EqualValues(t, 60, r.TTL)
	require.Zero(t, peers.refusals, "the request is repeated after ErrNotLeader")
}

// followerPeers is a Transport that passes requests to the handler of leader. As many requests as refusals says fail
// with ErrNotLeader first.
type followerPeers struct {
	leader   leaderPeers
	refusals int
}

type leaderPeers struct {
	f func(ctx context.Context, from uint64, body []byte) ([]byte, error)
}

func (w *followerPeers) Direct(ctx context.Context, _ uint64, _ string, body []byte) ([]byte, error) {
	if w.refusals > 0 {
		w.refusals--
		return nil, leader.ErrNotLeader
	}
	return w.leader.f(ctx, 1, body)
}

func (w *followerPeers) HandleDirect(string, func(context.Context, uint64, []byte) ([]byte, error)) {}

func (e *leaderPeers) Direct(context.Context, uint64, string, []byte) ([]byte, error) {
	return nil, leader.ErrNotSent
}

func (e *leaderPeers) HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error)) {
	if name == leaseCommand {
		e.f = f
	}
}
