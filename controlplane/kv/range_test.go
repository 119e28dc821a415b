package kv

import (
	"testing"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestRangeStreamReadsOneRevision(t *testing.T) {
	w := newWorld(t)
	value := string(make([]byte, 300<<10))
	for _, key := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		w.put(t, key, value)
	}
	var keys string
	var pieces []*pb.RangeResponse
	read := func(r *pb.RangeRequest) {
		keys, pieces = "", nil
		require.NoError(t, w.RangeStream(t.Context(), r, func(p *pb.RangeResponse) error {
			if len(pieces) == 0 {
				w.put(t, "c", "new")
				w.put(t, "z", "new")
			}
			pieces = append(pieces, p)
			for _, kv := range p.Kvs {
				keys += string(kv.Key)
				require.Equal(t, value, string(kv.Value))
			}
			return nil
		}))
	}
	read(&pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
	require.Equal(t, "abcdefgh", keys)
	require.Greater(t, len(pieces), 1)
	for _, p := range pieces[:len(pieces)-1] {
		require.Nil(t, p.Header)
		require.Zero(t, p.Count)
	}
	last := pieces[len(pieces)-1]
	require.EqualValues(t, 9, last.Header.Revision)
	require.EqualValues(t, 8, last.Count)
	require.False(t, last.More)

	read(&pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Revision: 9, Limit: 6})
	require.Equal(t, "abcdef", keys)
	last = pieces[len(pieces)-1]
	require.True(t, last.More)
	require.EqualValues(t, 8, last.Count)

	require.NoError(t, w.RangeStream(t.Context(), &pb.RangeRequest{Key: []byte("none")}, func(p *pb.RangeResponse) error {
		require.NotNil(t, p.Header)
		require.Zero(t, p.Count)
		return nil
	}))
	err := w.RangeStream(t.Context(), &pb.RangeRequest{Key: []byte("a"), SortOrder: pb.RangeRequest_DESCEND}, nil)
	require.Equal(t, codes.Unimplemented, status.Code(err))
}

// TestRangeStreamSortedByValue checks that RangeStream sorts by a sort target without a sort order in ascending order,
// as in etcd.
func TestRangeStreamSortedByValue(t *testing.T) {
	w := newWorld(t)
	large := make([]byte, 700<<10)
	for i, key := range []string{"a", "b", "c", "d"} {
		w.put(t, key, string(append([]byte{byte(9 - i)}, large...)))
	}
	for _, c := range []struct {
		r      *pb.RangeRequest
		keys   string
		pieces int
		more   bool
	}{
		{&pb.RangeRequest{SortTarget: pb.RangeRequest_VALUE}, "dcba", 2, false},
		{&pb.RangeRequest{SortTarget: pb.RangeRequest_VALUE, KeysOnly: true}, "dcba", 1, false},
		{&pb.RangeRequest{SortTarget: pb.RangeRequest_VALUE, Limit: 3}, "dcb", 2, true},
		{&pb.RangeRequest{SortTarget: pb.RangeRequest_VALUE, CountOnly: true}, "", 1, false},
		{&pb.RangeRequest{SortTarget: pb.RangeRequest_MOD, Limit: 1}, "a", 1, true},
	} {
		c.r.Key, c.r.RangeEnd = []byte("a"), []byte("z")
		var keys string
		var pieces []*pb.RangeResponse
		require.NoError(t, w.RangeStream(t.Context(), c.r, func(p *pb.RangeResponse) error {
			pieces = append(pieces, p)
			for _, kv := range p.Kvs {
				keys += string(kv.Key)
				require.Equal(t, c.r.KeysOnly, len(kv.Value) == 0)
			}
			return nil
		}))
		require.Equal(t, c.keys, keys, "%v", c.r)
		require.Len(t, pieces, c.pieces, "%v", c.r)
		for _, p := range pieces[:c.pieces-1] {
			require.Nil(t, p.Header)
		}
		last := pieces[c.pieces-1]
		require.EqualValues(t, 5, last.Header.Revision)
		require.EqualValues(t, 4, last.Count)
		require.Equal(t, c.more, last.More)
	}
}
