package kv

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

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

func (w *world) putLeased(t *testing.T, key string, lease int64) error {
	t.Helper()
	_, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte(key), Lease: lease})
	return err
}

// reigned waits until the service looks after leases.
func (w *world) reigned(t *testing.T, term uint64) {
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
	w.reigned(t, 2)
	made := w.grant(t, 7, 100)
	require.EqualValues(t, 7, made.ID)
	require.EqualValues(t, 100, made.TTL)
	_, err := w.LeaseGrant(t.Context(), &pb.LeaseGrantRequest{ID: 7, TTL: 100})
	require.Equal(t, rpctypes.ErrGRPCLeaseExist, err)
	_, err = w.LeaseGrant(t.Context(), &pb.LeaseGrantRequest{TTL: lessor.MaxTTL + 1})
	require.Equal(t, rpctypes.ErrGRPCLeaseTTLTooLarge, err)
	short := w.grant(t, 0, 0)
	require.EqualValues(t, 2, short.TTL, "one and a half election time-outs, in whole seconds")
	require.Positive(t, short.ID)
	require.Less(t, short.ID, int64(1)<<53)

	require.NoError(t, w.putLeased(t, "a", 7))
	require.NoError(t, w.putLeased(t, "b", 7))
	require.Equal(t, rpctypes.ErrGRPCLeaseNotFound, w.putLeased(t, "c", 8))

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
	gone, err := w.LeaseKeepAlive(t.Context(), &pb.LeaseKeepAliveRequest{ID: 8})
	require.NoError(t, err)
	require.Zero(t, gone.TTL)

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

// hurry makes the service's clock run ahead.
func (w *world) hurry(by time.Duration) {
	w.lessor.mu.Lock()
	defer w.lessor.mu.Unlock()
	w.ahead.Add(int64(by))
	select {
	case w.lessor.wake <- struct{}{}:
	default:
	}
}

func TestTheLeaderEndsLeases(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.reigned(t, 2)
	w.grant(t, 7, 60)
	w.grant(t, 8, 120)
	require.NoError(t, w.putLeased(t, "a", 7))
	require.NoError(t, w.putLeased(t, "b", 8))
	w.hurry(61 * time.Second)
	require.Eventually(t, func() bool {
		r, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
		return err == nil && len(r.Kvs) == 0
	}, 10*time.Second, time.Millisecond)
	b, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("b")})
	require.NoError(t, err)
	require.Len(t, b.Kvs, 1)
	require.EqualValues(t, 1, w.counters.expired.Load())
}

// Whoever does not lead ends nothing, however late it is.
func TestAFollowerEndsNoLeases(t *testing.T) {
	w := newWorld(t)
	w.raft.lead(2, 3)
	w.run(t)
	w.grant(t, 7, 60)
	w.hurry(time.Hour)
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

// A leader that was stuck while another one took over comes back with leases that it believes expired: what it proposes
// then is forwarded, and must be refused (etcd#15247).
func TestAnOldLeaderEndsNothing(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.reigned(t, 2)
	w.grant(t, 7, 60)
	// While the old leader's wish to end the lease is under way, another member takes over.
	asked := make(chan struct{})
	w.raft.set(func() {
		w.raft.before = func([]byte) {
			w.raft.set(func() { w.raft.before = nil })
			p, err := w.newest()
			require.NoError(t, err)
			other := lessorRecord{term: 3, member: 2}
			data, err := command.EncodeProgram(command.Program{Epoch: p.epoch, Steps: []command.Step{
				{Kind: command.StepSetRecord, Key: []byte(recordLessor), Value: other.encode()},
			}})
			require.NoError(t, err)
			r, err := w.raft.apply(data)
			require.NoError(t, err)
			require.Equal(t, command.RefusedNot, r.Refused)
			close(asked)
		}
	})
	w.hurry(61 * time.Second)
	<-asked
	exists := func() bool {
		snap := w.engine.Snapshot()
		defer snap.Close()
		_, ok, err := snap.Lease(7)
		require.NoError(t, err)
		return ok
	}
	// It finds out that it is not the one any more, and does not try again.
	require.Eventually(t, func() bool {
		w.lessor.mu.Lock()
		defer w.lessor.mu.Unlock()
		return w.lessor.term == 0 || !exists()
	}, 10*time.Second, time.Millisecond)
	require.True(t, exists(), "the old leader ended the lease")
	require.Zero(t, w.counters.expired.Load())
}

func TestANewLeaderGivesLeasesTheirWholeTime(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.reigned(t, 2)
	w.grant(t, 7, 60)
	w.hurry(50 * time.Second)
	w.raft.lead(2, 3)
	require.Eventually(t, func() bool { return w.lessor.count() == 0 }, 10*time.Second, time.Millisecond)
	w.hurry(50 * time.Second)
	w.raft.lead(1, 4)
	w.reigned(t, 4)
	left, err := w.LeaseTimeToLive(t.Context(), &pb.LeaseTimeToLiveRequest{ID: 7})
	require.NoError(t, err)
	require.Greater(t, left.TTL, int64(55))
}

// A renewal that comes when the lease is about to be ended waits for that, and is told so.
func TestARenewalTooLate(t *testing.T) {
	w := newWorld(t)
	w.run(t)
	w.reigned(t, 2)
	w.grant(t, 7, 60)
	release := make(chan struct{})
	asked := make(chan struct{})
	w.raft.set(func() {
		w.raft.before = func([]byte) {
			w.raft.set(func() { w.raft.before = nil })
			close(asked)
			<-release
		}
	})
	w.hurry(61 * time.Second)
	<-asked
	told := make(chan int64)
	go func() {
		r, err := w.LeaseKeepAlive(t.Context(), &pb.LeaseKeepAliveRequest{ID: 7})
		if err != nil {
			told <- -1
			return
		}
		told <- r.TTL
	}()
	select {
	case ttl := <-told:
		t.Fatalf("answered %d before the lease has ended", ttl)
	case <-time.After(10 * time.Millisecond): // not enough to be sure, but enough to notice
	}
	close(release)
	require.Zero(t, <-told)
}

// Members ask the leader.
func TestKeepAlivesTravelToTheLeader(t *testing.T) {
	peers := &way{}
	follower := newWorld(t, func(o *Options) { o.Peers = peers })
	leading := newWorld(t, func(o *Options) { o.Peers = &peers.other })
	follower.raft.lead(9, 2)
	leading.run(t)
	leading.reigned(t, 2)
	leading.grant(t, 7, 60)
	peers.refusals = 2
	r, err := follower.LeaseKeepAlive(t.Context(), &pb.LeaseKeepAliveRequest{ID: 7})
	require.NoError(t, err)
	require.EqualValues(t, 60, r.TTL)
	require.Zero(t, peers.refusals, "it asks again when nothing can have happened")
}

// way is the way from one member to another.
type way struct {
	other    end
	refusals int
}

type end struct {
	f func(ctx context.Context, from uint64, body []byte) ([]byte, error)
}

func (w *way) Direct(ctx context.Context, _ uint64, _ string, body []byte) ([]byte, error) {
	if w.refusals > 0 {
		w.refusals--
		return nil, leader.ErrNotLeader
	}
	return w.other.f(ctx, 1, body)
}

func (w *way) HandleDirect(string, func(context.Context, uint64, []byte) ([]byte, error)) {}

func (e *end) Direct(context.Context, uint64, string, []byte) ([]byte, error) {
	return nil, leader.ErrNotSent
}

func (e *end) HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error)) {
	if name == leaseCommand {
		e.f = f
	}
}
