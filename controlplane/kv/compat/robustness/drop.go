package robustness

import (
	"github.com/anishathalye/porcupine"

	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
)

// dropFailedWithoutEffect removes the failed requests that, according to the log, took no effect. Otherwise the model
// must consider each of them at every later moment, which makes the search for an order take too long. etcd's own suite
// removes such writes of unique values; dropFailedWithoutEffect does so for deletes and leases: if the log has a
// request as often as clients saw it succeed, the failed ones of the same kind are not in the log. A lease whose grant
// had no response is never used.
func dropFailedWithoutEffect(reports []report.ClientReport, persisted []model.EtcdRequest) []report.ClientReport {
	unmatched := map[requestKind]int{}
	for _, r := range persisted {
		if id, ok := kindOf(r); ok {
			unmatched[id]++
		}
	}
	for _, one := range reports {
		for _, op := range one.KeyValue {
			if id, ok := kindOf(op.Input.(model.EtcdRequest)); ok && op.Output.(model.MaybeEtcdResponse).Error == "" {
				unmatched[id]--
			}
		}
	}
	out := make([]report.ClientReport, len(reports))
	for i, one := range reports {
		out[i] = one
		out[i].KeyValue = nil
		for _, op := range one.KeyValue {
			if !hadNoEffect(op, unmatched) {
				out[i].KeyValue = append(out[i].KeyValue, op)
			}
		}
	}
	return out
}

// hadNoEffect reports whether an operation failed and took no visible effect.
func hadNoEffect(op porcupine.Operation, unmatched map[requestKind]int) bool {
	request := op.Input.(model.EtcdRequest)
	if op.Output.(model.MaybeEtcdResponse).Error == "" {
		return false
	}
	if request.Type == model.LeaseGrant {
		return true
	}
	id, ok := kindOf(request)
	return ok && unmatched[id] == 0
}

// requestKind identifies requests that have the same effect: a revocation by its lease, a delete by its key.
type requestKind struct {
	revokedLease int64
	deletedKey   string
}

// kindOf returns the requestKind of a revocation or a plain delete, and false for other requests.
func kindOf(r model.EtcdRequest) (requestKind, bool) {
	switch r.Type {
	case model.LeaseRevoke:
		return requestKind{revokedLease: r.LeaseRevoke.LeaseID}, true
	case model.Txn:
		ops := r.Txn.OperationsOnSuccess
		if len(r.Txn.Conditions) == 0 && len(r.Txn.OperationsOnFailure) == 0 && len(ops) == 1 && ops[0].Type == model.DeleteOperation {
			return requestKind{deletedKey: ops[0].Delete.Key}, true
		}
	}
	return requestKind{}, false
}
