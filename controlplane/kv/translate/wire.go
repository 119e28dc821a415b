// Package translate converts etcd's requests to programs of the engine, and the engine's results to etcd's responses.
//
// All functions are free of side effects and use the messages of etcdserverpb: they validate a request (with etcd's
// errors), estimate its cost, and build its program and its response. The package must not depend on who the caller is,
// whether the caller is authorized, who proposes or when: it uses no engine, no consensus and no clock.
//
// A transaction with an unknown compare target or relation is refused; etcd accepts it, with an arbitrary meaning.
package translate

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// KeyValue converts a key with its value to etcd's type. Their bytes are shared, not copied.
func KeyValue(kv *command.KV) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{
		Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version, Lease: kv.Lease,
	}
}

// KeyValues converts keys with their values to etcd's type. Their bytes are shared, not copied.
func KeyValues(kvs []command.KV) []*mvccpb.KeyValue {
	if len(kvs) == 0 {
		return nil
	}
	all := make([]mvccpb.KeyValue, len(kvs))
	out := make([]*mvccpb.KeyValue, len(kvs))
	for i := range kvs {
		kv := &kvs[i]
		v := &all[i]
		v.Key, v.Value, v.Lease = kv.Key, kv.Value, kv.Lease
		v.CreateRevision, v.ModRevision, v.Version = kv.CreateRevision, kv.ModRevision, kv.Version
		out[i] = v
	}
	return out
}

// PutProgram returns the engine's program for a put request.
func PutProgram(r *pb.PutRequest) []command.Step { return []command.Step{putStep(r)} }

func putStep(r *pb.PutRequest) command.Step {
	return command.Step{
		Kind: command.StepPut, Key: r.Key, Value: r.Value, Lease: r.Lease,
		PrevKV: r.PrevKv, IgnoreValue: r.IgnoreValue, IgnoreLease: r.IgnoreLease,
	}
}

// DeleteProgram returns the engine's program for a delete request.
func DeleteProgram(r *pb.DeleteRangeRequest) []command.Step { return []command.Step{deleteStep(r)} }

func deleteStep(r *pb.DeleteRangeRequest) command.Step {
	return command.Step{Kind: command.StepDelete, Key: r.Key, End: r.RangeEnd, PrevKV: r.PrevKv}
}

// TxnProgram returns the engine's program for a transaction.
func TxnProgram(r *pb.TxnRequest) []command.Step { return []command.Step{branchStep(r)} }

func branchStep(r *pb.TxnRequest) command.Step {
	return command.Step{Kind: command.StepBranch, If: Compares(r.Compare), Then: steps(r.Success), Else: steps(r.Failure)}
}

func steps(ops []*pb.RequestOp) []command.Step {
	if len(ops) == 0 {
		return nil
	}
	out := make([]command.Step, len(ops))
	for i, op := range ops {
		switch r := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			o := RangeOptions(r.RequestRange)
			out[i] = command.Step{Kind: command.StepRange, Key: o.Key, End: o.End, Range: o}
		case *pb.RequestOp_RequestPut:
			out[i] = putStep(r.RequestPut)
		case *pb.RequestOp_RequestDeleteRange:
			out[i] = deleteStep(r.RequestDeleteRange)
		case *pb.RequestOp_RequestTxn:
			out[i] = branchStep(r.RequestTxn)
		}
	}
	return out
}

// Compares converts the conditions of a transaction to the engine's type.
func Compares(all []*pb.Compare) []command.Compare {
	if len(all) == 0 {
		return nil
	}
	out := make([]command.Compare, len(all))
	for i, c := range all {
		m := command.Compare{Key: c.Key, End: c.RangeEnd, Relation: relations[c.Result]}
		switch c.Target {
		case pb.Compare_VERSION:
			m.Target, m.Number = command.CompareVersion, c.GetVersion()
		case pb.Compare_CREATE:
			m.Target, m.Number = command.CompareCreate, c.GetCreateRevision()
		case pb.Compare_MOD:
			m.Target, m.Number = command.CompareMod, c.GetModRevision()
		case pb.Compare_VALUE:
			m.Target, m.Value = command.CompareValue, c.GetValue()
		case pb.Compare_LEASE:
			m.Target, m.Number = command.CompareLease, c.GetLease()
		}
		out[i] = m
	}
	return out
}

var relations = map[pb.Compare_CompareResult]command.CompareRelation{
	pb.Compare_EQUAL: command.CompareEqual, pb.Compare_GREATER: command.CompareGreater, pb.Compare_LESS: command.CompareLess,
	pb.Compare_NOT_EQUAL: command.CompareNotEqual,
}

// PutResponse returns the response to a put, without its header. The parameter found is the result of the put's step.
func PutResponse(found *command.StepResult) *pb.PutResponse {
	out := &pb.PutResponse{}
	if len(found.Range.KVs) > 0 {
		out.PrevKv = KeyValue(&found.Range.KVs[0])
	}
	return out
}

// DeleteResponse returns the response to a delete, without its header. The parameter found is the result of the
// delete's step.
func DeleteResponse(found *command.StepResult) *pb.DeleteRangeResponse {
	return &pb.DeleteRangeResponse{Deleted: found.Count, PrevKvs: KeyValues(found.Range.KVs)}
}

// TxnResponse returns the response to a transaction, without its header; the responses to its operations have headers.
// The parameter revision is the revision that the transaction created, or the current revision if the transaction wrote
// nothing.
func TxnResponse(r *pb.TxnRequest, found *command.StepResult, revision int64) *pb.TxnResponse {
	revisionBefore := revision
	if writes(found.Steps) {
		revisionBefore--
	}
	a := responseBuilder{revision: revisionBefore, next: revision}
	return a.txn(r, found)
}

// writes reports whether any of the steps changed a key.
func writes(found []command.StepResult) bool {
	for i := range found {
		f := &found[i]
		if f.Kind == command.StepPut || f.Kind == command.StepDelete && f.Count > 0 || f.Kind == command.StepBranch && writes(f.Steps) {
			return true
		}
	}
	return false
}

// responseBuilder builds the responses to the operations of a transaction. The header of each response has the revision
// that was visible to that operation.
type responseBuilder struct {
	revision int64 // revision that is visible to the current step
	next     int64 // revision that is visible after the first write
}

func (a *responseBuilder) txn(r *pb.TxnRequest, found *command.StepResult) *pb.TxnResponse {
	ops := r.Failure
	if found.Succeeded {
		ops = r.Success
	}
	out := &pb.TxnResponse{Succeeded: found.Succeeded, Responses: make([]*pb.ResponseOp, len(ops))}
	for i := range ops {
		out.Responses[i] = a.op(ops[i], &found.Steps[i])
	}
	return out
}

func (a *responseBuilder) op(op *pb.RequestOp, found *command.StepResult) *pb.ResponseOp {
	switch r := op.Request.(type) {
	case *pb.RequestOp_RequestRange:
		m := RangeResponse(r.RequestRange, &found.Range)
		m.Header = a.header()
		return &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: m}}
	case *pb.RequestOp_RequestPut:
		a.revision = a.next
		m := PutResponse(found)
		m.Header = a.header()
		return &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{ResponsePut: m}}
	case *pb.RequestOp_RequestDeleteRange:
		if found.Count > 0 {
			a.revision = a.next
		}
		m := DeleteResponse(found)
		m.Header = a.header()
		return &pb.ResponseOp{Response: &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: m}}
	case *pb.RequestOp_RequestTxn:
		m := a.txn(r.RequestTxn, found)
		m.Header = a.header()
		return &pb.ResponseOp{Response: &pb.ResponseOp_ResponseTxn{ResponseTxn: m}}
	}
	return &pb.ResponseOp{}
}

func (a *responseBuilder) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{Revision: a.revision}
}
