package translate

import (
	"bytes"
	"cmp"
	"math"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// RangeOptions returns the engine's options for a range request. The engine can sort only by key, and cannot filter by
// revision. If the request needs more, the options select all keys of the range, and RangeResponse sorts and filters
// them afterwards.
func RangeOptions(r *pb.RangeRequest) command.RangeOptions {
	o := command.RangeOptions{
		Key: r.Key, End: r.RangeEnd, Revision: max(r.Revision, 0), KeysOnly: r.KeysOnly && r.SortTarget != pb.RangeRequest_VALUE,
		CountOnly: r.CountOnly,
	}
	if len(r.RangeEnd) > 0 {
		o.WantCount = true
	}
	if !r.CountOnly && EngineSorts(r) {
		o.Reverse = r.SortOrder == pb.RangeRequest_DESCEND
		o.Limit = int(min(max(r.Limit, 0), math.MaxInt))
	}
	return o
}

// EngineSorts reports whether the engine can apply the order and the limit of the range itself.
func EngineSorts(r *pb.RangeRequest) bool {
	return !hasRevisionFilter(r) && r.SortTarget == pb.RangeRequest_KEY
}

// hasRevisionFilter reports whether the request filters keys by revision.
func hasRevisionFilter(r *pb.RangeRequest) bool {
	return r.MinModRevision != 0 || r.MaxModRevision != 0 || r.MinCreateRevision != 0 || r.MaxCreateRevision != 0
}

// RangeResponse returns the response to a range, without its header. It may reorder found.KVs in place and delete
// elements.
func RangeResponse(r *pb.RangeRequest, found *command.RangeResult) *pb.RangeResponse {
	out := &pb.RangeResponse{Count: found.Count, More: found.More}
	if r.CountOnly {
		return out
	}
	kvs := found.KVs
	if !EngineSorts(r) {
		kvs = slices.DeleteFunc(kvs, func(kv command.KV) bool { return filteredOut(r, &kv) })
		sortKVs(r, kvs)
		if r.Limit > 0 && int64(len(kvs)) > r.Limit {
			kvs, out.More = kvs[:r.Limit], true
		}
		if r.KeysOnly {
			for i := range kvs {
				kvs[i].Value = nil
			}
		}
	}
	out.Kvs = KeyValues(kvs)
	return out
}

func filteredOut(r *pb.RangeRequest, kv *command.KV) bool {
	return r.MaxModRevision != 0 && kv.ModRevision > r.MaxModRevision ||
		r.MinModRevision != 0 && kv.ModRevision < r.MinModRevision ||
		r.MaxCreateRevision != 0 && kv.CreateRevision > r.MaxCreateRevision ||
		r.MinCreateRevision != 0 && kv.CreateRevision < r.MinCreateRevision
}

// sortComparisons maps each sort target to the function that compares two keys by it.
var sortComparisons = map[pb.RangeRequest_SortTarget]func(a, b command.KV) int{
	pb.RangeRequest_KEY:     func(a, b command.KV) int { return bytes.Compare(a.Key, b.Key) },
	pb.RangeRequest_VERSION: func(a, b command.KV) int { return cmp.Compare(a.Version, b.Version) },
	pb.RangeRequest_CREATE:  func(a, b command.KV) int { return cmp.Compare(a.CreateRevision, b.CreateRevision) },
	pb.RangeRequest_MOD:     func(a, b command.KV) int { return cmp.Compare(a.ModRevision, b.ModRevision) },
	pb.RangeRequest_VALUE:   func(a, b command.KV) int { return bytes.Compare(a.Value, b.Value) },
}

// sortKVs sorts kvs in the requested order, or in ascending order if the request has no sort order, as in etcd. kvs
// must be sorted by key in ascending order; elements that compare as equal remain in that order.
func sortKVs(r *pb.RangeRequest, kvs []command.KV) {
	compare := sortComparisons[r.SortTarget]
	if r.SortOrder == pb.RangeRequest_DESCEND {
		ascending := compare
		compare = func(a, b command.KV) int { return ascending(b, a) }
	}
	slices.SortStableFunc(kvs, compare)
}
