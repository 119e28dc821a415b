package kv

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// cluster holds three members in one process that use package consensus, without a network.
type cluster struct {
	corrupting atomic.Uint64 // ID of the member that applies the value "wrong" where "sound" was committed
	members    map[uint64]*member
	ready      chan struct{}
}

type member struct {
	*Service
	cluster *cluster
	id      uint64
	runner  *consensus.Runner
	calls   map[string]func(ctx context.Context, from uint64, body []byte) ([]byte, error)
}

// Send implements consensus.Transport.
func (s *member) Send(e message.Envelope) {
	select {
	case <-s.cluster.ready:
	default:
		return // not all members exist yet
	}
	b, err := e.AppendTo(nil)
	if err != nil {
		panic(err)
	}
	copied, err := message.Parse(b)
	if err != nil {
		panic(err)
	}
	s.cluster.members[e.To].runner.Deliver(copied)
}

// SendSnapshot implements consensus.Transport. It reports a failure, since no member needs a snapshot here.
func (s *member) SendSnapshot(e message.Envelope, _ string) {
	go s.runner.ReportSnapshot(e.Group, e.To, false)
}

// Direct implements Transport.
func (s *member) Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error) {
	other := s.cluster.members[member]
	if other == nil {
		return nil, leader.ErrNotSent
	}
	return other.calls[command](ctx, s.id, body)
}

// HandleDirect implements Transport.
func (s *member) HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error)) {
	s.calls[name] = f
}

// corruptingMachine wraps a state machine. On the member with the ID cluster.corrupting it changes commands before it
// applies them.
type corruptingMachine struct {
	consensus.StateMachine
	cluster *cluster
	id      uint64
}

// Apply implements consensus.StateMachine.
func (g corruptingMachine) Apply(entries []consensus.Entry) ([]any, error) {
	if g.cluster.corrupting.Load() == g.id {
		entries = slices.Clone(entries)
		for i := range entries {
			entries[i].Data = bytes.ReplaceAll(entries[i].Data, []byte("sound"), []byte("wrong"))
		}
	}
	return g.StateMachine.Apply(entries)
}

func newCluster(t *testing.T, change ...func(*Options)) *cluster {
	w := &cluster{members: map[uint64]*member{}, ready: make(chan struct{})}
	const group = 2
	for id := uint64(1); id <= 3; id++ {
		fs := vfs.NewMem()
		feed := &LeaseFeed{}
		engine, err := mvcc.Open(fs, "kv", mvcc.Options{OnLeases: feed.Changed, HashOnCompact: true})
		require.NoError(t, err)
		s := &member{cluster: w, id: id, calls: map[string]func(context.Context, uint64, []byte) ([]byte, error){}}
		host, err := consensus.Open(consensus.Options{
			ID: id, Members: []uint64{1, 2, 3}, Dir: "raft", FS: fs, Transport: s, Log: slog.New(slog.DiscardHandler),
		})
		require.NoError(t, err)
		machine := store.NewStateMachine(engine, store.StateMachineOptions{NoIDs: true})
		_, err = host.AddGroup(consensus.GroupOptions{ID: group, Name: "kv", Machine: corruptingMachine{machine, w, id}, Forward: true})
		require.NoError(t, err)
		s.runner = consensus.Start(host, consensus.RunnerOptions{TickInterval: 10 * time.Millisecond})
		changes := store.NewGroup(s.runner, group)
		o := Options{
			Engine: engine, Consensus: NewRaft(s.runner, group, id, changes), Leases: feed, Transport: s,
			Transfer: func(ctx context.Context, to uint64) error { return s.runner.TransferLeader(ctx, group, to) },
			Tokens:   users.NewTokens(make([]byte, 32), time.Hour), Self: id, Cluster: 77, Election: 100 * time.Millisecond,
			BcryptCost: users.MinCost, Log: slog.New(slog.DiscardHandler),
		}
		for _, f := range change {
			f(&o)
		}
		s.Service = New(o)
		w.members[id] = s
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); s.Run(ctx) }()
		t.Cleanup(func() {
			cancel()
			<-done
			stopped, cancel := context.WithCancel(context.Background())
			cancel()
			require.NoError(t, s.runner.Stop(stopped))
			changes.Close()
			machine.Close()
			require.NoError(t, engine.Close())
		})
	}
	close(w.ready)
	return w
}

// leader waits until a leader is known, and returns it and the other members.
func (w *cluster) leader(t *testing.T) (leaderMember *member, others []*member) {
	t.Helper()
	require.Eventually(t, func() bool {
		id := w.members[1].Leader()
		leaderMember = w.members[id]
		return leaderMember != nil && leaderMember.Leader() == id
	}, 20*time.Second, time.Millisecond)
	for _, s := range w.members {
		if s != leaderMember {
			others = append(others, s)
		}
	}
	return leaderMember, others
}

// TestWritesAreReadableOnAllMembers writes through each member in turn and checks that every write is readable on all
// members at once.
func TestWritesAreReadableOnAllMembers(t *testing.T) {
	ctx := t.Context()
	w := newCluster(t)
	w.leader(t)
	for i := range 30 {
		writer := w.members[uint64(i%3+1)]
		value := fmt.Append(nil, i)
		put, err := writer.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: value, PrevKv: true})
		require.NoError(t, err)
		require.EqualValues(t, i+2, put.Header.Revision, "records do not increment the revision")
		for _, reader := range w.members {
			got, err := reader.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
			require.NoError(t, err)
			require.Equal(t, value, got.Kvs[0].Value)
		}
	}
}

// TestLeasesSurviveLeaderChange checks that each member can grant, renew and read leases, and that a lease keeps its
// TTL and keys when the leader changes.
func TestLeasesSurviveLeaderChange(t *testing.T) {
	ctx := t.Context()
	w := newCluster(t)
	leaderMember, others := w.leader(t)
	_, err := others[0].LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: 7, TTL: 600})
	require.NoError(t, err)
	_, err = others[1].Put(ctx, &pb.PutRequest{Key: []byte("a"), Lease: 7})
	require.NoError(t, err)
	renewEverywhere := func() {
		for _, s := range w.members {
			r, err := s.LeaseKeepAlive(ctx, &pb.LeaseKeepAliveRequest{ID: 7})
			require.NoError(t, err)
			require.EqualValues(t, 600, r.TTL)
		}
	}
	renewEverywhere()
	_, err = leaderMember.MoveLeader(ctx, &pb.MoveLeaderRequest{TargetID: others[0].id})
	require.NoError(t, err)
	renewEverywhere()
	left, err := others[1].LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: 7, Keys: true})
	require.NoError(t, err)
	require.Greater(t, left.TTL, int64(590))
	require.Equal(t, [][]byte{[]byte("a")}, left.Keys)
	_, err = leaderMember.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: 7})
	require.NoError(t, err)
	got, err := others[1].Range(ctx, &pb.RangeRequest{Key: []byte("a")})
	require.NoError(t, err)
	require.Empty(t, got.Kvs)
}

// TestAuthAppliesOnAllMembersAtOnce enables Auth through three members, and checks that each member requires a user for
// the next request.
func TestAuthAppliesOnAllMembersAtOnce(t *testing.T) {
	ctx := t.Context()
	w := newCluster(t)
	leaderMember, others := w.leader(t)
	for _, f := range []func() error{
		func() error {
			_, err := leaderMember.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "root", Password: "p"})
			return err
		},
		func() error {
			_, err := others[0].UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
			return err
		},
		func() error { _, err := others[1].AuthEnable(ctx, &pb.AuthEnableRequest{}); return err },
	} {
		require.NoError(t, f())
	}
	for _, s := range w.members {
		_, err := s.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
		require.Error(t, err, "a linearizable read without a user")
		_, err = s.Put(ctx, &pb.PutRequest{Key: []byte("a")})
		require.Error(t, err, "a write without a user")
		_, err = s.Put(As(ctx, users.Root), &pb.PutRequest{Key: []byte("a")})
		require.NoError(t, err)
	}
}
