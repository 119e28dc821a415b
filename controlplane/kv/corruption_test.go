package kv

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

func TestFindDiffering(t *testing.T) {
	a, b, c := hashResponse{Hash: 1, CompactRevision: 5}, hashResponse{Hash: 2, CompactRevision: 5}, hashResponse{Hash: 3, CompactRevision: 5}
	elsewhere, unknown, behind := hashResponse{Hash: 2, CompactRevision: 6}, hashResponse{Unknown: true}, hashResponse{Behind: true}
	for name, c := range map[string]struct {
		responses map[uint64]hashResponse
		members   int
		differ    []uint64
		all       bool
	}{
		"all agree":                        {map[uint64]hashResponse{1: a, 2: a, 3: a}, 3, nil, true},
		"one without response":             {map[uint64]hashResponse{1: a, 2: a}, 3, nil, false},
		"one differs":                      {map[uint64]hashResponse{1: a, 2: a, 3: b}, 3, []uint64{3}, true},
		"the leader differs":               {map[uint64]hashResponse{1: b, 2: a, 3: a}, 3, []uint64{1}, true},
		"two of five differ":               {map[uint64]hashResponse{1: a, 2: b, 3: a, 4: c, 5: a}, 5, []uint64{2, 4}, true},
		"no majority":                      {map[uint64]hashResponse{1: a, 2: b, 3: c}, 3, []uint64{0}, true},
		"no majority of all":               {map[uint64]hashResponse{1: a, 2: b}, 3, []uint64{0}, false},
		"a majority, one without response": {map[uint64]hashResponse{1: a, 2: a, 4: b}, 4, []uint64{0}, false},
		"two members":                      {map[uint64]hashResponse{1: a, 2: b}, 2, []uint64{0}, true},
		"compacted at another revision":    {map[uint64]hashResponse{1: a, 2: elsewhere, 3: a}, 3, nil, false},
		"not remembered":                   {map[uint64]hashResponse{1: a, 2: unknown, 3: unknown}, 3, nil, false},
		"one is behind":                    {map[uint64]hashResponse{1: a, 2: a, 3: behind}, 3, []uint64{3}, true},
		"the leader is ahead":              {map[uint64]hashResponse{1: a, 2: behind, 3: behind}, 3, []uint64{1}, true},
		"one member":                       {map[uint64]hashResponse{1: a}, 1, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			differ, all := findDiffering(1, c.responses, c.members)
			require.Equal(t, c.differ, differ)
			require.Equal(t, c.all, all)
		})
	}
}

func (s *member) putSound(t *testing.T) {
	t.Helper()
	_, err := s.Put(t.Context(), &pb.PutRequest{Key: []byte("a"), Value: []byte("sound")})
	require.NoError(t, err)
}

func (s *member) corruptAlarms(t *testing.T) (members []uint64) {
	t.Helper()
	r, err := s.Alarm(t.Context(), &pb.AlarmRequest{Action: pb.AlarmRequest_GET, Alarm: pb.AlarmType_CORRUPT})
	require.NoError(t, err)
	for _, a := range r.Alarms {
		members = append(members, a.MemberID)
	}
	return members
}

func (s *member) disarm(t *testing.T, member uint64) {
	t.Helper()
	_, err := s.Alarm(t.Context(), &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: member, Alarm: pb.AlarmType_CORRUPT})
	require.NoError(t, err)
}

func noComparison(o *Options) { o.CorruptCheck = -1 }

// TestCompareKeyspaceRaisesCorrupt checks that a member whose data differs from the majority's gets the alarm, whether
// it is a follower or the leader. All members refuse writes until the alarm is disarmed. The next comparison raises it
// again while the data still differs.
func TestCompareKeyspaceRaisesCorrupt(t *testing.T) {
	for name, pick := range map[string]func(leaderMember *member, others []*member) *member{
		"a follower": func(_ *member, others []*member) *member { return others[1] },
		"the leader": func(leaderMember *member, _ []*member) *member { return leaderMember },
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			w := newCluster(t, noComparison)
			leaderMember, others := w.leader(t)
			leaderMember.putSound(t)
			_, err := leaderMember.compareKeyspace(ctx)
			require.NoError(t, err)
			require.Empty(t, leaderMember.corruptAlarms(t))

			corrupted := pick(leaderMember, others)
			w.corrupting.Store(corrupted.id)
			leaderMember.putSound(t)
			_, err = leaderMember.compareKeyspace(ctx)
			require.NoError(t, err)
			require.Equal(t, []uint64{corrupted.id}, leaderMember.corruptAlarms(t))
			for _, s := range w.members {
				_, err := s.Put(ctx, &pb.PutRequest{Key: []byte("a")})
				require.Equal(t, rpctypes.ErrGRPCCorrupt, err)
			}
			leaderMember.disarm(t, corrupted.id)
			require.Empty(t, leaderMember.corruptAlarms(t))
			leaderMember.putSound(t)
			_, err = leaderMember.compareKeyspace(ctx)
			require.NoError(t, err)
			require.Equal(t, []uint64{corrupted.id}, leaderMember.corruptAlarms(t))
		})
	}
}

// TestCompareCompactionHashesFindsOldDifference checks that the hashes stored at a compaction reveal a difference in
// revisions before it, although the current data of all members is equal.
func TestCompareCompactionHashesFindsOldDifference(t *testing.T) {
	ctx := t.Context()
	w := newCluster(t, noComparison)
	leaderMember, others := w.leader(t)
	compact := func(revision int64) {
		t.Helper()
		_, err := leaderMember.Compact(ctx, &pb.CompactionRequest{Revision: revision})
		require.NoError(t, err)
		for _, s := range w.members {
			require.Eventually(t, func() bool { _, ok := s.opts.Engine.CompactionHash(revision); return ok }, 20*time.Second, time.Millisecond)
		}
	}
	leaderMember.putSound(t) // revision 2
	compact(2)
	checked, err := leaderMember.compareCompactionHashes(ctx, 0)
	require.NoError(t, err)
	require.EqualValues(t, 2, checked)
	require.Empty(t, leaderMember.corruptAlarms(t))

	w.corrupting.Store(others[0].id)
	leaderMember.putSound(t) // revision 3
	require.Eventually(t, func() bool { return others[0].opts.Engine.Revision() == 3 }, 20*time.Second, time.Millisecond)
	w.corrupting.Store(0)
	leaderMember.putSound(t) // revision 4
	leaderMember.putSound(t) // revision 5
	compact(4)
	checked, err = leaderMember.compareCompactionHashes(ctx, checked)
	require.NoError(t, err)
	require.EqualValues(t, 4, checked)
	require.Equal(t, []uint64{others[0].id}, leaderMember.corruptAlarms(t))
	_, err = leaderMember.compareKeyspace(ctx)
	require.NoError(t, err)
	leaderMember.disarm(t, others[0].id)
	_, err = leaderMember.compareKeyspace(ctx)
	require.NoError(t, err)
	require.Empty(t, leaderMember.corruptAlarms(t), "the current data of all members is equal")
}

// TestLeaderComparesPeriodically checks that the leader compares the members' data by itself and finds a difference.
func TestLeaderComparesPeriodically(t *testing.T) {
	w := newCluster(t, func(o *Options) { o.CorruptCheck = 10 * time.Millisecond })
	leaderMember, others := w.leader(t)
	w.corrupting.Store(others[0].id)
	leaderMember.putSound(t)
	require.Eventually(t, func() bool { return len(leaderMember.Alarms()) > 0 }, 20*time.Second, time.Millisecond)
	require.Equal(t, []uint64{others[0].id}, leaderMember.corruptAlarms(t))
}

// TestUnreachableMemberRaisesNoAlarm checks that a member that does not return its hash gets no alarm.
func TestUnreachableMemberRaisesNoAlarm(t *testing.T) {
	ctx := t.Context()
	w := newCluster(t, noComparison)
	leaderMember, others := w.leader(t)
	leaderMember.putSound(t)
	others[0].calls[hashCommand] = func(context.Context, uint64, []byte) ([]byte, error) { return nil, errors.New("no") }
	_, err := leaderMember.compareKeyspace(ctx)
	require.NoError(t, err)
	require.Empty(t, leaderMember.corruptAlarms(t))
}

// TestDamagedFilesRaiseCorrupt checks that a member raises its own CORRUPT alarm when a read or a hash finds a wrong
// checksum, and that writes are refused while the alarm is active.
func TestDamagedFilesRaiseCorrupt(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	w.put(t, "a", strings.Repeat("sound", 40))
	_, err := w.engine.Flush(ctx)
	require.NoError(t, err)
	names, err := w.fs.List("kv/1")
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, ".sst") {
			flipByte(t, w.fs, "kv/1/"+name, 10)
		}
	}
	w.run(t)
	_, err = w.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
	require.ErrorIs(t, err, mvcc.ErrCorrupt)
	require.Eventually(t, func() bool { return len(w.Alarms()) > 0 }, 20*time.Second, time.Millisecond)
	alarms := w.alarms(t)
	require.Equal(t, pb.AlarmType_CORRUPT, alarms[0].Alarm)
	require.EqualValues(t, 1, alarms[0].MemberID)
	_, err = w.Put(ctx, &pb.PutRequest{Key: []byte("b")})
	require.Equal(t, rpctypes.ErrGRPCCorrupt, err)

	_, err = w.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 1, Alarm: pb.AlarmType_CORRUPT})
	require.NoError(t, err)
	require.Empty(t, w.alarms(t))
	_, err = w.HashKV(ctx, &pb.HashKVRequest{})
	require.ErrorIs(t, err, mvcc.ErrCorrupt)
	require.NotEmpty(t, w.alarms(t), "hashing raises the alarm before it returns")
}

// flipByte changes one byte of a file.
func flipByte(t *testing.T, fs vfs.FS, path string, at int64) {
	t.Helper()
	f, err := fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], at)
	require.NoError(t, err)
	b[0] ^= 0x55
	_, err = f.WriteAt(b[:], at)
	require.NoError(t, errors.Join(err, f.Close()))
}
