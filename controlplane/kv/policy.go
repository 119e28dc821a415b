package kv

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// Names of the records that package kv writes. Records are named values that the engine stores outside the keyspace.
// Package users defines the names of its own records.
const (
	prefixAlarm  = "alarm/" // an active alarm of a member: alarm/<type>/<member ID>
	recordLessor = "lessor" // raft term and ID of the leader that expires leases
)

// policy holds the decoded records (users, alarms and the lessor record) of one epoch. Each change of a record
// increments the epoch.
type policy struct {
	epoch   int64
	users   *users.State
	alarms  []*pb.AlarmMember // sorted by type, then member
	noSpace bool
	corrupt bool
	lessor  lessorRecord
}

// recordFormat is the version of the records' encoding, and the first byte of each record's value.
const recordFormat = 1

var errRecord = errors.New("unknown or corrupt record")

func alarmRecord(a *pb.AlarmMember) (name, value []byte, err error) {
	name = fmt.Appendf(nil, "%s%s/%d", prefixAlarm, a.Alarm, a.MemberID)
	value, err = proto.MarshalOptions{Deterministic: true}.MarshalAppend([]byte{recordFormat}, a)
	return name, value, err
}

// lessorRecord is the content of the lessor record: the member ID and the raft term of the leader that expires leases.
type lessorRecord struct{ term, member uint64 }

func (l lessorRecord) encode() []byte {
	b := binary.AppendUvarint([]byte{recordFormat}, l.term)
	return binary.AppendUvarint(b, l.member)
}

func (l *lessorRecord) decode(b []byte) error {
	if len(b) == 0 || b[0] != recordFormat {
		return errRecord
	}
	term, n := binary.Uvarint(b[1:])
	if n <= 0 {
		return errRecord
	}
	member, m := binary.Uvarint(b[1+n:])
	if m <= 0 || 1+n+m != len(b) {
		return errRecord
	}
	l.term, l.member = term, member
	return nil
}

// loadPolicy reads and decodes the records of a snapshot. It returns an error for a record that cannot be decoded.
func loadPolicy(snap *mvcc.Snapshot) (*policy, error) {
	p := &policy{epoch: snap.Epoch()}
	var err error
	if p.users, err = users.Load(func(yield func(name, value []byte) bool) {
		for _, r := range snap.Records([]byte(users.Prefix)) {
			if !yield(r.Name, r.Value) {
				return
			}
		}
	}); err != nil {
		return nil, err
	}
	for _, r := range snap.Records([]byte(prefixAlarm)) {
		a := &pb.AlarmMember{}
		if len(r.Value) == 0 || r.Value[0] != recordFormat || proto.Unmarshal(r.Value[1:], a) != nil {
			return nil, fmt.Errorf("read record %s: %w", r.Name, errRecord)
		}
		p.alarms = append(p.alarms, a)
		p.noSpace = p.noSpace || a.Alarm == pb.AlarmType_NOSPACE
		p.corrupt = p.corrupt || a.Alarm == pb.AlarmType_CORRUPT
	}
	if b, ok := snap.Record([]byte(recordLessor)); ok {
		if err := p.lessor.decode(b); err != nil {
			return nil, fmt.Errorf("read record %s: %w", recordLessor, err)
		}
	}
	return p, nil
}

// currentPolicy returns the policy of this member's current records, from the cache if the cached policy has the same
// epoch. The records may change after the call.
func (s *Service) currentPolicy() (*policy, error) {
	if p := s.policy.Load(); p != nil && p.epoch == s.opts.Engine.Epoch() {
		return p, nil
	}
	return s.localPolicy()
}

// localPolicy returns the policy of a new snapshot of this member's engine, without a ReadIndex.
func (s *Service) localPolicy() (*policy, error) {
	snap := s.opts.Engine.Snapshot()
	defer snap.Close()
	return s.policyAt(snap)
}

// policyAt returns the policy of a snapshot's records, from the cache if possible.
func (s *Service) policyAt(snap *mvcc.Snapshot) (*policy, error) {
	if p := s.policy.Load(); p != nil && p.epoch == snap.Epoch() {
		return p, nil
	}
	s.loadMu.Lock()
	defer s.loadMu.Unlock()
	cached := s.policy.Load()
	if cached != nil && cached.epoch == snap.Epoch() {
		return cached, nil
	}
	p, err := loadPolicy(snap)
	if err != nil {
		return nil, err
	}
	// The cached policy is replaced only by a policy of the engine's current epoch. A higher epoch does not mean newer
	// records, because a restore may lower the engine's epoch.
	if cached == nil || p.epoch == s.opts.Engine.Epoch() {
		s.policy.Store(p)
	}
	return p, nil
}

type callerKey struct{}

// As returns a context with which calls of a Service run as the given user of etcd's Auth. The caller of As must have
// authenticated the user. While Auth is disabled, As has no effect.
func As(ctx context.Context, user string) context.Context {
	return context.WithValue(ctx, callerKey{}, user)
}

type claimKey struct{}

// Begin verifies the token of a new stream and returns the context for the stream's calls. Calls with that context use
// the verified token even after it has expired. Begin ignores an invalid token: calls on the stream that need a user
// fail later.
func (s *Service) Begin(ctx context.Context) context.Context {
	if claim, ok, err := s.claim(ctx); ok && err == nil {
		return context.WithValue(ctx, claimKey{}, claim)
	}
	return ctx
}

// bearer is the prefix of the token in an authorization header.
const bearer = "Bearer "

// claim returns the verified content of the caller's token; ok is false if the request has no token.
func (s *Service) claim(ctx context.Context) (claim users.Claim, ok bool, err error) {
	if claim, ok = ctx.Value(claimKey{}).(users.Claim); ok {
		return claim, true, nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	values := md[rpctypes.TokenFieldNameGRPC]
	if len(values) == 0 {
		values = md[rpctypes.TokenFieldNameSwagger]
	}
	if len(values) == 0 {
		return users.Claim{}, false, nil
	}
	claim, err = s.opts.Tokens.Open(strings.TrimPrefix(values[0], bearer), s.opts.Now())
	return claim, true, err
}

// user returns the name of the user who makes the request. It returns "" if the request has no token or Auth is
// disabled. It returns errBehind if the token was issued at a later auth revision than that of the policy p.
func (s *Service) user(ctx context.Context, p *policy) (string, error) {
	if !p.users.Enabled() {
		return "", nil
	}
	if user, ok := ctx.Value(callerKey{}).(string); ok {
		return user, nil
	}
	claim, ok, err := s.claim(ctx)
	if !ok || err != nil {
		return "", err
	}
	if p.users.Behind(claim) {
		return "", errBehind
	}
	return p.users.Accept(claim)
}

// Caller returns the name of the etcd user who makes the request of ctx. It returns "" if Auth is disabled, or if the
// token is missing or invalid.
func (s *Service) Caller(ctx context.Context) string {
	p, err := s.currentPolicy()
	if err != nil {
		return ""
	}
	user, err := s.user(ctx, p)
	if err != nil {
		return ""
	}
	return user
}

// errBehind means that this member's records are older than a token: the token was issued at a later auth revision.
// Clients receive the same error as for an invalid token.
var errBehind = fmt.Errorf("the token is newer than this member's records: %w", rpctypes.ErrGRPCInvalidAuthToken)

// check is a function that checks the permission for one request. It returns an error if the policy p does not permit
// the user to make the request.
type check func(p *policy, user string) error

// authorizeWith authenticates the caller and runs the permission check c with the policy p. If c is nil, authorizeWith
// only authenticates the caller.
func (s *Service) authorizeWith(ctx context.Context, p *policy, c check) error {
	user, err := s.user(ctx, p)
	if err != nil || c == nil {
		return err
	}
	return c(p, user)
}

// authorize authenticates the caller and runs the permission check c with this member's current policy. If that fails
// and the records have changed, authorize repeats it with the newest policy.
func (s *Service) authorize(ctx context.Context, c check) error {
	p, err := s.currentPolicy()
	if err != nil {
		return err
	}
	for {
		err := s.authorizeWith(ctx, p, c)
		if err == nil {
			return nil
		}
		newer, err := s.newerPolicy(ctx, p, err)
		if err != nil {
			return err
		}
		p = newer
	}
}

// newerPolicy is called after a permission check with the policy p has failed with the error cause. If the records have
// changed since p was loaded, newerPolicy returns the new policy, with which the caller repeats the check. Otherwise it
// returns the error for the client. For errBehind it first waits, with a ReadIndex, until this member has the newest
// records.
func (s *Service) newerPolicy(ctx context.Context, p *policy, cause error) (*policy, error) {
	if errors.Is(cause, errBehind) {
		if err := s.opts.Consensus.ReadIndex(ctx); err != nil {
			return nil, clientError(ctx, err)
		}
		cause = rpctypes.ErrGRPCInvalidAuthToken
	}
	newer, err := s.localPolicy()
	if err != nil {
		return nil, err
	}
	if newer.epoch == p.epoch {
		return nil, cause
	}
	return newer, nil
}

// permitRead runs the permission check c for a read of the snapshot snap, with the policy that snap contains. If the
// check fails and this member has newer records, the check is repeated once with those.
func (s *Service) permitRead(ctx context.Context, snap *mvcc.Snapshot, c check) error {
	p, err := s.policyAt(snap)
	if err != nil {
		return err
	}
	if !p.users.Enabled() {
		return nil
	}
	if err := s.authorizeWith(ctx, p, c); err != nil {
		newer, err := s.newerPolicy(ctx, p, err)
		if err != nil {
			return err
		}
		// The permission may have been granted after the snapshot was taken, for example if the token was issued just
		// now.
		if err := s.authorizeWith(ctx, newer, c); err != nil {
			if errors.Is(err, errBehind) {
				return rpctypes.ErrGRPCInvalidAuthToken
			}
			return err
		}
	}
	return nil
}
