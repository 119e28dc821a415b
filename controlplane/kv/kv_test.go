package kv

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

func TestEmptyKeyspaceHasRevisionOne(t *testing.T) {
	w := newWorld(t)
	r, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
	require.NoError(t, err)
	require.EqualValues(t, 1, r.Header.Revision)
	require.EqualValues(t, 77, r.Header.ClusterId)
	require.EqualValues(t, 1, r.Header.MemberId)
	require.EqualValues(t, 2, r.Header.RaftTerm)
	require.Empty(t, r.Kvs)
	require.EqualValues(t, 2, w.put(t, "a", "1"))
}

func TestPutRangeDelete(t *testing.T) {
	w := newWorld(t)
	w.put(t, "a", "1")
	w.put(t, "b", "2")
	w.put(t, "a", "3")
	r, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("c")})
	require.NoError(t, err)
	require.EqualValues(t, 2, r.Count)
	require.Equal(t, "3", string(r.Kvs[0].Value))
	require.EqualValues(t, 2, r.Kvs[0].Version)
	require.EqualValues(t, 2, r.Kvs[0].CreateRevision)
	require.EqualValues(t, 4, r.Kvs[0].ModRevision)

	old, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), Revision: 2})
	require.NoError(t, err)
	require.Equal(t, "1", string(old.Kvs[0].Value))
	require.EqualValues(t, 4, old.Header.Revision)

	limited, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}, Limit: 1, KeysOnly: true})
	require.NoError(t, err)
	require.True(t, limited.More)
	require.EqualValues(t, 2, limited.Count)
	require.Len(t, limited.Kvs, 1)
	require.Empty(t, limited.Kvs[0].Value)

	counted, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}, CountOnly: true})
	require.NoError(t, err)
	require.EqualValues(t, 2, counted.Count)
	require.Empty(t, counted.Kvs)

	one, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), CountOnly: true})
	require.NoError(t, err)
	require.EqualValues(t, 1, one.Count)

	deletion, err := w.DeleteRange(t.Context(), &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte{0}, PrevKv: true})
	require.NoError(t, err)
	require.EqualValues(t, 2, deletion.Deleted)
	require.Len(t, deletion.PrevKvs, 2)
	require.EqualValues(t, 5, deletion.Header.Revision)
	repeated, err := w.DeleteRange(t.Context(), &pb.DeleteRangeRequest{Key: []byte("a")})
	require.NoError(t, err)
	require.Zero(t, repeated.Deleted)
	require.EqualValues(t, 5, repeated.Header.Revision, "the revision is unchanged")
}

func TestPutIgnoreValue(t *testing.T) {
	w := newWorld(t)
	_, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte("a"), IgnoreValue: true})
	require.Equal(t, rpctypes.ErrGRPCKeyNotFound, err)
	w.put(t, "a", "1")
	r, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte("a"), IgnoreValue: true, PrevKv: true})
	require.NoError(t, err)
	require.Equal(t, "1", string(r.PrevKv.Value))
	got, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
	require.NoError(t, err)
	require.Equal(t, "1", string(got.Kvs[0].Value))
	require.EqualValues(t, 2, got.Kvs[0].Version)
}

func op(r any) *pb.RequestOp {
	switch r := r.(type) {
	case *pb.PutRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: r}}
	case *pb.RangeRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
	case *pb.DeleteRangeRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: r}}
	case *pb.TxnRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: r}}
	}
	panic("no operation")
}

func versionIs(key string, is pb.Compare_CompareResult, n int64) *pb.Compare {
	return &pb.Compare{Key: []byte(key), Target: pb.Compare_VERSION, Result: is, TargetUnion: &pb.Compare_Version{Version: n}}
}

func TestTransactions(t *testing.T) {
	w := newWorld(t)
	create := &pb.TxnRequest{
		Compare: []*pb.Compare{versionIs("lock", pb.Compare_EQUAL, 0)},
		Success: []*pb.RequestOp{op(&pb.PutRequest{Key: []byte("lock"), Value: []byte("me")})},
		Failure: []*pb.RequestOp{op(&pb.RangeRequest{Key: []byte("lock")})},
	}
	first, err := w.Txn(t.Context(), create)
	require.NoError(t, err)
	require.True(t, first.Succeeded)
	require.EqualValues(t, 2, first.Header.Revision)
	second, err := w.Txn(t.Context(), create)
	require.NoError(t, err)
	require.False(t, second.Succeeded)
	require.Equal(t, "me", string(second.Responses[0].GetResponseRange().Kvs[0].Value))
	require.EqualValues(t, 2, second.Header.Revision, "the revision is unchanged")

	nested, err := w.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{
		op(&pb.PutRequest{Key: []byte("x"), Value: []byte("1")}),
		op(&pb.TxnRequest{
			Compare: []*pb.Compare{versionIs("x", pb.Compare_EQUAL, 0)}, // compares see the state before the transaction
			Success: []*pb.RequestOp{op(&pb.RangeRequest{Key: []byte("x")})},
		}),
		op(&pb.DeleteRangeRequest{Key: []byte("lock")}),
	}})
	require.NoError(t, err)
	nestedTxn := nested.Responses[1].GetResponseTxn()
	require.True(t, nestedTxn.Succeeded)
	require.Equal(t, "1", string(nestedTxn.Responses[0].GetResponseRange().Kvs[0].Value), "operations read the results of earlier ones")
	require.EqualValues(t, 1, nested.Responses[2].GetResponseDeleteRange().Deleted)
	require.EqualValues(t, 3, nested.Header.Revision)
}

// TestRangeCompares checks that a compare with a range is true if it is true for every key in the range. For an empty
// range it is evaluated as for a key that does not exist.
func TestRangeCompares(t *testing.T) {
	w := newWorld(t)
	w.put(t, "a1", "x")
	w.put(t, "a2", "x")
	for name, c := range map[string]struct {
		compare *pb.Compare
		want    bool
	}{
		"value of all keys":                     {&pb.Compare{Key: []byte("a"), RangeEnd: []byte("b"), Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{Value: []byte("x")}}, true},
		"value in an empty range":               {&pb.Compare{Key: []byte("q"), RangeEnd: []byte("r"), Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{}}, false},
		"create revision, false for one key":    {&pb.Compare{Key: []byte("a"), RangeEnd: []byte("b"), Target: pb.Compare_CREATE, Result: pb.Compare_LESS, TargetUnion: &pb.Compare_CreateRevision{CreateRevision: 3}}, false},
		"create revision 0 in an empty range":   {&pb.Compare{Key: []byte("q"), RangeEnd: []byte("r"), Target: pb.Compare_CREATE, TargetUnion: &pb.Compare_CreateRevision{}}, true},
		"create revision > 0 in an empty range": {&pb.Compare{Key: []byte("q"), RangeEnd: []byte("r"), Target: pb.Compare_CREATE, Result: pb.Compare_GREATER, TargetUnion: &pb.Compare_CreateRevision{}}, false},
		"another value":                         {&pb.Compare{Key: []byte("a1"), Target: pb.Compare_VALUE, Result: pb.Compare_NOT_EQUAL, TargetUnion: &pb.Compare_Value{Value: []byte("y")}}, true},
		"no lease":                              {&pb.Compare{Key: []byte("a1"), Target: pb.Compare_LEASE, TargetUnion: &pb.Compare_Lease{}}, true},
	} {
		read, err := w.Txn(t.Context(), &pb.TxnRequest{Compare: []*pb.Compare{c.compare}, Success: []*pb.RequestOp{op(&pb.RangeRequest{Key: []byte("a1")})}})
		require.NoError(t, err)
		require.Equal(t, c.want, read.Succeeded, "%s, read-only transaction", name)
		written, err := w.Txn(t.Context(), &pb.TxnRequest{Compare: []*pb.Compare{c.compare}, Success: []*pb.RequestOp{op(&pb.DeleteRangeRequest{Key: []byte("zzz")})}})
		require.NoError(t, err)
		require.Equal(t, c.want, written.Succeeded, "%s, writing transaction", name)
	}
}

func TestReadOnlyTxnIsNotProposed(t *testing.T) {
	w := newWorld(t)
	w.put(t, "a", "1")
	w.raft.BeforeNextPropose(func() { t.Error("proposed") })
	r, err := w.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.RangeRequest{Key: []byte("a")})}})
	require.NoError(t, err)
	require.Equal(t, "1", string(r.Responses[0].GetResponseRange().Kvs[0].Value))
}

// TestSerializableReadWithoutLeader checks that serializable reads succeed without a leader, and that linearizable
// reads fail.
func TestSerializableReadWithoutLeader(t *testing.T) {
	w := newWorld(t)
	w.put(t, "a", "1")
	w.raft.SetError(consensus.ErrNoLeader)
	_, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
	require.Equal(t, rpctypes.ErrGRPCNoLeader, err)
	r, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), Serializable: true})
	require.NoError(t, err)
	require.Len(t, r.Kvs, 1)
}

func TestCompaction(t *testing.T) {
	w := newWorld(t)
	w.put(t, "a", "1")
	w.put(t, "a", "2")
	compact := func(revision int64) error {
		_, err := w.Compact(t.Context(), &pb.CompactionRequest{Revision: revision})
		return err
	}
	require.Equal(t, rpctypes.ErrGRPCFutureRev, compact(9))
	require.NoError(t, compact(3))
	require.Equal(t, rpctypes.ErrGRPCCompacted, compact(3))
	_, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), Revision: 2})
	require.Equal(t, rpctypes.ErrGRPCCompacted, err)
	_, err = w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), Revision: 9})
	require.Equal(t, rpctypes.ErrGRPCFutureRev, err)
	for _, ops := range [][]*pb.RequestOp{
		{op(&pb.RangeRequest{Key: []byte("a"), Revision: 2})},
		{op(&pb.PutRequest{Key: []byte("b")}), op(&pb.RangeRequest{Key: []byte("a"), Revision: 2})},
	} {
		_, err = w.Txn(t.Context(), &pb.TxnRequest{Success: ops})
		require.Equal(t, rpctypes.ErrGRPCCompacted, err)
	}
	b, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("b")})
	require.NoError(t, err)
	require.Empty(t, b.Kvs, "a failed transaction writes nothing")
}

// TestConsensusErrors checks which client errors are returned for errors of package consensus and of the engine.
func TestConsensusErrors(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct{ is, want error }{
		{consensus.ErrNoLeader, rpctypes.ErrGRPCNoLeader},
		{&consensus.NotLeaderError{}, rpctypes.ErrGRPCNoLeader},
		{&consensus.NotLeaderError{Leader: 2}, rpctypes.ErrGRPCLeaderChanged},
		{consensus.ErrUncertain, rpctypes.ErrGRPCTimeoutDueToLeaderFail},
		{consensus.ErrOverloaded, rpctypes.ErrGRPCRequestTooManyRequests},
		{consensus.ErrTooLarge, rpctypes.ErrGRPCRequestTooLarge},
		{consensus.ErrStopped, rpctypes.ErrGRPCStopped},
		{mvcc.ErrClosed, rpctypes.ErrGRPCStopped},
	} {
		w.raft.SetError(c.is)
		_, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte("a")})
		require.Equal(t, c.want, err, "put, %v", c.is)
		_, err = w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
		require.Equal(t, c.want, err, "range, %v", c.is)
	}
	internal := errors.New("disk error")
	w.raft.SetError(internal)
	_, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte("a")})
	require.ErrorIs(t, err, internal, "internal errors are returned unchanged, for the log")
}

func TestTooLargeRequests(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.Limits.RequestBytes = 64 << 10; o.Limits.TxnOps = 2 })
	_, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte("a"), Value: make([]byte, 64<<10+1)})
	require.Equal(t, rpctypes.ErrGRPCRequestTooLarge, err)
	putOp := func(key string) *pb.RequestOp {
		return op(&pb.PutRequest{Key: []byte(key), Value: make([]byte, 48<<10)})
	}
	_, err = w.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{putOp("a"), putOp("b")}})
	require.Equal(t, rpctypes.ErrGRPCRequestTooLarge, err)
	_, err = w.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{putOp("a"), putOp("b"), putOp("c")}})
	require.Equal(t, rpctypes.ErrGRPCTooManyOps, err)
	_, err = w.Put(t.Context(), &pb.PutRequest{Key: make([]byte, command.MaxKeyBytes+1)})
	require.Equal(t, rpctypes.ErrGRPCRequestTooLarge, err)
	_, err = w.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.PutRequest{Key: []byte("a"), Value: make([]byte, 64<<10)})}})
	require.Equal(t, rpctypes.ErrGRPCRequestTooLarge, err, "the size of the whole request counts")
	got, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
	require.NoError(t, err)
	require.Empty(t, got.Kvs)
}

// TestLargestValue checks that a value of exactly the size limit can be written, with a short key and with the longest
// key, and that a larger value is refused.
func TestLargestValue(t *testing.T) {
	w := newWorld(t)
	for _, key := range [][]byte{[]byte("a"), make([]byte, command.MaxKeyBytes)} {
		_, err := w.Put(t.Context(), &pb.PutRequest{Key: key, Value: make([]byte, DefaultRequestBytes)})
		require.NoError(t, err)
		_, err = w.Put(t.Context(), &pb.PutRequest{Key: key, Value: make([]byte, DefaultRequestBytes+1)})
		require.Equal(t, rpctypes.ErrGRPCRequestTooLarge, err)
	}
}

// TestWriteIsRecheckedAfterRecordsChange raises an alarm between the check of a put and its commit, and checks that the
// put is refused.
func TestWriteIsRecheckedAfterRecordsChange(t *testing.T) {
	w := newWorld(t)
	w.put(t, "a", "1")
	w.raft.BeforeNextPropose(func() {
		// This alarm is raised after the check of the put and before its commit.
		_, err := w.Alarm(t.Context(), &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 1, Alarm: pb.AlarmType_NOSPACE})
		require.NoError(t, err)
	})
	_, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte("a"), Value: []byte("2")})
	require.Equal(t, rpctypes.ErrGRPCNoSpace, err)
	got, err := w.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
	require.NoError(t, err)
	require.Equal(t, "1", string(got.Kvs[0].Value))
}

// TestInvalidRequestsGetStatusErrors checks that every error for an invalid request is a gRPC status with a code other
// than Unknown.
func TestInvalidRequestsGetStatusErrors(t *testing.T) {
	w := newWorld(t)
	w.put(t, "a", "1")
	ctx := t.Context()
	for name, f := range map[string]func() error{
		"put with a negative lease": func() error { _, err := w.Put(ctx, &pb.PutRequest{Key: []byte("a"), Lease: -1}); return err },
		"grant of a negative id":    func() error { _, err := w.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: -5, TTL: 60}); return err },
		"revoke of a negative id":   func() error { _, err := w.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: -6}); return err },
		"negative limit": func() error {
			_, err := w.Range(ctx, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b"), Limit: -1})
			return err
		},
		"negative revision": func() error { _, err := w.Range(ctx, &pb.RangeRequest{Key: []byte("a"), Revision: -1}); return err },
		"range with end before key": func() error {
			_, err := w.Range(ctx, &pb.RangeRequest{Key: []byte("b"), RangeEnd: []byte("a")})
			return err
		},
		"delete with end before key": func() error {
			_, err := w.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("b"), RangeEnd: []byte("a"), PrevKv: true})
			return err
		},
		"negative compaction": func() error { _, err := w.Compact(ctx, &pb.CompactionRequest{Revision: -1}); return err },
		"range of all keys": func() error {
			_, err := w.Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
			return err
		},
		"long key": func() error { _, err := w.Range(ctx, &pb.RangeRequest{Key: make([]byte, 1<<20)}); return err },
		"long end": func() error {
			_, err := w.Range(ctx, &pb.RangeRequest{Key: []byte("a"), RangeEnd: make([]byte, 1<<20)})
			return err
		},
		"compare with a long key": func() error {
			_, err := w.Txn(ctx, &pb.TxnRequest{Compare: []*pb.Compare{versionIs(string(make([]byte, 1<<16)), pb.Compare_EQUAL, 0)}, Success: []*pb.RequestOp{op(&pb.PutRequest{Key: []byte("a")})}})
			return err
		},
		"compare with end before key": func() error {
			_, err := w.Txn(ctx, &pb.TxnRequest{
				Compare: []*pb.Compare{{Key: []byte("b"), RangeEnd: []byte("a"), Target: pb.Compare_VALUE}}, Success: []*pb.RequestOp{op(&pb.PutRequest{Key: []byte("a")})},
			})
			return err
		},
		"compare with a negative version": func() error {
			_, err := w.Txn(ctx, &pb.TxnRequest{Compare: []*pb.Compare{versionIs("a", pb.Compare_GREATER, -1)}, Success: []*pb.RequestOp{op(&pb.PutRequest{Key: []byte("a")})}})
			return err
		},
		"unknown alarm": func() error {
			_, err := w.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, Alarm: 77})
			return err
		},
		"unknown alarm action":        func() error { _, err := w.Alarm(ctx, &pb.AlarmRequest{Action: 77}); return err },
		"hash of a negative revision": func() error { _, err := w.HashKV(ctx, &pb.HashKVRequest{Revision: -1}); return err },
		"deeply nested transaction": func() error {
			r := &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.PutRequest{Key: []byte("a")})}}
			for range 100 {
				r = &pb.TxnRequest{Success: []*pb.RequestOp{op(r)}}
			}
			_, err := w.Txn(ctx, r)
			return err
		},
	} {
		err := f()
		if err == nil {
			continue
		}
		_, isStatus := err.(interface{ GRPCStatus() *status.Status })
		require.True(t, isStatus, "%s: %v", name, err)
		require.NotEqual(t, codes.Unknown, status.Code(err), "%s: %v", name, err)
		t.Log(name, err)
	}
}
