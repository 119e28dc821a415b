package export

import (
	"fmt"

	"go.etcd.io/etcd/tests/v3/robustness/model"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// translate converts the steps of a command to a request of the model. It returns nil for steps that the model does not
// have, for example changes of records, which are values that no read and no watch returns.
func translate(steps []command.Step) (*model.EtcdRequest, error) {
	if len(steps) == 1 {
		switch s := steps[0]; s.Kind {
		case command.StepGrant:
			return &model.EtcdRequest{Type: model.LeaseGrant, LeaseGrant: &model.LeaseGrantRequest{LeaseID: s.Lease}}, nil
		case command.StepRevoke:
			return &model.EtcdRequest{Type: model.LeaseRevoke, LeaseRevoke: &model.LeaseRevokeRequest{LeaseID: s.Lease}}, nil
		case command.StepSetRecord, command.StepDeleteRecord:
			return nil, nil
		case command.StepBranch:
			return branch(s)
		}
	}
	ops, err := operations(steps)
	if err != nil {
		return nil, err
	}
	return &model.EtcdRequest{Type: model.Txn, Txn: &model.TxnRequest{OperationsOnSuccess: ops}}, nil
}

func branch(s command.Step) (*model.EtcdRequest, error) {
	txn := model.TxnRequest{Conditions: []model.EtcdCondition{}}
	for _, c := range s.If {
		condition := model.EtcdCondition{Key: string(c.Key)}
		switch {
		case c.Relation == command.CompareEqual && len(c.End) == 0 && c.Target == command.CompareVersion:
			condition.ExpectedVersion = c.Number
		case c.Relation == command.CompareEqual && len(c.End) == 0 && c.Target == command.CompareMod:
			condition.ExpectedRevision = c.Number
		default:
			return nil, fmt.Errorf("the model does not support the comparison %+v", c)
		}
		txn.Conditions = append(txn.Conditions, condition)
	}
	var err error
	if txn.OperationsOnSuccess, err = operations(s.Then); err != nil {
		return nil, err
	}
	if txn.OperationsOnFailure, err = operations(s.Else); err != nil {
		return nil, err
	}
	return &model.EtcdRequest{Type: model.Txn, Txn: &txn}, nil
}

func operations(steps []command.Step) ([]model.EtcdOperation, error) {
	ops := []model.EtcdOperation{}
	for _, s := range steps {
		switch s.Kind {
		case command.StepRange:
			ops = append(ops, model.EtcdOperation{Type: model.RangeOperation, Range: model.RangeOptions{
				Start: string(s.Key), End: string(s.End), Limit: int64(s.Range.Limit), KeysOnly: s.Range.KeysOnly,
			}})
		case command.StepPut:
			ops = append(ops, model.EtcdOperation{Type: model.PutOperation, Put: model.PutOptions{
				Key: string(s.Key), Value: model.ToValueOrHash(string(s.Value)), LeaseID: s.Lease,
			}})
		case command.StepDelete:
			if len(s.End) > 0 {
				return nil, fmt.Errorf("the model does not support deleting a range, from %q", s.Key)
			}
			ops = append(ops, model.EtcdOperation{Type: model.DeleteOperation, Delete: model.DeleteOptions{Key: string(s.Key)}})
		default:
			return nil, fmt.Errorf("the model does not support a step of kind %d in a transaction", s.Kind)
		}
	}
	return ops, nil
}
