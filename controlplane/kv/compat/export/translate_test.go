package export

import (
	"testing"

	"github.com/stretchr/testify/require"

	"go.etcd.io/etcd/tests/v3/robustness/model"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// TestTranslate checks which request of the model each kind of program becomes.
func TestTranslate(t *testing.T) {
	put := command.Step{Kind: command.StepPut, Key: []byte("k"), Value: []byte("v")}
	putOp := model.EtcdOperation{Type: model.PutOperation, Put: model.PutOptions{Key: "k", Value: model.ToValueOrHash("v")}}
	for name, c := range map[string]struct {
		steps []command.Step
		want  *model.EtcdRequest
	}{
		"put": {
			[]command.Step{put},
			&model.EtcdRequest{Type: model.Txn, Txn: &model.TxnRequest{OperationsOnSuccess: []model.EtcdOperation{putOp}}},
		},
		"grant": {
			[]command.Step{{Kind: command.StepGrant, Lease: 7, TTL: 9}},
			&model.EtcdRequest{Type: model.LeaseGrant, LeaseGrant: &model.LeaseGrantRequest{LeaseID: 7}},
		},
		"revoke": {
			[]command.Step{{Kind: command.StepRevoke, Lease: 7}},
			&model.EtcdRequest{Type: model.LeaseRevoke, LeaseRevoke: &model.LeaseRevokeRequest{LeaseID: 7}},
		},
		"record": {[]command.Step{{Kind: command.StepSetRecord, Key: []byte("alarm")}}, nil},
		"transaction": {
			[]command.Step{{
				Kind: command.StepBranch,
				If:   []command.Compare{{Key: []byte("k"), Target: command.CompareMod, Number: 5}, {Key: []byte("l"), Number: 2}},
				Then: []command.Step{put, {Kind: command.StepDelete, Key: []byte("d")}},
				Else: []command.Step{{Kind: command.StepRange, Key: []byte("a"), End: []byte("b"), Range: command.RangeOptions{Limit: 3, KeysOnly: true}}},
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

// TestTranslateRefuses checks that a program that the model does not support is an error, and is not skipped.
func TestTranslateRefuses(t *testing.T) {
	for name, steps := range map[string][]command.Step{
		"range":   {{Kind: command.StepDelete, Key: []byte("a"), End: []byte("b")}},
		"greater": {{Kind: command.StepBranch, If: []command.Compare{{Key: []byte("k"), Relation: command.CompareGreater}}}},
		"nested":  {{Kind: command.StepBranch, Then: []command.Step{{Kind: command.StepBranch}}}},
	} {
		_, err := translate(steps)
		require.Error(t, err, name)
	}
}
