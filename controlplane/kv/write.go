package kv

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/translate"
)

// write runs the permission check c and proposes a program. If records change between the check and the execution of
// the program, the engine refuses the program, and write repeats both. The parameter cost is the maximum number of
// bytes that the program may add to the keyspace.
func (s *Service) write(ctx context.Context, steps []command.Step, cost int64, c check) (command.Result, error) {
	p, err := s.currentPolicy()
	for err == nil {
		if err = s.authorizeWith(ctx, p, c); err == nil {
			err = p.writable(cost)
		}
		if err != nil {
			p, err = s.newerPolicy(ctx, p, err)
			continue
		}
		if cost > 0 && s.opts.Full != nil && s.opts.Full() {
			return command.Result{}, rpctypes.ErrGRPCNoSpace
		}
		if cost > 0 && !s.fits(cost) {
			return command.Result{}, s.raise(ctx, pb.AlarmType_NOSPACE, rpctypes.ErrGRPCNoSpace)
		}
		var r command.Result
		if r, err = s.propose(ctx, p.epoch, steps); err != nil {
			return r, err
		}
		if r.Refused != command.RefusedEpoch {
			return r, refusalError(&r)
		}
		p, err = s.localPolicy()
	}
	return command.Result{}, clientError(ctx, err)
}

// propose commits a program through the raft group, without retries. If epoch is not 0, the engine refuses the program
// when the epoch of the records is a different one.
func (s *Service) propose(ctx context.Context, epoch int64, steps []command.Step) (command.Result, error) {
	data, err := command.EncodeProgram(command.Program{Epoch: epoch, Steps: steps})
	if err != nil {
		return command.Result{}, clientError(ctx, err)
	}
	s.counters.pending.Add(1)
	r, err := s.opts.Consensus.Propose(ctx, data, command.ReadsRevision(steps))
	s.counters.pending.Add(-1)
	if err != nil {
		s.counters.failed.Add(1)
		return command.Result{}, clientError(ctx, err)
	}
	return r, nil
}

// writable returns an error if an active alarm forbids a write. The parameter cost is the maximum number of bytes that
// the write may add. The alarm NOSPACE forbids only writes that may add bytes.
func (p *policy) writable(cost int64) error {
	switch {
	case p.corrupt:
		return rpctypes.ErrGRPCCorrupt
	case p.noSpace && cost > 0:
		return rpctypes.ErrGRPCNoSpace
	}
	return nil
}

// fits reports whether the keyspace may grow by cost bytes without exceeding the quota.
func (s *Service) fits(cost int64) bool {
	return s.opts.Quota < 0 || s.opts.Engine.Size()+cost < s.opts.Quota
}

// Put stores a value under a key.
func (s *Service) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	if err := translate.CheckPut(r); err != nil {
		return nil, err
	}
	if len(r.Value) > s.opts.Limits.RequestBytes {
		return nil, rpctypes.ErrGRPCRequestTooLarge
	}
	found, err := s.write(ctx, translate.PutProgram(r), translate.PutCost(r), func(p *policy, user string) error {
		return p.users.CanPutRequest(user, r, s.leaseKeys)
	})
	if err != nil {
		return nil, err
	}
	out := translate.PutResponse(&found.Steps[0])
	out.Header = s.header(found.Revision)
	return out, nil
}

// DeleteRange deletes all keys of a range.
func (s *Service) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	if err := translate.CheckDelete(r); err != nil {
		return nil, err
	}
	found, err := s.write(ctx, translate.DeleteProgram(r), 0, func(p *policy, user string) error {
		return p.users.CanDeleteRequest(user, r)
	})
	if err != nil {
		return nil, err
	}
	out := translate.DeleteResponse(&found.Steps[0])
	out.Header = s.header(found.Revision)
	return out, nil
}

// Txn executes a transaction. A read-only transaction is served from a snapshot, without a proposal.
func (s *Service) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	if err := translate.CheckTxn(r, s.opts.Limits.TxnOps); err != nil {
		return nil, err
	}
	if translate.ReadOnly(r) {
		return s.readTxn(ctx, r)
	}
	if proto.Size(r) > s.opts.Limits.RequestBytes {
		return nil, rpctypes.ErrGRPCRequestTooLarge
	}
	found, err := s.write(ctx, translate.TxnProgram(r), translate.TxnCost(r), func(p *policy, user string) error {
		return p.users.CanTxn(user, r, s.leaseKeys)
	})
	if err != nil {
		return nil, err
	}
	out := translate.TxnResponse(r, &found.Steps[0], found.Revision)
	out.Header = s.header(found.Revision)
	return out, nil
}

// Compact discards history before r.Revision. If r.Physical is set, it returns only after this member has removed the
// data.
func (s *Service) Compact(ctx context.Context, r *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	if err := s.authorize(ctx, func(p *policy, user string) error { return p.users.CanAdmin(user) }); err != nil {
		return nil, clientError(ctx, err)
	}
	if err := s.compact(ctx, r.Revision); err != nil {
		return nil, err
	}
	if r.Physical {
		if err := s.opts.Engine.AwaitScrub(ctx, r.Revision); err != nil {
			return nil, clientError(ctx, err)
		}
	}
	return &pb.CompactionResponse{Header: s.Header()}, nil
}

func (s *Service) compact(ctx context.Context, revision int64) error {
	p, err := s.currentPolicy()
	if err != nil {
		return err
	}
	if p.corrupt {
		return rpctypes.ErrGRPCCorrupt
	}
	found, err := s.opts.Consensus.Propose(ctx, command.EncodeCompact(revision), false)
	if err != nil {
		s.counters.failed.Add(1)
		return clientError(ctx, err)
	}
	return refusalError(&found)
}

// leaseKeys returns the keys that are attached to a lease, according to this member's local data. It is used for
// permission checks.
func (s *Service) leaseKeys(id int64) ([][]byte, error) {
	snap := s.opts.Engine.Snapshot()
	defer snap.Close()
	return snap.LeaseKeys(id)
}
