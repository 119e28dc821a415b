package translate

import (
	"bytes"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The functions named Check… return one of etcd's errors if the request is invalid independently of the keyspace's
// contents, and nil otherwise.

// CheckRange checks a range request. The request must have a key, and its sort order and sort target must be known
// values.
func CheckRange(r *pb.RangeRequest) error {
	if len(r.GetKey()) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	if r.SortOrder < pb.RangeRequest_NONE || r.SortOrder > pb.RangeRequest_DESCEND ||
		r.SortTarget < pb.RangeRequest_KEY || r.SortTarget > pb.RangeRequest_VALUE {
		return rpctypes.ErrGRPCInvalidSortOption
	}
	return nil
}

// CheckRangeStream checks a request for RangeStream, which supports neither custom sort orders nor revision filters.
func CheckRangeStream(r *pb.RangeRequest) error {
	if err := CheckRange(r); err != nil {
		return err
	}
	if r.SortOrder != pb.RangeRequest_NONE && (r.SortTarget != pb.RangeRequest_KEY || r.SortOrder != pb.RangeRequest_ASCEND) {
		return status.Error(codes.Unimplemented, "RangeStream does not support custom sort orders")
	}
	if hasRevisionFilter(r) {
		return status.Error(codes.Unimplemented, "RangeStream does not support revision filters")
	}
	return nil
}

// CheckPut checks a put request. The request must have a key. With ignore_value it must not have a value, and with
// ignore_lease it must not have a lease.
func CheckPut(r *pb.PutRequest) error {
	switch {
	case len(r.GetKey()) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.IgnoreValue && len(r.Value) != 0:
		return rpctypes.ErrGRPCValueProvided
	case r.IgnoreLease && r.Lease != 0:
		return rpctypes.ErrGRPCLeaseProvided
	}
	return nil
}

// CheckDelete checks a delete request. The request must have a key.
func CheckDelete(r *pb.DeleteRangeRequest) error {
	if len(r.GetKey()) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	return nil
}

// CheckTxn checks a transaction. The numbers of its compares, its success operations and its failure operations must
// each be at most maxOps. The limit of a nested transaction is lower by the largest of these three numbers in the
// enclosing transaction. No key may be put twice, or both put and deleted; see changedKeys.
func CheckTxn(r *pb.TxnRequest, maxOps int) error {
	if err := checkTxn(r, maxOps); err != nil {
		return err
	}
	for _, branch := range [][]*pb.RequestOp{r.Success, r.Failure} {
		if len(branch) < 2 && !isNestedTxn(branch) {
			continue
		}
		if _, _, err := changedKeys(branch); err != nil {
			return err
		}
	}
	return nil
}

func isNestedTxn(ops []*pb.RequestOp) bool { return len(ops) == 1 && ops[0].GetRequestTxn() != nil }

func checkTxn(r *pb.TxnRequest, maxOps int) error {
	if r == nil {
		return rpctypes.ErrGRPCKeyNotFound
	}
	ops := max(len(r.Compare), len(r.Success), len(r.Failure))
	if ops > maxOps {
		return rpctypes.ErrGRPCTooManyOps
	}
	for _, c := range r.Compare {
		if len(c.GetKey()) == 0 {
			return rpctypes.ErrGRPCEmptyKey
		}
		if c.Target < pb.Compare_VERSION || c.Target > pb.Compare_LEASE || c.Result < pb.Compare_EQUAL || c.Result > pb.Compare_NOT_EQUAL {
			return status.Error(codes.InvalidArgument, "etcdserver: invalid compare")
		}
	}
	for _, branch := range [][]*pb.RequestOp{r.Success, r.Failure} {
		for _, op := range branch {
			if err := checkOp(op, maxOps-ops); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkOp(op *pb.RequestOp, maxOps int) error {
	switch r := op.GetRequest().(type) {
	case *pb.RequestOp_RequestRange:
		return CheckRange(r.RequestRange)
	case *pb.RequestOp_RequestPut:
		return CheckPut(r.RequestPut)
	case *pb.RequestOp_RequestDeleteRange:
		return CheckDelete(r.RequestDeleteRange)
	case *pb.RequestOp_RequestTxn:
		return checkTxn(r.RequestTxn, maxOps)
	}
	return rpctypes.ErrGRPCKeyNotFound // etcd's error for an unknown operation
}

// deletion is a range of keys that is deleted: [begin, end), or all keys from begin on if open is set.
type deletion struct {
	begin, end []byte
	open       bool
}

// changedKeys returns the keys that the operations may put and the ranges that they may delete. It returns
// ErrGRPCDuplicateKey if a key is put twice, or both put and deleted. The two branches of a nested transaction do not
// conflict with each other, because only one of them is executed. As in etcd, a nested transaction may delete keys that
// an earlier nested transaction puts.
func changedKeys(ops []*pb.RequestOp) (puts map[string]struct{}, deletes []deletion, err error) {
	puts = map[string]struct{}{}
	for _, op := range ops {
		if r := op.GetRequestDeleteRange(); r != nil {
			deletes = append(deletes, newDeletion(r))
		}
	}
	deletes = mergeDeletions(deletes)
	for _, op := range ops {
		r := op.GetRequestTxn()
		if r == nil {
			continue
		}
		thenPuts, thenDeletes, err := changedKeys(r.Success)
		if err != nil {
			return nil, nil, err
		}
		elsePuts, elseDeletes, err := changedKeys(r.Failure)
		if err != nil {
			return nil, nil, err
		}
		for key := range elsePuts {
			thenPuts[key] = struct{}{}
		}
		if err := addPuts(puts, thenPuts, deletes); err != nil {
			return nil, nil, err
		}
		deletes = mergeDeletions(slices.Concat(deletes, thenDeletes, elseDeletes))
	}
	for _, op := range ops {
		if r := op.GetRequestPut(); r != nil {
			if err := addPuts(puts, map[string]struct{}{string(r.Key): {}}, deletes); err != nil {
				return nil, nil, err
			}
		}
	}
	return puts, deletes, nil
}

// addPuts adds the keys of the set more to the set puts. It returns ErrGRPCDuplicateKey if one of these keys is in puts
// already, or in a range of deletes.
func addPuts(puts, more map[string]struct{}, deletes []deletion) error {
	for key := range more {
		if _, duplicate := puts[key]; duplicate || covers(deletes, key) {
			return rpctypes.ErrGRPCDuplicateKey
		}
		puts[key] = struct{}{}
	}
	return nil
}

func newDeletion(r *pb.DeleteRangeRequest) deletion {
	switch {
	case len(r.RangeEnd) == 0:
		return deletion{begin: r.Key, end: append(bytes.Clone(r.Key), 0)}
	case len(r.RangeEnd) == 1 && r.RangeEnd[0] == 0:
		return deletion{begin: r.Key, open: true}
	}
	return deletion{begin: r.Key, end: r.RangeEnd}
}

// mergeDeletions sorts deletions, merges those that overlap, and removes empty ones.
func mergeDeletions(all []deletion) []deletion {
	all = slices.DeleteFunc(all, func(d deletion) bool { return !d.open && bytes.Compare(d.begin, d.end) >= 0 })
	slices.SortFunc(all, func(a, b deletion) int { return bytes.Compare(a.begin, b.begin) })
	var out []deletion
	for _, d := range all {
		last := len(out) - 1
		switch {
		case last >= 0 && out[last].open:
		case last < 0 || bytes.Compare(out[last].end, d.begin) < 0:
			out = append(out, d)
		case d.open:
			out[last].open = true
		case bytes.Compare(out[last].end, d.end) < 0:
			out[last].end = d.end
		}
	}
	return out
}

// covers reports whether a key is in one of the deletions, which must be sorted and merged.
func covers(deletes []deletion, key string) bool {
	at, exact := slices.BinarySearchFunc(deletes, key, func(d deletion, key string) int { return bytes.Compare(d.begin, []byte(key)) })
	if exact {
		return true
	}
	return at > 0 && (deletes[at-1].open || bytes.Compare([]byte(key), deletes[at-1].end) < 0)
}

// ReadOnly reports whether a transaction has only range operations, so that it needs no proposal.
func ReadOnly(r *pb.TxnRequest) bool {
	for _, branch := range [][]*pb.RequestOp{r.Success, r.Failure} {
		for _, op := range branch {
			if op.GetRequestRange() == nil {
				return false
			}
		}
	}
	return true
}

// Serializable reports whether all range operations of a read-only transaction are serializable. It returns false for a
// transaction without operations.
func Serializable(r *pb.TxnRequest) bool {
	for _, branch := range [][]*pb.RequestOp{r.Success, r.Failure} {
		for _, op := range branch {
			if !op.GetRequestRange().GetSerializable() {
				return false
			}
		}
	}
	return len(r.Success)+len(r.Failure) > 0
}

// etcd's estimates of the storage overhead of each key and each lease, in bytes.
const (
	keyCost   = 256
	LeaseCost = 64
)

// PutCost returns the maximum number of bytes that a put may add to the size of the store.
func PutCost(r *pb.PutRequest) int64 { return keyCost + int64(len(r.Key)) + int64(len(r.Value)) }

// TxnCost returns the maximum number of bytes that a transaction may add to the size of the store: the cost of the puts
// in the more expensive branch.
func TxnCost(r *pb.TxnRequest) int64 { return max(opsCost(r.Success), opsCost(r.Failure)) }

func opsCost(ops []*pb.RequestOp) (sum int64) {
	for _, op := range ops {
		if r := op.GetRequestPut(); r != nil {
			sum += PutCost(r)
		} else if r := op.GetRequestTxn(); r != nil {
			sum += TxnCost(r)
		}
	}
	return sum
}
