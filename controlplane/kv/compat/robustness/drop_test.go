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

// Only what failed and cannot have happened is left out.
func TestDropFailedWithoutEffect(t *testing.T) {
	var ops []porcupine.Operation
	did := func(r model.EtcdRequest, failed string) {
		ops = append(ops, porcupine.Operation{Input: r, Output: model.MaybeEtcdResponse{Error: failed}, Call: int64(len(ops))})
	}
	did(revoke(1), "")                                                                             // 0: happened
	did(revoke(1), "timeout")                                                                      // 1: the log has it once
	did(revoke(2), "timeout")                                                                      // 2: the log has it: it happened, nobody knows when
	did(revoke(3), "timeout")                                                                      // 3: it is not in the log
	did(remove("a"), "")                                                                           // 4
	did(remove("a"), "lost")                                                                       // 5: one of the two happened
	did(remove("a"), "lost")                                                                       // 6
	did(remove("b"), "lost")                                                                       // 7: it is not in the log
	did(model.EtcdRequest{Type: model.LeaseGrant, LeaseGrant: &model.LeaseGrantRequest{}}, "lost") // 8: nobody has its id
	did(model.EtcdRequest{Type: model.Compact, Compact: &model.CompactRequest{}}, "lost")          // 9: not for us to say
	out := dropFailedWithoutEffect([]report.ClientReport{{KeyValue: ops}}, []model.EtcdRequest{revoke(1), revoke(2), remove("a"), remove("a")})
	var left []int64
	for _, op := range out[0].KeyValue {
		left = append(left, op.Call)
	}
	require.Equal(t, []int64{0, 2, 4, 5, 6, 9}, left)
}
