package export

import (
	"testing"

	"github.com/stretchr/testify/require"

	"go.etcd.io/etcd/tests/v3/robustness/model"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

// What a program asks for is what the model does.
func TestTranslate(t *testing.T) {
	put := mvcc.Step{Kind: mvcc.StepPut, Key: []byte("k"), Value: []byte("v")}
	putOp := model.EtcdOperation{Type: model.PutOperation, Put: model.PutOptions{Key: "k", Value: model.ToValueOrHash("v")}}
	for name, c := range map[string]struct {
		steps []mvcc.Step
		want  *model.EtcdRequest
	}{
		"put": {
			[]mvcc.Step{put},
			&model.EtcdRequest{Type: model.Txn, Txn: &model.TxnRequest{OperationsOnSuccess: []model.EtcdOperation{putOp}}},
		},
		"grant": {
			[]mvcc.Step{{Kind: mvcc.StepGrant, Lease: 7, TTL: 9}},
			&model.EtcdRequest{Type: model.LeaseGrant, LeaseGrant: &model.LeaseGrantRequest{LeaseID: 7}},
		},
		"revoke": {
			[]mvcc.Step{{Kind: mvcc.StepRevoke, Lease: 7}},
			&model.EtcdRequest{Type: model.LeaseRevoke, LeaseRevoke: &model.LeaseRevokeRequest{LeaseID: 7}},
		},
		"record": {[]mvcc.Step{{Kind: mvcc.StepSetRecord, Key: []byte("alarm")}}, nil},
		"transaction": {
			[]mvcc.Step{{
				Kind: mvcc.StepBranch,
				If:   []mvcc.Compare{{Key: []byte("k"), Target: mvcc.CompareMod, Number: 5}, {Key: []byte("l"), Number: 2}},
				Then: []mvcc.Step{put, {Kind: mvcc.StepDelete, Key: []byte("d")}},
				Else: []mvcc.Step{{Kind: mvcc.StepRange, Key: []byte("a"), End: []byte("b"), Range: mvcc.RangeOptions{Limit: 3, KeysOnly: true}}},
			}},
			&model.EtcdRequest{Type: model.Txn, Txn: &model.TxnRequest{
				Conditions: []model.EtcdCondition{{Key: "k", ExpectedRevision: 5}, {Key: "l", ExpectedVersion: 2}},
				OperationsOnSuccess: []model.EtcdOperation{
					putOp, {Type: model.DeleteOperation, Delete: model.DeleteOptions{Key: "d"}},
				},
				OperationsOnFailure: []model.EtcdOperation{
					{Type: model.RangeOperation, Range: model.RangeOptions{Start: "a", End: "b", Limit: 3, KeysOnly: true}},
				},
			}},
		},
	} {
		got, err := translate(c.steps)
		require.NoError(t, err, name)
		require.Equal(t, c.want, got, name)
	}
}

// A request that the model cannot follow is an error, not a gap in the history.
func TestTranslateRefuses(t *testing.T) {
	for name, steps := range map[string][]mvcc.Step{
		"range":   {{Kind: mvcc.StepDelete, Key: []byte("a"), End: []byte("b")}},
		"greater": {{Kind: mvcc.StepBranch, If: []mvcc.Compare{{Key: []byte("k"), Relation: mvcc.CompareGreater}}}},
		"nested":  {{Kind: mvcc.StepBranch, Then: []mvcc.Step{{Kind: mvcc.StepBranch}}}},
	} {
		_, err := translate(steps)
		require.Error(t, err, name)
	}
}
