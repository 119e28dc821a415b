package kv

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// scrub removes compacted data from the engine, as the member's background task does.
func (w *world) scrub(t *testing.T) {
	t.Helper()
	for done := false; !done; {
		var err error
		done, err = w.engine.Scrub(t.Context(), 1000)
		require.NoError(t, err)
	}
}

func (w *world) alarms(t *testing.T) []*pb.AlarmMember {
	t.Helper()
	r, err := w.Alarm(t.Context(), &pb.AlarmRequest{Action: pb.AlarmRequest_GET})
	require.NoError(t, err)
	return r.Alarms
}

// TestNoSpaceAlarm writes until the quota raises the alarm NOSPACE, and checks which requests are refused then. Writes
// must succeed again after compaction, defragmentation and disarming.
func TestNoSpaceAlarm(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, func(o *Options) { o.Quota = 256 << 10 })
	value := string(make([]byte, 16<<10))
	var err error
	for range 20 {
		if _, err = w.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte(value)}); err != nil {
			break
		}
	}
	require.Equal(t, rpctypes.ErrGRPCNoSpace, err)
	alarms := w.alarms(t)
	require.Len(t, alarms, 1)
	require.Equal(t, pb.AlarmType_NOSPACE, alarms[0].Alarm)
	require.EqualValues(t, 1, alarms[0].MemberID)

	// Requests that add data are refused, however small.
	_, err = w.Put(ctx, &pb.PutRequest{Key: []byte("b")})
	require.Equal(t, rpctypes.ErrGRPCNoSpace, err)
	_, err = w.LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: 60})
	require.Equal(t, rpctypes.ErrGRPCNoSpace, err)
	_, err = w.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.PutRequest{Key: []byte("b")})}})
	require.Equal(t, rpctypes.ErrGRPCNoSpace, err)
	// Deletes and reads are served.
	_, err = w.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.DeleteRangeRequest{Key: []byte("b")})}})
	require.NoError(t, err)
	_, err = w.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
	require.NoError(t, err)
	status, err := w.Status(ctx, &pb.StatusRequest{})
	require.NoError(t, err)
	require.Len(t, status.Errors, 1)
	require.EqualValues(t, 256<<10, status.DbSizeQuota)
	require.ErrorContains(t, w.Check(ctx, true, func(pb.AlarmType) bool { return false }), "ALARM NOSPACE")
	require.NoError(t, w.Check(ctx, false, func(a pb.AlarmType) bool { return a == pb.AlarmType_NOSPACE }))

	// After disarming without freeing space, writes are still refused.
	disarm := &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 1, Alarm: pb.AlarmType_NOSPACE}
	_, err = w.Alarm(ctx, disarm)
	require.NoError(t, err)
	_, err = w.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte(value)})
	require.Equal(t, rpctypes.ErrGRPCNoSpace, err)

	_, err = w.Compact(ctx, &pb.CompactionRequest{Revision: w.engine.Revision()})
	require.NoError(t, err)
	w.scrub(t)
	_, err = w.Defragment(ctx, &pb.DefragmentRequest{})
	require.NoError(t, err)
	off, err := w.Alarm(ctx, disarm)
	require.NoError(t, err)
	require.Len(t, off.Alarms, 1)
	require.Empty(t, w.alarms(t))
	_, err = w.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte(value)})
	require.NoError(t, err)
}

func TestNoQuota(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.Quota = -1 })
	w.put(t, "a", "1")
	status, err := w.Status(t.Context(), &pb.StatusRequest{})
	require.NoError(t, err)
	require.Zero(t, status.DbSizeQuota)
}

func TestCorruptAlarmRefusesWrites(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	w.put(t, "a", "1")
	on, err := w.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 5, Alarm: pb.AlarmType_CORRUPT})
	require.NoError(t, err)
	require.Len(t, on.Alarms, 1)
	_, err = w.Put(ctx, &pb.PutRequest{Key: []byte("a")})
	require.Equal(t, rpctypes.ErrGRPCCorrupt, err)
	_, err = w.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("a")})
	require.Equal(t, rpctypes.ErrGRPCCorrupt, err)
	_, err = w.LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: 10})
	require.Equal(t, rpctypes.ErrGRPCCorrupt, err)
	_, err = w.Compact(ctx, &pb.CompactionRequest{Revision: 2})
	require.Equal(t, rpctypes.ErrGRPCCorrupt, err)
	_, err = w.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
	require.NoError(t, err)
}

func TestAlarmsByMember(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	for _, member := range []uint64{3, 1} {
		_, err := w.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: member, Alarm: pb.AlarmType_NOSPACE})
		require.NoError(t, err)
	}
	require.Len(t, w.alarms(t), 2)
	corrupt, err := w.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_GET, Alarm: pb.AlarmType_CORRUPT})
	require.NoError(t, err)
	require.Empty(t, corrupt.Alarms)
	_, err = w.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 3, Alarm: pb.AlarmType_NOSPACE})
	require.NoError(t, err)
	_, err = w.Put(ctx, &pb.PutRequest{Key: []byte("a")})
	require.Equal(t, rpctypes.ErrGRPCNoSpace, err, "the alarm of member 1 is still active")
	none, err := w.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 3, Alarm: pb.AlarmType_NOSPACE})
	require.NoError(t, err)
	require.Empty(t, none.Alarms)
}

func TestPhysicalCompactionWaitsForScrub(t *testing.T) {
	w := newWorld(t)
	for i := range 10 {
		w.put(t, "a", fmt.Sprint(i))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := w.Compact(ctx, &pb.CompactionRequest{Revision: 5, Physical: true})
	require.Error(t, err, "no scrub runs")
	done := make(chan error, 1)
	go func() {
		_, err := w.Compact(t.Context(), &pb.CompactionRequest{Revision: 6, Physical: true})
		done <- err
	}()
	require.Eventually(t, func() bool { return w.engine.CompactRevision() == 6 }, 10*time.Second, time.Millisecond)
	w.scrub(t)
	require.NoError(t, <-done)
}

func TestHashKV(t *testing.T) {
	ctx := t.Context()
	one, two := newWorld(t), newWorld(t)
	for _, w := range []*world{one, two} {
		w.put(t, "a", "1")
		w.put(t, "b", "2")
	}
	two.put(t, "c", "3")
	a, err := one.HashKV(ctx, &pb.HashKVRequest{})
	require.NoError(t, err)
	b, err := two.HashKV(ctx, &pb.HashKVRequest{Revision: 3})
	require.NoError(t, err)
	require.Equal(t, a.Hash, b.Hash)
	require.EqualValues(t, 3, b.HashRevision)
	require.EqualValues(t, 4, b.Header.Revision)
	require.EqualValues(t, -1, b.CompactRevision)
	_, err = one.HashKV(ctx, &pb.HashKVRequest{Revision: 9})
	require.Equal(t, rpctypes.ErrGRPCFutureRev, err)
}

func TestMoveLeader(t *testing.T) {
	ctx := t.Context()
	var transferErr error
	w := newWorld(t, func(o *Options) { o.Transfer = func(context.Context, uint64) error { return transferErr } })
	move := func() error {
		_, err := w.MoveLeader(ctx, &pb.MoveLeaderRequest{TargetID: 2})
		return err
	}
	require.NoError(t, move())
	transferErr = fault.New(fault.FailedPrecondition, "no").WithReason("MEMBER_NOT_FOUND")
	require.Equal(t, rpctypes.ErrGRPCBadLeaderTransferee, move())
	transferErr = fault.New(fault.FailedPrecondition, "no").WithReason("TRANSFER_FAILED")
	require.Equal(t, rpctypes.ErrGRPCTimeout, move())
	w.raft.SetLeader(2, 3)
	require.Equal(t, rpctypes.ErrGRPCNotLeader, move())
}

func TestSnapshot(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	w.grant(t, 7, 60)
	w.put(t, "a", "1")
	require.NoError(t, w.putWithLease(t, "b", 7))
	_, err := w.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "u", Password: "p"})
	require.NoError(t, err)
	file, err := w.Snapshot(ctx, t.TempDir())
	require.NoError(t, err)
	defer file.Close()
	w.put(t, "c", "after the snapshot")
	var b bytes.Buffer
	require.NoError(t, file.Stream(ctx, &b))
	path := filepath.Join(t.TempDir(), "db")
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o600))
	f, err := snapfile.Open(path)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// TestSnapshotKeyOfEndedLease revokes a lease after the engine's snapshot was taken. The snapshot file must then have
// that lease with a TTL of 1 s, and its key must refer to it.
func TestSnapshotKeyOfEndedLease(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	w.grant(t, 7, 60)
	require.NoError(t, w.putWithLease(t, "a", 7))
	snap := w.engine.Snapshot()
	defer snap.Close()
	_, err := w.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: 7})
	require.NoError(t, err)
	c, err := snapshotContents(snap)
	require.NoError(t, err)
	require.Empty(t, c.Leases)
	var b bytes.Buffer
	require.NoError(t, snapfile.Stream(ctx, &b, t.TempDir(), c))
	path := filepath.Join(t.TempDir(), "db")
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o600))
	f, err := snapfile.Open(path)
	require.NoError(t, err)
	defer f.Close()
	require.Len(t, f.Leases, 1)
	require.EqualValues(t, 7, f.Leases[0].ID)
	require.EqualValues(t, 1, f.Leases[0].TTL)
	for kv, err := range f.Keys() {
		require.NoError(t, err)
		require.EqualValues(t, 7, kv.Lease)
	}
	require.EqualValues(t, 1, f.Counts.Keys)
}

func TestMetricsHaveEtcdNames(t *testing.T) {
	w := newWorld(t)
	w.put(t, "a", "1")
	registry := prometheus.NewRegistry()
	require.NoError(t, registry.Register(NewCollector(w.Service)))
	families, err := registry.Gather()
	require.NoError(t, err)
	values := map[string]float64{}
	for _, f := range families {
		values[f.GetName()] = f.Metric[0].GetGauge().GetValue() + f.Metric[0].GetCounter().GetValue()
	}
	for name, want := range map[string]float64{
		"etcd_server_has_leader": 1, "etcd_server_is_leader": 1, "etcd_server_proposals_pending": 0, "etcd_debugging_mvcc_keys_total": 1,
		"etcd_debugging_mvcc_current_revision": 2, "etcd_server_quota_backend_bytes": DefaultQuota, "trivet_kv_alarms": 0,
	} {
		value, ok := values[name]
		require.True(t, ok, name)
		require.Equal(t, want, value, name)
	}
	require.Positive(t, values["etcd_mvcc_db_total_size_in_bytes"])
}

func TestAgeCompactor(t *testing.T) {
	w := newWorld(t)
	c := ageCompactor{age: time.Hour}
	w.put(t, "a", "1")
	require.Zero(t, c.due(0, w.engine.Revision()))
	w.put(t, "a", "2")
	require.Zero(t, c.due(30*time.Minute, w.engine.Revision()))
	require.EqualValues(t, 2, c.due(time.Hour, w.engine.Revision()))
	require.Zero(t, c.due(time.Hour+time.Minute, w.engine.Revision()))
	require.EqualValues(t, 3, c.due(91*time.Minute, w.engine.Revision()))
}
