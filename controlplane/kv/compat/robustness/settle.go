package robustness

import (
	"github.com/anishathalye/porcupine"

	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
)

// settle removes the failed requests that, according to the log, took no effect. Otherwise the model must consider each
// of them at every later moment, which makes the search for an order take too long. etcd's own suite removes such
// writes of unique values; settle does so for deletes and leases: if the log has a request as often as clients saw it
// succeed, the failed ones of the same kind are not in the log. A lease whose grant had no response is never used.
func settle(reports []report.ClientReport, persisted []model.EtcdRequest) []report.ClientReport {
	unexplained := map[likeness]int{}
	for _, r := range persisted {
		if id, ok := identify(r); ok {
			unexplained[id]++
		}
	}
	for _, one := range reports {
		for _, op := range one.KeyValue {
			if id, ok := identify(op.Input.(model.EtcdRequest)); ok && op.Output.(model.MaybeEtcdResponse).Error == "" {
				unexplained[id]--
			}
		}
	}
	out := make([]report.ClientReport, len(reports))
	for i, one := range reports {
		out[i] = one
		out[i].KeyValue = nil
		for _, op := range one.KeyValue {
			if !vain(op, unexplained) {
				out[i].KeyValue = append(out[i].KeyValue, op)
			}
		}
	}
	return out
}

// vain reports whether an operation failed and took no visible effect.
func vain(op porcupine.Operation, unexplained map[likeness]int) bool {
	request := op.Input.(model.EtcdRequest)
	if op.Output.(model.MaybeEtcdResponse).Error == "" {
		return false
	}
	if request.Type == model.LeaseGrant {
		return true
	}
	id, ok := identify(request)
	return ok && unexplained[id] == 0
}

// likeness identifies requests that do the same: a revocation by its lease, a delete by its key.
type likeness struct {
	revoked int64
	deleted string
}

// identify returns the likeness of a revocation or a plain delete, and false for other requests.
func identify(r model.EtcdRequest) (likeness, bool) {
	switch r.Type {
	case model.LeaseRevoke:
		return likeness{revoked: r.LeaseRevoke.LeaseID}, true
	case model.Txn:
		ops := r.Txn.OperationsOnSuccess
		if len(r.Txn.Conditions) == 0 && len(r.Txn.OperationsOnFailure) == 0 && len(ops) == 1 && ops[0].Type == model.DeleteOperation {
			return likeness{deleted: ops[0].Delete.Key}, true
		}
	}
	return likeness{}, false
}
