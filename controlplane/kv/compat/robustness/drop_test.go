package robustness

import (
	"testing"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
)

func revoke(id int64) model.EtcdRequest {
	return model.EtcdRequest{Type: model.LeaseRevoke, LeaseRevoke: &model.LeaseRevokeRequest{LeaseID: id}}
}

func remove(key string) model.EtcdRequest {
	return model.EtcdRequest{Type: model.Txn, Txn: &model.TxnRequest{OperationsOnSuccess: []model.EtcdOperation{
		{Type: model.DeleteOperation, Delete: model.DeleteOptions{Key: key}},
	}}}
}

// TestDropFailedWithoutEffect checks that only failed requests that cannot have taken effect are dropped.
func TestDropFailedWithoutEffect(t *testing.T) {
	var ops []porcupine.Operation
	add := func(r model.EtcdRequest, failed string) {
		ops = append(ops, porcupine.Operation{Input: r, Output: model.MaybeEtcdResponse{Error: failed}, Call: int64(len(ops))})
	}
	add(revoke(1), "")                                                                             // 0: succeeded
	add(revoke(1), "timeout")                                                                      // 1: the log has it once, as operation 0
	add(revoke(2), "timeout")                                                                      // 2: the log has it, so it took effect at an unknown time
	add(revoke(3), "timeout")                                                                      // 3: not in the log
	add(remove("a"), "")                                                                           // 4: succeeded
	add(remove("a"), "lost")                                                                       // 5: the log has either 5 or 6
	add(remove("a"), "lost")                                                                       // 6: the log has either 5 or 6
	add(remove("b"), "lost")                                                                       // 7: not in the log
	add(model.EtcdRequest{Type: model.LeaseGrant, LeaseGrant: &model.LeaseGrantRequest{}}, "lost") // 8: no client knows the lease's ID
	add(model.EtcdRequest{Type: model.Compact, Compact: &model.CompactRequest{}}, "lost")          // 9: compactions are never dropped
	out := dropFailedWithoutEffect([]report.ClientReport{{KeyValue: ops}}, []model.EtcdRequest{revoke(1), revoke(2), remove("a"), remove("a")})
	var left []int64
	for _, op := range out[0].KeyValue {
		left = append(left, op.Call)
	}
	require.Equal(t, []int64{0, 2, 4, 5, 6, 9}, left)
}
