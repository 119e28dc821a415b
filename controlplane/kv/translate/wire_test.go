package translate

import (
	"testing"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

func put(key string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), Value: []byte("v")}}}
}

func del(key, end string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{
		RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte(key), RangeEnd: []byte(end)},
	}}
}

func get(key string, serializable bool) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(key), Serializable: serializable}}}
}

func txn(then, otherwise []*pb.RequestOp) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Success: then, Failure: otherwise}}}
}

func ops(all ...*pb.RequestOp) []*pb.RequestOp { return all }

// TestDuplicateKeysInTxn checks which transactions are refused because they change a key twice, with the cases of
// etcd's TestV3TxnDuplicateKeys and some others.
func TestDuplicateKeysInTxn(t *testing.T) {
	one, two := txn(ops(put("abc")), nil), txn(ops(put("abc")), ops(put("abc")))
	for name, c := range map[string]struct {
		ops  []*pb.RequestOp
		want error
	}{
		"put, put":                               {ops(put("abc"), put("abc")), rpctypes.ErrGRPCDuplicateKey},
		"put, delete":                            {ops(put("abc"), del("abc", "")), rpctypes.ErrGRPCDuplicateKey},
		"put, delete of a range":                 {ops(put("abc"), del("a", "b")), rpctypes.ErrGRPCDuplicateKey},
		"put, then delete":                       {ops(put("abc"), txn(ops(del("a", "b")), nil)), rpctypes.ErrGRPCDuplicateKey},
		"delete, then put":                       {ops(del("a", "b"), one), rpctypes.ErrGRPCDuplicateKey},
		"put in both branches, twice":            {ops(two, two), rpctypes.ErrGRPCDuplicateKey},
		"delete of other keys":                   {ops(del("abb", "abc"), two), nil},
		"deletes in nested transactions":         {ops(txn(ops(del("a", "b")), nil), txn(ops(del("a", "b")), ops(del("a", "b")))), nil},
		"delete, delete":                         {ops(del("abc", ""), del("a", "b"), del("abc", ""), del("a", "b")), nil},
		"put, delete of a range that ends at it": {ops(put("abc"), del("abb", "abc")), nil},
		"put in both branches":                   {ops(two), nil},
		"put, delete of a range without end":     {ops(put("abc"), del("a", "\x00")), rpctypes.ErrGRPCDuplicateKey},
		"put, open delete from a later key":      {ops(put("abc"), del("abd", "\x00")), nil},
		"put, delete with end before key":        {ops(put("abc"), del("b", "a")), nil},
		"nested put, put":                        {ops(one, put("abc")), rpctypes.ErrGRPCDuplicateKey},
		"nested put, later nested delete":        {ops(one, txn(ops(del("abc", "")), nil)), nil}, // as in etcd
		"nested delete, later nested put":        {ops(txn(ops(del("abc", "")), nil), one), rpctypes.ErrGRPCDuplicateKey},
		"delete in one branch, put after it":     {ops(txn(nil, ops(del("a", "b"))), put("abc")), rpctypes.ErrGRPCDuplicateKey},
		"deeply nested":                          {ops(txn(ops(txn(ops(txn(nil, ops(put("x")))), nil)), nil), put("x")), rpctypes.ErrGRPCDuplicateKey},
	} {
		require.Equal(t, c.want, CheckTxn(&pb.TxnRequest{Success: c.ops}, 128), name)
		require.Equal(t, c.want, CheckTxn(&pb.TxnRequest{Failure: c.ops}, 128), name)
	}
}

func TestChecks(t *testing.T) {
	many := make([]*pb.RequestOp, 129)
	for i := range many {
		many[i] = get("a", false)
	}
	for name, c := range map[string]struct{ got, want error }{
		"range without key":            {CheckRange(&pb.RangeRequest{}), rpctypes.ErrGRPCEmptyKey},
		"sort order":                   {CheckRange(&pb.RangeRequest{Key: []byte("a"), SortOrder: 9}), rpctypes.ErrGRPCInvalidSortOption},
		"sort target":                  {CheckRange(&pb.RangeRequest{Key: []byte("a"), SortTarget: 9}), rpctypes.ErrGRPCInvalidSortOption},
		"put without key":              {CheckPut(&pb.PutRequest{}), rpctypes.ErrGRPCEmptyKey},
		"ignored value":                {CheckPut(&pb.PutRequest{Key: []byte("a"), Value: []byte("v"), IgnoreValue: true}), rpctypes.ErrGRPCValueProvided},
		"ignored lease":                {CheckPut(&pb.PutRequest{Key: []byte("a"), Lease: 1, IgnoreLease: true}), rpctypes.ErrGRPCLeaseProvided},
		"delete without key":           {CheckDelete(&pb.DeleteRangeRequest{}), rpctypes.ErrGRPCEmptyKey},
		"too many operations":          {CheckTxn(&pb.TxnRequest{Success: many}, 128), rpctypes.ErrGRPCTooManyOps},
		"too many operations, nested":  {CheckTxn(&pb.TxnRequest{Success: ops(txn(many[:128], nil))}, 128), rpctypes.ErrGRPCTooManyOps},
		"maximum number of operations": {CheckTxn(&pb.TxnRequest{Success: many[:128]}, 128), nil},
		"compare without key":          {CheckTxn(&pb.TxnRequest{Compare: []*pb.Compare{{}}}, 128), rpctypes.ErrGRPCEmptyKey},
		"unknown operation":            {CheckTxn(&pb.TxnRequest{Failure: ops(&pb.RequestOp{})}, 128), rpctypes.ErrGRPCKeyNotFound},
		"nested":                       {CheckTxn(&pb.TxnRequest{Failure: ops(txn(nil, ops(put(""))))}, 128), rpctypes.ErrGRPCEmptyKey},
	} {
		require.Equal(t, c.want, c.got, name)
	}
	require.ErrorContains(t, CheckRangeStream(&pb.RangeRequest{Key: []byte("a"), SortOrder: pb.RangeRequest_DESCEND}), "custom sort orders")
	require.ErrorContains(t, CheckRangeStream(&pb.RangeRequest{Key: []byte("a"), MinModRevision: 1}), "revision filters")
}

func TestReadOnlyAndSerializable(t *testing.T) {
	require.True(t, ReadOnly(&pb.TxnRequest{Success: ops(get("a", false))}))
	require.True(t, ReadOnly(&pb.TxnRequest{}))
	require.False(t, ReadOnly(&pb.TxnRequest{Failure: ops(put("a"))}))
	require.False(t, ReadOnly(&pb.TxnRequest{Failure: ops(txn(nil, nil))}))
	require.True(t, Serializable(&pb.TxnRequest{Success: ops(get("a", true))}))
	require.False(t, Serializable(&pb.TxnRequest{Success: ops(get("a", true), get("b", false))}))
	require.False(t, Serializable(&pb.TxnRequest{}), "a transaction without operations is linearizable")
}

func kvs() []command.KV {
	return []command.KV{
		{Key: []byte("a"), Value: []byte("3"), CreateRevision: 9, ModRevision: 9, Version: 1},
		{Key: []byte("b"), Value: []byte("1"), CreateRevision: 2, ModRevision: 7, Version: 3},
		{Key: []byte("c"), Value: []byte("2"), CreateRevision: 4, ModRevision: 4, Version: 1},
	}
}

func TestRangeResponseSortsAndFilters(t *testing.T) {
	const up, down = pb.RangeRequest_ASCEND, pb.RangeRequest_DESCEND
	for name, c := range map[string]struct {
		r    *pb.RangeRequest
		want string
		more bool
	}{
		"version":            {&pb.RangeRequest{SortTarget: pb.RangeRequest_VERSION, SortOrder: up}, "acb", false},
		"create":             {&pb.RangeRequest{SortTarget: pb.RangeRequest_CREATE, SortOrder: up}, "bca", false},
		"create, descending": {&pb.RangeRequest{SortTarget: pb.RangeRequest_CREATE, SortOrder: down}, "acb", false},
		"mod":                {&pb.RangeRequest{SortTarget: pb.RangeRequest_MOD, SortOrder: up}, "cba", false},
		"mod, no order":      {&pb.RangeRequest{SortTarget: pb.RangeRequest_MOD}, "cba", false},
		"value":              {&pb.RangeRequest{SortTarget: pb.RangeRequest_VALUE, SortOrder: up}, "bca", false},
		"value, keys only":   {&pb.RangeRequest{SortTarget: pb.RangeRequest_VALUE, SortOrder: up, KeysOnly: true}, "bca", false},
		"limit":              {&pb.RangeRequest{SortTarget: pb.RangeRequest_MOD, SortOrder: up, Limit: 2}, "cb", true},
		"min mod":            {&pb.RangeRequest{MinModRevision: 7}, "ab", false},
		"max mod":            {&pb.RangeRequest{MaxModRevision: 7, Limit: 1}, "b", true},
		"min create":         {&pb.RangeRequest{MinCreateRevision: 4}, "ac", false},
		"max create":         {&pb.RangeRequest{MaxCreateRevision: 4, SortOrder: down}, "cb", false},
	} {
		o := RangeOptions(c.r)
		require.Zero(t, o.Limit, "%s: the engine must not limit before sorting", name)
		out := RangeResponse(c.r, &command.RangeResult{KVs: kvs(), Count: 3})
		var got string
		for _, kv := range out.Kvs {
			got += string(kv.Key)
			require.Equal(t, c.r.KeysOnly, len(kv.Value) == 0, name)
		}
		require.Equal(t, c.want, got, name)
		require.Equal(t, c.more, out.More, name)
		require.EqualValues(t, 3, out.Count, "%s: the count ignores filters, as in etcd", name)
	}
	o := RangeOptions(&pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), SortOrder: down, Limit: 5})
	require.True(t, o.Reverse)
	require.Equal(t, 5, o.Limit)
	require.True(t, o.WantCount)
}

// TestHeadersOfNestedResponses checks that each nested response has the revision that was visible to its operation.
func TestHeadersOfNestedResponses(t *testing.T) {
	r := &pb.TxnRequest{Success: ops(get("a", false), del("x", ""), get("a", false), txn(ops(put("a"), get("a", false)), nil), del("a", ""))}
	found := &command.StepResult{Kind: command.StepBranch, Succeeded: true, Steps: []command.StepResult{
		{Kind: command.StepRange}, {Kind: command.StepDelete}, {Kind: command.StepRange},
		{Kind: command.StepBranch, Succeeded: true, Steps: []command.StepResult{{Kind: command.StepPut}, {Kind: command.StepRange}}},
		{Kind: command.StepDelete, Count: 1},
	}}
	out := TxnResponse(r, found, 12)
	require.True(t, out.Succeeded)
	require.EqualValues(t, 11, out.Responses[0].GetResponseRange().Header.Revision)
	require.EqualValues(t, 11, out.Responses[1].GetResponseDeleteRange().Header.Revision)
	require.EqualValues(t, 11, out.Responses[2].GetResponseRange().Header.Revision)
	inner := out.Responses[3].GetResponseTxn()
	require.EqualValues(t, 12, inner.Responses[0].GetResponsePut().Header.Revision)
	require.EqualValues(t, 12, inner.Responses[1].GetResponseRange().Header.Revision)
	require.EqualValues(t, 12, out.Responses[4].GetResponseDeleteRange().Header.Revision)

	// Without a write all headers have the current revision.
	none := TxnResponse(&pb.TxnRequest{Success: ops(del("x", ""))}, &command.StepResult{Succeeded: true, Steps: []command.StepResult{{Kind: command.StepDelete}}}, 12)
	require.EqualValues(t, 12, none.Responses[0].GetResponseDeleteRange().Header.Revision)
}

func TestTxnCost(t *testing.T) {
	big := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 1000)}}}
	require.EqualValues(t, 256+1+1000, TxnCost(&pb.TxnRequest{Success: ops(put("a"), get("a", false)), Failure: ops(txn(ops(big), nil))}))
	require.Zero(t, TxnCost(&pb.TxnRequest{Success: ops(del("a", ""))}))
}
