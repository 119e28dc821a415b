package main

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
)

// The name, password and token of the fake store's only user; see fakeKeys.admit.
const (
	kvUser     = "ann"
	kvPassword = "staple of a battery"
	kvToken    = "ann's-kv-t0ken.1"
)

// fakeKeys serves etcd's API from data in memory that all members of the fake cloud share.
type fakeKeys struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	pb.UnimplementedLeaseServer
	pb.UnimplementedMaintenanceServer
	pb.UnimplementedAuthServer
	cloud *fakeCloud

	// The fields below are guarded by cloud.mu.
	revision, compacted int64
	keys                map[string]*mvccpb.KeyValue
	history             []*mvccpb.Event
	leases              map[int64]int64
	alarms              []*pb.AlarmMember
	file                []byte // the snapshot that Snapshot sends
	changed             chan struct{}
}

func newKeys(c *fakeCloud) *fakeKeys {
	return &fakeKeys{cloud: c, revision: 1, keys: map[string]*mvccpb.KeyValue{}, leases: map[int64]int64{}, changed: make(chan struct{})}
}

func (f *fakeKeys) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: 77, MemberId: 1, Revision: f.revision, RaftTerm: 2}
}

// admit returns an error if the call has a token for the store and that token is not the one of its only user.
func (f *fakeKeys) admit(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	if got := md.Get("token"); len(got) > 0 && got[0] != kvToken {
		return rpctypes.ErrGRPCInvalidAuthToken
	}
	return nil
}

func within(key, from, end []byte) bool {
	switch {
	case len(end) == 0:
		return bytes.Equal(key, from)
	case len(end) == 1 && end[0] == 0:
		return bytes.Compare(key, from) >= 0
	}
	return bytes.Compare(key, from) >= 0 && bytes.Compare(key, end) < 0
}

func (f *fakeKeys) find(key, end []byte) (found []*mvccpb.KeyValue) {
	for _, kv := range f.keys {
		if within(kv.Key, key, end) {
			found = append(found, kv)
		}
	}
	slices.SortFunc(found, func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) })
	return found
}

func (f *fakeKeys) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	if err := f.admit(ctx); err != nil {
		return nil, err
	}
	if r.GetRevision() > 0 && r.GetRevision() < f.compacted {
		return nil, rpctypes.ErrGRPCCompacted
	}
	return f.rangeOf(r), nil
}

func (f *fakeKeys) rangeOf(r *pb.RangeRequest) *pb.RangeResponse {
	found := f.find(r.GetKey(), r.GetRangeEnd())
	out := &pb.RangeResponse{Header: f.header(), Count: int64(len(found))}
	if r.GetSortOrder() == pb.RangeRequest_DESCEND {
		slices.Reverse(found)
	}
	if l := int(r.GetLimit()); l > 0 && len(found) > l {
		found, out.More = found[:l], true
	}
	for _, kv := range found {
		switch {
		case r.GetCountOnly():
		case r.GetKeysOnly():
			out.Kvs = append(out.Kvs, &mvccpb.KeyValue{Key: kv.Key, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version, Lease: kv.Lease})
		default:
			out.Kvs = append(out.Kvs, kv)
		}
	}
	return out
}

func (f *fakeKeys) happened(e *mvccpb.Event) {
	f.history = append(f.history, e)
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fakeKeys) put(r *pb.PutRequest) *pb.PutResponse {
	old := f.keys[string(r.GetKey())]
	kv := &mvccpb.KeyValue{Key: r.GetKey(), Value: r.GetValue(), Version: 1, CreateRevision: f.revision, ModRevision: f.revision, Lease: r.GetLease()}
	if old != nil {
		kv.Version, kv.CreateRevision = old.Version+1, old.CreateRevision
	}
	f.keys[string(r.GetKey())] = kv
	f.happened(&mvccpb.Event{Type: mvccpb.Event_PUT, Kv: kv, PrevKv: old})
	out := &pb.PutResponse{Header: f.header()}
	if r.GetPrevKv() {
		out.PrevKv = old
	}
	return out
}

func (f *fakeKeys) del(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	found := f.find(r.GetKey(), r.GetRangeEnd())
	out := &pb.DeleteRangeResponse{Deleted: int64(len(found))}
	for _, kv := range found {
		delete(f.keys, string(kv.Key))
		f.happened(&mvccpb.Event{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: kv.Key, ModRevision: f.revision}, PrevKv: kv})
		if r.GetPrevKv() {
			out.PrevKvs = append(out.PrevKvs, kv)
		}
	}
	out.Header = f.header()
	return out
}

func (f *fakeKeys) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	if err := f.admit(ctx); err != nil {
		return nil, err
	}
	if _, ok := f.leases[r.GetLease()]; r.GetLease() != 0 && !ok {
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}
	f.revision++
	return f.put(r), nil
}

func (f *fakeKeys) DeleteRange(_ context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	if len(f.find(r.GetKey(), r.GetRangeEnd())) > 0 {
		f.revision++
	}
	return f.del(r), nil
}

func (f *fakeKeys) Txn(_ context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	if len(r.GetSuccess()) > 128 || len(r.GetFailure()) > 128 {
		return nil, rpctypes.ErrGRPCTooManyOps
	}
	out := &pb.TxnResponse{Succeeded: !slices.ContainsFunc(r.GetCompare(), func(c *pb.Compare) bool { return !f.holds(c) })}
	ops := r.GetFailure()
	if out.Succeeded {
		ops = r.GetSuccess()
	}
	if slices.ContainsFunc(ops, func(op *pb.RequestOp) bool { return op.GetRequestRange() == nil }) {
		f.revision++
	}
	for _, op := range ops {
		one := &pb.ResponseOp{}
		switch op := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			one.Response = &pb.ResponseOp_ResponseRange{ResponseRange: f.rangeOf(op.RequestRange)}
		case *pb.RequestOp_RequestPut:
			one.Response = &pb.ResponseOp_ResponsePut{ResponsePut: f.put(op.RequestPut)}
		case *pb.RequestOp_RequestDeleteRange:
			one.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: f.del(op.RequestDeleteRange)}
		}
		out.Responses = append(out.Responses, one)
	}
	out.Header = f.header()
	return out, nil
}

func (f *fakeKeys) holds(c *pb.Compare) bool {
	kv := f.keys[string(c.GetKey())]
	if kv == nil {
		kv = &mvccpb.KeyValue{}
	}
	var order int
	switch c.GetTarget() {
	case pb.Compare_VERSION:
		order = int(kv.Version - c.GetVersion())
	case pb.Compare_CREATE:
		order = int(kv.CreateRevision - c.GetCreateRevision())
	case pb.Compare_MOD:
		order = int(kv.ModRevision - c.GetModRevision())
	case pb.Compare_LEASE:
		order = int(kv.Lease - c.GetLease())
	case pb.Compare_VALUE:
		order = bytes.Compare(kv.Value, c.GetValue())
	}
	switch c.GetResult() {
	case pb.Compare_EQUAL:
		return order == 0
	case pb.Compare_GREATER:
		return order > 0
	case pb.Compare_LESS:
		return order < 0
	}
	return order != 0
}

func (f *fakeKeys) Compact(_ context.Context, r *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	switch {
	case r.GetRevision() > f.revision:
		return nil, rpctypes.ErrGRPCFutureRev
	case r.GetRevision() <= f.compacted:
		return nil, rpctypes.ErrGRPCCompacted
	}
	f.compacted = r.GetRevision()
	return &pb.CompactionResponse{Header: f.header()}, nil
}

// Watch serves one watch per stream, with one response per change. It ends the stream with an error after an event for
// which the script has set a fault with "fail method=WatchEvent after".
func (f *fakeKeys) Watch(stream pb.Watch_WatchServer) error {
	in, err := stream.Recv()
	if err != nil {
		return err
	}
	r := in.GetCreateRequest()
	next := r.GetStartRevision()
	f.cloud.mu.Lock()
	created := &pb.WatchResponse{Header: f.header(), Created: true}
	f.cloud.mu.Unlock()
	if err := stream.Send(created); err != nil {
		return err
	}
	for {
		f.cloud.mu.Lock()
		var all []*mvccpb.Event
		for _, e := range f.history {
			if e.Kv.ModRevision >= next && within(e.Kv.Key, r.GetKey(), r.GetRangeEnd()) {
				seen := &mvccpb.Event{Type: e.Type, Kv: e.Kv}
				if r.GetPrevKv() {
					seen.PrevKv = e.PrevKv
				}
				all = append(all, seen)
			}
		}
		header, changed, lost := f.header(), f.changed, r.GetStartRevision() < f.compacted
		f.cloud.mu.Unlock()
		if lost {
			if err := stream.Send(&pb.WatchResponse{Header: header, Canceled: true, CompactRevision: f.compacted}); err != nil {
				return err
			}
			<-stream.Context().Done() // a stream outlives its watches, as etcd's does
			return nil
		}
		for _, e := range all {
			header.Revision, next = e.Kv.ModRevision, e.Kv.ModRevision+1
			if err := stream.Send(&pb.WatchResponse{Header: header, Events: []*mvccpb.Event{e}}); err != nil {
				return err
			}
			if err := f.cloud.fault("", "WatchEvent", true); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (f *fakeKeys) LeaseGrant(_ context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	id := int64(0xbeef00 + len(f.leases))
	f.leases[id] = r.GetTTL()
	return &pb.LeaseGrantResponse{Header: f.header(), ID: id, TTL: r.GetTTL()}, nil
}

func (f *fakeKeys) LeaseRevoke(_ context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	if _, ok := f.leases[r.GetID()]; !ok {
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}
	delete(f.leases, r.GetID())
	return &pb.LeaseRevokeResponse{Header: f.header()}, nil
}

func (f *fakeKeys) LeaseKeepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return nil
		}
		f.cloud.mu.Lock()
		out := &pb.LeaseKeepAliveResponse{Header: f.header(), ID: r.GetID(), TTL: f.leases[r.GetID()]}
		f.cloud.mu.Unlock()
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

func (f *fakeKeys) LeaseTimeToLive(_ context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	out := &pb.LeaseTimeToLiveResponse{Header: f.header(), ID: r.GetID(), TTL: -1}
	if ttl, ok := f.leases[r.GetID()]; ok {
		out.TTL, out.GrantedTTL = ttl-1, ttl
		for _, kv := range f.find([]byte{0}, []byte{0}) {
			if r.GetKeys() && kv.Lease == r.GetID() {
				out.Keys = append(out.Keys, kv.Key)
			}
		}
	}
	return out, nil
}

func (f *fakeKeys) LeaseLeases(context.Context, *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	out := &pb.LeaseLeasesResponse{Header: f.header()}
	for id := range f.leases {
		out.Leases = append(out.Leases, &pb.LeaseStatus{ID: id})
	}
	slices.SortFunc(out.Leases, func(a, b *pb.LeaseStatus) int { return int(a.ID - b.ID) })
	return out, nil
}

func (f *fakeKeys) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	out := &pb.StatusResponse{
		Header: f.header(), Version: "3.7.3", DbSize: 3 << 20, DbSizeInUse: 1 << 20, Leader: 1, RaftTerm: 2, RaftIndex: 40, RaftAppliedIndex: 40,
	}
	for _, a := range f.alarms {
		out.Errors = append(out.Errors, a.Alarm.String())
	}
	return out, nil
}

func (f *fakeKeys) Alarm(_ context.Context, r *pb.AlarmRequest) (*pb.AlarmResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	if r.GetAction() == pb.AlarmRequest_DEACTIVATE {
		f.alarms = slices.DeleteFunc(f.alarms, func(a *pb.AlarmMember) bool { return a.Alarm == r.GetAlarm() && a.MemberID == r.GetMemberID() })
	}
	return &pb.AlarmResponse{Header: f.header(), Alarms: f.alarms}, nil
}

func (f *fakeKeys) Snapshot(_ *pb.SnapshotRequest, stream pb.Maintenance_SnapshotServer) error {
	for chunk := range slices.Chunk(f.file, 32<<10) {
		if err := stream.Send(&pb.SnapshotResponse{Blob: chunk}); err != nil {
			return err
		}
		if err := f.cloud.fault("", "SnapshotPart", true); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakeKeys) Authenticate(_ context.Context, r *pb.AuthenticateRequest) (*pb.AuthenticateResponse, error) {
	if r.GetName() != kvUser || r.GetPassword() != kvPassword {
		return nil, rpctypes.ErrGRPCAuthFailed
	}
	return &pb.AuthenticateResponse{Token: kvToken}, nil
}

// setAlarm raises an alarm with the name of an etcd alarm type, such as nospace, on member 1.
func (f *fakeKeys) setAlarm(name string) error {
	kind, ok := pb.AlarmType_value[strings.ToUpper(name)]
	if !ok {
		return status.Error(codes.InvalidArgument, name)
	}
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.alarms = append(f.alarms, &pb.AlarmMember{MemberID: 1, Alarm: pb.AlarmType(kind)})
	return nil
}

// snapshotOf returns the content of a snapshot file with the keys in KEY=VALUE lines. In a line !KEY=VALUE, the key has
// a lease.
func snapshotOf(t *testing.T, text string) []byte {
	c := snapfile.Contents{Revision: 1}
	var all []*mvccpb.KeyValue
	for line := range lines(text) {
		k, v, _ := strings.Cut(line, "=")
		k, leased := strings.CutPrefix(k, "!")
		c.Revision++
		kv := &mvccpb.KeyValue{Key: []byte(k), Value: []byte(v), Version: 1, CreateRevision: c.Revision, ModRevision: c.Revision}
		if leased {
			kv.Lease = 7
		}
		all = append(all, kv)
	}
	c.Leases = []snapfile.Lease{{ID: 7, TTL: 60}}
	c.Keys = func(yield func(*mvccpb.KeyValue, error) bool) {
		for _, kv := range all {
			if !yield(kv, nil) {
				return
			}
		}
	}
	var b bytes.Buffer
	require.NoError(t, snapfile.Stream(t.Context(), &b, t.TempDir(), c))
	return b.Bytes()
}
