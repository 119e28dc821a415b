package robustness

import (
	"github.com/anishathalye/porcupine"

	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
)

// dropFailedWithoutEffect removes failed requests that, according to the log, had no effect. With them, the model would
// have to consider at every later moment that each of them may still take effect, and its search for an order of the
// requests would take too long. etcd's own suite removes failed writes of unique values. This function removes failed
// deletes and lease revocations: if the log contains a request exactly as often as clients saw it succeed, then the log
// contains no failed request of the same kind. It also removes failed lease grants, because clients do not use a lease
// whose grant had no response.
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

// hadNoEffect reports whether an operation failed and had no visible effect. The map unmatched contains, for each kind
// of request, how many requests in the log are not explained by successful responses.
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

// requestKind identifies requests that have the same effect. Revocations have the same effect if they revoke the same
// lease, and deletes if they delete the same key.
type requestKind struct {
	revokedLease int64
	deletedKey   string
}

// kindOf returns the requestKind of a lease revocation, or of a delete without conditions. For other requests it
// returns false.
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
