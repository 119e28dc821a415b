package kv

import (
	"bytes"
	"cmp"
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/translate"
)

// snapshot returns a snapshot of the local engine. If serializable is set, the snapshot contains what this member has
// executed so far. Otherwise it includes everything acknowledged before the call.
func (s *Service) snapshot(ctx context.Context, serializable bool) (*mvcc.Snapshot, error) {
	if !serializable {
		if err := s.opts.Consensus.ReadIndex(ctx); err != nil {
			return nil, clientError(ctx, err)
		}
	}
	return s.opts.Engine.Snapshot(), nil
}

// Range returns the keys of a range, as of r.Revision or the current revision.
func (s *Service) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if err := translate.CheckRange(r); err != nil {
		return nil, err
	}
	snap, err := s.snapshot(ctx, r.Serializable)
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	if err := s.permitRead(ctx, snap, func(p *policy, user string) error { return p.users.CanRange(user, r.Key, r.RangeEnd) }); err != nil {
		return nil, clientError(ctx, err)
	}
	out, err := readRange(snap, r)
	if err != nil {
		return nil, clientError(ctx, err)
	}
	out.Header = s.header(snap.Revision())
	return out, nil
}

func readRange(snap *mvcc.Snapshot, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if len(r.RangeEnd) == 0 && r.Revision <= 0 && !r.KeysOnly {
		// For one key at the snapshot's revision, Get is faster than Range, because it uses the engine's bloom filters.
		kv, ok, err := snap.Get(r.Key)
		if err != nil {
			return nil, err
		}
		found := mvcc.RangeResult{}
		if ok {
			found.Count = 1
			if !r.CountOnly {
				found.KVs = []mvcc.KV{kv}
			}
		}
		return translate.RangeResponse(r, &found), nil
	}
	o := translate.RangeOptions(r)
	o.MaxBytes = maxResponseBytes
	found, err := snap.Range(o)
	switch {
	case err != nil:
		return nil, err
	case found.More && (o.Limit == 0 || len(found.KVs) < o.Limit):
		return nil, errResponseTooLarge
	}
	return translate.RangeResponse(r, &found), nil
}

// maxResponseBytes is the maximum size of a response, in bytes. A response is built in memory, and a gRPC message can
// have at most 2 GiB.
const maxResponseBytes = 1 << 30

var errResponseTooLarge = status.Error(codes.ResourceExhausted, "etcdserver: the response is too large: set a limit, or use RangeStream")

// streamBytes is the approximate size of the keys and values in one message of a streamed range.
const streamBytes = 1 << 20

// RangeStream reads keys as of one revision, and sends them in several messages. Only the last message has Header,
// Count and More.
func (s *Service) RangeStream(ctx context.Context, r *pb.RangeRequest, send func(*pb.RangeResponse) error) error {
	if err := translate.CheckRangeStream(r); err != nil {
		return err
	}
	snap, err := s.snapshot(ctx, r.Serializable)
	if err != nil {
		return err
	}
	defer snap.Close()
	if err := s.permitRead(ctx, snap, func(p *policy, user string) error { return p.users.CanRange(user, r.Key, r.RangeEnd) }); err != nil {
		return clientError(ctx, err)
	}
	if !translate.EngineSorts(r) && !r.CountOnly {
		return s.streamSorted(ctx, snap, r, send)
	}
	o := translate.RangeOptions(r)
	o.WantCount, o.MaxBytes = false, streamBytes
	total, limit := int64(0), o.Limit
	for {
		if err := ctx.Err(); err != nil {
			return clientError(ctx, err)
		}
		found, err := snap.Range(o)
		if err != nil {
			return clientError(ctx, err)
		}
		total += found.Count
		out := &pb.RangeResponse{Kvs: translate.KeyValues(found.KVs)}
		limited := limit > 0 && int(total) >= limit
		if found.More && !limited {
			if err := send(out); err != nil {
				return err
			}
			o.Key = append(bytes.Clone(found.KVs[len(found.KVs)-1].Key), 0)
			if limit > 0 {
				o.Limit = limit - int(total)
			}
			continue
		}
		out.Header, out.Count, out.More = s.header(snap.Revision()), total, found.More
		if found.More {
			after := append(bytes.Clone(found.KVs[len(found.KVs)-1].Key), 0)
			rest, err := snap.Range(mvcc.RangeOptions{Key: after, End: o.End, Revision: o.Revision, CountOnly: true})
			if err != nil {
				return clientError(ctx, err)
			}
			out.Count += rest.Count
		}
		return send(out)
	}
}

// streamSorted implements RangeStream for sort orders other than ascending by key. All keys must be in memory at once
// to be sorted, as in Range.
func (s *Service) streamSorted(ctx context.Context, snap *mvcc.Snapshot, r *pb.RangeRequest, send func(*pb.RangeResponse) error) error {
	all, err := readRange(snap, r)
	if err != nil {
		return clientError(ctx, err)
	}
	for kvs := all.Kvs; ; {
		n, size := 0, 0
		for n < len(kvs) && size < streamBytes {
			size += len(kvs[n].Key) + len(kvs[n].Value)
			n++
		}
		if n == len(kvs) {
			all.Header, all.Kvs = s.header(snap.Revision()), kvs
			return send(all)
		}
		if err := ctx.Err(); err != nil {
			return clientError(ctx, err)
		}
		if err := send(&pb.RangeResponse{Kvs: kvs[:n]}); err != nil {
			return err
		}
		kvs = kvs[n:]
	}
}

// readTxn executes a read-only transaction on a snapshot.
func (s *Service) readTxn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	snap, err := s.snapshot(ctx, translate.Serializable(r))
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	if err := s.permitRead(ctx, snap, func(p *policy, user string) error { return p.users.CanTxn(user, r, s.leaseKeys) }); err != nil {
		return nil, clientError(ctx, err)
	}
	out := &pb.TxnResponse{Header: s.header(snap.Revision()), Succeeded: true}
	for _, c := range translate.Compares(r.Compare) {
		met, err := compare(snap, &c)
		if err != nil {
			return nil, clientError(ctx, err)
		}
		if !met {
			out.Succeeded = false
			break
		}
	}
	ops := r.Failure
	if out.Succeeded {
		ops = r.Success
	}
	for _, op := range ops {
		found, err := readRange(snap, op.GetRequestRange())
		if err != nil {
			return nil, clientError(ctx, err)
		}
		found.Header = &pb.ResponseHeader{Revision: snap.Revision()}
		out.Responses = append(out.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: found}})
	}
	return out, nil
}

// compare evaluates one condition of a transaction on a snapshot. The result is the same as when the engine evaluates
// that condition in a program.
func compare(snap *mvcc.Snapshot, c *command.Compare) (bool, error) {
	found, err := snap.Range(mvcc.RangeOptions{Key: c.Key, End: c.End, KeysOnly: c.Target != command.CompareValue})
	if err != nil {
		return false, err
	}
	if len(found.KVs) == 0 {
		return c.Target != command.CompareValue && matches(c, &mvcc.KV{}), nil
	}
	for i := range found.KVs {
		if !matches(c, &found.KVs[i]) {
			return false, nil
		}
	}
	return true, nil
}

func matches(c *command.Compare, kv *mvcc.KV) bool {
	var order int
	switch c.Target {
	case command.CompareVersion:
		order = cmp.Compare(kv.Version, c.Number)
	case command.CompareCreate:
		order = cmp.Compare(kv.CreateRevision, c.Number)
	case command.CompareMod:
		order = cmp.Compare(kv.ModRevision, c.Number)
	case command.CompareLease:
		order = cmp.Compare(kv.Lease, c.Number)
	case command.CompareValue:
		order = bytes.Compare(kv.Value, c.Value)
	}
	switch c.Relation {
	case command.CompareEqual:
		return order == 0
	case command.CompareGreater:
		return order > 0
	case command.CompareLess:
		return order < 0
	}
	return order != 0
}
