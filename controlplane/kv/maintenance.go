package kv

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/api/v3/version"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
	"github.com/trivet-cloud/trivet/controlplane/kv/translate"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Alarm lists, raises or clears alarms, as r.Action requests.
func (s *Service) Alarm(ctx context.Context, r *pb.AlarmRequest) (*pb.AlarmResponse, error) {
	switch r.Action {
	case pb.AlarmRequest_GET:
		p, err := s.linearizablePolicy(ctx)
		if err != nil {
			return nil, err
		}
		if err := s.authorizeWith(ctx, p, mustBeAuthenticated); err != nil {
			return nil, clientError(ctx, err)
		}
		out := &pb.AlarmResponse{Header: s.Header()}
		for _, a := range p.alarms {
			if r.Alarm == pb.AlarmType_NONE || r.Alarm == a.Alarm {
				out.Alarms = append(out.Alarms, a)
			}
		}
		return out, nil
	case pb.AlarmRequest_ACTIVATE, pb.AlarmRequest_DEACTIVATE:
	default:
		return nil, status.Error(codes.InvalidArgument, "etcdserver: unknown alarm action")
	}
	if err := s.authorize(ctx, mustBeAdmin); err != nil {
		return nil, clientError(ctx, err)
	}
	changed, err := s.setAlarm(ctx, &pb.AlarmMember{MemberID: r.MemberID, Alarm: r.Alarm}, r.Action == pb.AlarmRequest_ACTIVATE)
	if err != nil {
		return nil, clientError(ctx, err)
	}
	out := &pb.AlarmResponse{Header: s.Header()}
	if changed != nil {
		out.Alarms = append(out.Alarms, changed)
	}
	return out, nil
}

// setAlarm raises the alarm a if on is true, and clears it otherwise. It returns a if the alarm is then raised, or was
// cleared by this call. It returns nil if there was no such alarm to clear, or if the alarm's type is unknown.
func (s *Service) setAlarm(ctx context.Context, a *pb.AlarmMember, on bool) (*pb.AlarmMember, error) {
	if a.Alarm != pb.AlarmType_NOSPACE && a.Alarm != pb.AlarmType_CORRUPT {
		return nil, nil
	}
	name, value, err := alarmRecord(a)
	if err != nil {
		return nil, err
	}
	step := command.Step{Kind: command.StepDeleteRecord, Key: name}
	if on {
		step = command.Step{Kind: command.StepSetRecord, Key: name, Value: value}
	}
	p, err := s.linearizablePolicy(ctx)
	for err == nil {
		active := slices.ContainsFunc(p.alarms, func(b *pb.AlarmMember) bool { return b.Alarm == a.Alarm && b.MemberID == a.MemberID })
		switch {
		case active && on:
			return a, nil
		case !active && !on:
			return nil, nil
		}
		var r command.Result
		if r, err = s.propose(ctx, p.epoch, []command.Step{step}); err != nil {
			break
		}
		if r.Refused != command.RefusedEpoch {
			if err = refusalError(&r); err == nil {
				s.opts.Log.Warn("alarm", "type", a.Alarm.String(), "member", a.MemberID, "active", on)
			}
			return a, err
		}
		p, err = s.localPolicy()
	}
	return nil, err
}

// raise raises an alarm for this member. If another call is raising an alarm at the same time, it does nothing. It
// always returns the parameter cause; a failure to raise the alarm is only logged.
func (s *Service) raise(ctx context.Context, kind pb.AlarmType, cause error) error {
	if !s.raiseMu.TryLock() {
		return cause
	}
	defer s.raiseMu.Unlock()
	if _, err := s.setAlarm(ctx, &pb.AlarmMember{MemberID: s.opts.Self, Alarm: kind}, true); err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("raise alarm", "type", kind.String(), "err", err)
	}
	return cause
}

// Alarms returns the active alarms of all members according to this member's local data; nil if the data cannot be
// read.
func (s *Service) Alarms() []*pb.AlarmMember {
	p, err := s.localPolicy()
	if err != nil {
		return nil
	}
	return p.alarms
}

// emptyBytes is the size that Status reports for an empty keyspace. It is not 0, because etcdctl divides by the size.
const emptyBytes = 16 << 10

// Status returns this member's version, raft state and size of the keyspace, and the active alarms.
func (s *Service) Status(ctx context.Context, _ *pb.StatusRequest) (*pb.StatusResponse, error) {
	if err := s.authorize(ctx, mustBeAuthenticated); err != nil {
		return nil, clientError(ctx, err)
	}
	g, err := s.opts.Consensus.Status(ctx)
	if err != nil {
		return nil, clientError(ctx, err)
	}
	out := &pb.StatusResponse{
		Header: s.Header(), Version: version.Version, StorageVersion: snapfile.StorageVersion,
		Leader: g.Leader, RaftIndex: g.Commit, RaftTerm: g.Term, RaftAppliedIndex: g.Applied,
		DbSize: emptyBytes + s.opts.Engine.Size(), DbSizeInUse: emptyBytes + s.opts.Engine.SizeInUse(), DbSizeQuota: max(s.opts.Quota, 0),
		IsLearner: s.IsLearner(), DowngradeInfo: &pb.DowngradeInfo{},
	}
	if out.Leader == 0 {
		out.Errors = append(out.Errors, "etcdserver: no leader")
	}
	for _, a := range s.Alarms() {
		out.Errors = append(out.Errors, a.String())
	}
	return out, nil
}

// Defragment releases the space that compactions have freed on this member, and returns when the space is released. No
// other request waits for it.
func (s *Service) Defragment(ctx context.Context, _ *pb.DefragmentRequest) (*pb.DefragmentResponse, error) {
	if err := s.authorize(ctx, mustBeAdmin); err != nil {
		return nil, clientError(ctx, err)
	}
	began := time.Now()
	s.counters.defragmenting.Add(1)
	err := s.opts.Engine.AwaitScrub(ctx, s.opts.Engine.CompactRevision())
	if err == nil {
		err = s.opts.Engine.Defragment(ctx)
	}
	s.counters.defragmenting.Add(-1)
	if err != nil {
		return nil, clientError(ctx, err)
	}
	s.counters.defragments.Observe(time.Since(began).Seconds())
	return &pb.DefragmentResponse{Header: s.Header()}, nil
}

// HashKV hashes the keyspace up to a revision. Members with the same history return the same hash.
func (s *Service) HashKV(ctx context.Context, r *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	if err := s.authorize(ctx, mustBeAdmin); err != nil {
		return nil, clientError(ctx, err)
	}
	h, err := s.hashKeys(ctx, max(r.Revision, 0))
	if err != nil {
		return nil, clientError(ctx, err)
	}
	const none = -1 // etcd's value if nothing was compacted
	return &pb.HashKVResponse{
		Header: s.header(h.Current), Hash: h.Hash, HashRevision: h.Revision, CompactRevision: cmp.Or(h.CompactRevision, none),
	}, nil
}

// Hash hashes this member's current keyspace.
func (s *Service) Hash(ctx context.Context, _ *pb.HashRequest) (*pb.HashResponse, error) {
	if err := s.authorize(ctx, mustBeAdmin); err != nil {
		return nil, clientError(ctx, err)
	}
	h, err := s.hashKeys(ctx, 0)
	if err != nil {
		return nil, clientError(ctx, err)
	}
	return &pb.HashResponse{Header: s.header(h.Current), Hash: h.Hash}, nil
}

// MoveLeader transfers leadership to another member. If this member is not the leader, it returns ErrGRPCNotLeader.
func (s *Service) MoveLeader(ctx context.Context, r *pb.MoveLeaderRequest) (*pb.MoveLeaderResponse, error) {
	if err := s.authorize(ctx, mustBeAdmin); err != nil {
		return nil, clientError(ctx, err)
	}
	if s.Leader() != s.opts.Self {
		return nil, rpctypes.ErrGRPCNotLeader
	}
	if s.opts.Transfer == nil {
		return nil, rpctypes.ErrGRPCBadLeaderTransferee
	}
	switch err := s.opts.Transfer(ctx, r.TargetID); {
	case err == nil:
	case fault.Is(err, fault.FailedPrecondition) && s.Leader() != 0 && !timedOut(err):
		return nil, rpctypes.ErrGRPCBadLeaderTransferee
	case fault.Is(err, fault.FailedPrecondition):
		return nil, rpctypes.ErrGRPCTimeout
	default:
		return nil, clientError(ctx, err)
	}
	return &pb.MoveLeaderResponse{Header: s.Header()}, nil
}

// timedOut reports whether a transfer of leadership failed because the target did not become the leader in time. It
// returns false for other errors, for example if the target must not lead.
func timedOut(err error) bool {
	f, ok := fault.From(err)
	return ok && f.Reason == "TRANSFER_FAILED"
}

// Snapshot writes the current keyspace to a file in dir, a directory for temporary files. The caller must close the
// returned file.
func (s *Service) Snapshot(ctx context.Context, dir string) (*snapfile.TempFile, error) {
	if err := s.authorize(ctx, mustBeAdmin); err != nil {
		return nil, clientError(ctx, err)
	}
	g, err := s.opts.Consensus.Status(ctx)
	if err != nil {
		return nil, clientError(ctx, err)
	}
	snap := s.opts.Engine.Snapshot()
	defer snap.Close()
	c, err := snapshotContents(snap)
	if err != nil {
		return nil, clientError(ctx, err)
	}
	c.Index, c.Term = g.Applied, g.Term
	if s.opts.Members != nil {
		if c.Members, err = s.opts.Members(ctx); err != nil {
			return nil, clientError(ctx, err)
		}
	}
	return snapfile.Create(ctx, dir, c)
}

// snapshotContents returns the contents of a snapshot file of snap. The keys are read from snap only while the file is
// written. The leases are those that exist now, so a lease of snap that has ended since is missing. The file then
// contains that lease with a TTL of 1 s.
func snapshotContents(snap *mvcc.Snapshot) (c snapfile.Contents, err error) {
	p, err := loadPolicy(snap)
	if err != nil {
		return c, err
	}
	c.Revision = snap.Revision()
	c.Auth = snapfile.Auth{Enabled: p.users.Enabled(), Revision: p.users.Revision(), Users: p.users.Users(), Roles: p.users.Roles()}
	leases, err := snap.Leases()
	if err != nil {
		return c, err
	}
	for _, l := range leases {
		c.Leases = append(c.Leases, snapfile.Lease{ID: l.ID, TTL: l.TTL})
	}
	c.Keys = func(yield func(*mvccpb.KeyValue, error) bool) {
		o := mvcc.RangeOptions{Key: []byte{0}, End: []byte{0}, MaxBytes: streamBytes}
		for {
			found, err := snap.Range(o)
			if err != nil {
				yield(nil, err)
				return
			}
			for i := range found.KVs {
				if !yield(translate.KeyValue(&found.KVs[i]), nil) {
					return
				}
			}
			if !found.More {
				return
			}
			o.Key = append(bytes.Clone(found.KVs[len(found.KVs)-1].Key), 0)
		}
	}
	return c, nil
}

// Downgrade always fails, with the same errors as in etcd when no downgrade is possible.
func (s *Service) Downgrade(ctx context.Context, r *pb.DowngradeRequest) (*pb.DowngradeResponse, error) {
	if err := s.authorize(ctx, mustBeAdmin); err != nil {
		return nil, clientError(ctx, err)
	}
	if r.Action == pb.DowngradeRequest_CANCEL {
		return nil, rpctypes.ErrGRPCNoInflightDowngrade
	}
	return nil, rpctypes.ErrGRPCInvalidDowngradeTargetVersion
}

// CheckKeyIndex returns an error while the engine's key index is not loaded, for example shortly after a start. Without
// the index, counting keys has to read all of them.
func (s *Service) CheckKeyIndex() error {
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.opts.Engine.AwaitKeyIndex(canceled); err != nil {
		return errors.New("KEY INDEX NOT LOADED")
	}
	return nil
}

// Check returns an error if this member cannot serve requests, by the rules of etcd's /health. It fails if an alarm is
// active for which the function except returns false, if no leader is known, or if a linearizable read fails. If
// serializable is set, no leader is needed, and Check makes a local read instead.
func (s *Service) Check(ctx context.Context, serializable bool, except func(pb.AlarmType) bool) error {
	for _, a := range s.Alarms() {
		if !except(a.Alarm) {
			return errors.New("ALARM " + a.Alarm.String())
		}
	}
	if !serializable && s.Leader() == 0 {
		return errors.New("RAFT NO LEADER")
	}
	ctx, cancel := context.WithTimeout(ctx, s.requestTimeout())
	defer cancel()
	snap, err := s.snapshot(ctx, serializable)
	if err != nil {
		return errors.New("RANGE ERROR:" + status.Convert(err).Message())
	}
	defer snap.Close()
	if _, err := snap.Range(mvcc.RangeOptions{Key: []byte{0}, End: []byte{0}, Limit: 1, KeysOnly: true}); err != nil {
		return errors.New("RANGE ERROR:" + err.Error())
	}
	return nil
}
