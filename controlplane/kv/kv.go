// Package kv implements the tenants' keyspace: etcd's v3 API over one raft group, served by gRPC (package etcdrpc) and
// by REST (package restapi).
//
// A Service accepts etcd's requests and returns etcd's responses and errors (rpctypes), so that unmodified etcd clients
// work. A write becomes a program that the raft group commits and every member executes (packages translate, command
// and mvcc). A read uses a snapshot of the local engine, after a ReadIndex unless the client requested a serializable
// read. Only the leader of the group decides when leases expire (package lessor). The package must not depend on
// transports, TLS or ports. It has no storage besides the engine, which stores keys, leases and records. Records are
// named values outside the keyspace (users, roles, alarms, and the term of the leader that expires leases). Each change
// of a record increments their epoch.
//
// # Authorization
//
// While etcd's Auth is disabled, every caller may do everything; the listeners restrict who can connect. Once Auth is
// enabled, etcd's rules apply. A request is checked against this member's copy of the records, and its proposal carries
// their epoch. If the records have changed since the check, the engine refuses the proposal, and the request is checked
// and proposed again. A check that fails is repeated with newer records, if there are any.
//
// # Decisions
//
//   - A proposal whose outcome is unknown returns the same error as in etcd and is not proposed again. A proposal that
//     was dropped before it was committed (no leader, a change of leaders) fails at once; etcd lets it time out.
//   - A former leader must not expire leases, even if it has not noticed the new leader yet. A new leader therefore
//     writes its term as a record, which increments the epoch, and proposes revocations with that epoch. Revocations
//     that the old leader still has in flight carry the old epoch, so the engine refuses them.
//   - The leader runs ReadIndex before it acknowledges a lease renewal, every time.
//   - While Auth is enabled, a user who may write all keys of a lease may revoke the lease. The proposal carries a
//     digest of those keys. If the lease has other keys when the proposal is executed, the engine refuses the proposal,
//     and the keys are checked again.
//   - For a put, Limits.RequestBytes is the maximum size of the value, without the key. For a transaction, it is the
//     maximum size of the whole request. In etcd it is the maximum size of the whole request in both cases.
//   - Keys are limited to 4 KiB (mvcc.MaxKeyBytes); etcd has no such limit.
//   - The quota limits the engine's use of disk and memory. Compaction and Defragment reduce that use; other requests
//     do not wait for them.
package kv

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/controlplane/kv/watch"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
)

// Consensus commits commands through one raft group. Its methods return the errors of package consensus.
type Consensus interface {
	// Propose commits an encoded command. After this member has executed the command, Propose returns the result of the
	// command and of each step. If exclusive is set, no other command gets the same raft index; see command.Command.
	Propose(ctx context.Context, data []byte, exclusive bool) (command.Result, error)
	// ReadIndex waits until this member has executed everything that was acknowledged before the call.
	ReadIndex(ctx context.Context) error
	// Status returns the newest status of the group that this member knows.
	Status(ctx context.Context) (consensus.GroupStatus, error)
	// Self returns this member's ID.
	Self() uint64
	leader.Leadership
}

// Transport sends requests to given members and handles requests from them; *transport.Transport implements it.
type Transport interface {
	// Direct sends a request to a member. Its errors are those of leader.Caller's method Call.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
	HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error))
}

// Limits holds limits of requests and the interval of progress notifications. Zero fields mean etcd's defaults.
type Limits struct {
	RequestBytes int           // maximum bytes of a writing transaction, and of a put's value; default 1.5 MiB
	TxnOps       int           // maximum operations in a transaction; default 128
	Progress     time.Duration // interval of a watch's progress notifications; default 10 min, at least 100 ms
}

// Default values of Limits and Options.Quota, which are etcd's, and the minimum of Limits.Progress.
const (
	DefaultRequestBytes = 3 << 19
	DefaultTxnOps       = 128
	DefaultProgress     = 10 * time.Minute
	DefaultQuota        = 2 << 30
	minProgress         = 100 * time.Millisecond
)

// Options configures a Service. Fields are required unless their comment says otherwise.
type Options struct {
	Engine    *mvcc.Engine
	Consensus Consensus
	// Leases forwards lease changes to the Service. Its method Changed must be the engine's OnLeases.
	Leases *LeaseFeed
	// Tokens issues and verifies the login tokens of etcd's Auth.
	Tokens *users.Tokens
	// Transport may be nil in a cluster of one member.
	Transport Transport
	// Transfer transfers leadership of the group to the member whose ID is to; nil if leadership cannot be transferred.
	Transfer func(ctx context.Context, to uint64) error
	// Members returns the cluster's members, which snapshot files list; if nil, snapshot files list no members.
	Members func(ctx context.Context) ([]snapfile.Member, error)
	// Self is this member's ID, and Cluster is the cluster's ID.
	Self, Cluster uint64
	// Election is the election timeout. The minimum TTL of a lease is derived from it, as in etcd.
	Election time.Duration

	Limits Limits
	// Quota limits the size of the keyspace, in bytes; 0 means DefaultQuota, a negative value means no limit.
	Quota int64
	// Full reports whether a member's disk is nearly full; nil means that the disk is never checked. While the disk is
	// nearly full, requests that add data fail with the same error as above Quota. No NOSPACE alarm is raised, so these
	// requests succeed again as soon as there is space.
	Full func() bool
	// CompactAge is the age after which history is compacted; 0 means that history is compacted only when a client
	// requests it.
	CompactAge time.Duration
	// CorruptCheck is the pause between two comparisons of all members' keys, ±25 %; the pause is longer for a large
	// keyspace. 0 means DefaultCorruptCheck. With a negative value, members are never compared.
	CorruptCheck time.Duration
	// BcryptCost is the bcrypt cost of passwords; 0 means users.DefaultCost.
	BcryptCost int
	Log        *slog.Logger
	// Now returns the current time; time.Now if nil.
	Now func() time.Time
	// Clock returns a monotonic time. Lease expiry, age-based compaction and pauses between retries use it. If nil, the
	// time since New is used.
	Clock func() time.Duration
}

// Service serves the keyspace on one member. The caller must run its Run method.
type Service struct {
	opts   Options
	watch  watch.Options
	minTTL int64 // minimum TTL of a lease, seconds

	policy   atomic.Pointer[policy]
	loadMu   sync.Mutex    // serializes loading a policy
	raiseMu  sync.Mutex    // held while an alarm is raised; a concurrent call raises none
	hashMu   sync.Mutex    // held while the keyspace is hashed for the leader; a concurrent hash request fails
	queue    chan struct{} // semaphore: passwords being hashed or waiting to be hashed
	hashing  chan struct{} // semaphore: passwords being hashed
	lessor   leaseExpiry
	contacts contacts
	counters counters
}

// New creates a Service and registers its handlers with opts.Transport.
func New(opts Options) *Service {
	l := &opts.Limits
	if l.RequestBytes <= 0 {
		l.RequestBytes = DefaultRequestBytes
	}
	if l.TxnOps <= 0 {
		l.TxnOps = DefaultTxnOps
	}
	if l.Progress <= 0 {
		l.Progress = DefaultProgress
	}
	l.Progress = max(l.Progress, minProgress)
	if opts.Quota == 0 {
		opts.Quota = DefaultQuota
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.BcryptCost == 0 {
		opts.BcryptCost = users.DefaultCost
	}
	if opts.Clock == nil {
		began := time.Now()
		opts.Clock = func() time.Duration { return time.Since(began) }
	}
	s := &Service{
		opts: opts, minTTL: minTTL(opts.Election),
		queue: make(chan struct{}, maxHashing+maxQueue), hashing: make(chan struct{}, maxHashing),
	}
	s.counters.histograms()
	s.watch = watch.Options{
		Engine: opts.Engine, Header: s.header, Permit: s.permitWatch, Progress: l.Progress, FragmentBytes: l.RequestBytes,
	}
	opts.Leases.attach(&s.lessor, opts.Clock)
	if opts.Transport != nil {
		s.handleLeases()
		s.handleHash()
		s.handleContacts()
	}
	return s
}

// minTTL returns the minimum TTL of a lease as in etcd: 1.5 election timeouts, rounded up to whole seconds.
func minTTL(election time.Duration) int64 {
	ttl := election * 3 / 2
	return int64((ttl + time.Second - 1) / time.Second)
}

// Run runs the background work until ctx ends: lease expiry and hash comparison on the leader, compaction by age,
// corruption alarms and metrics.
func (s *Service) Run(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() { leader.While(ctx, s.opts.Consensus, s.opts.Self, s.expireLeases) })
	work.Go(func() { s.counters.track(ctx, s.opts.Consensus) })
	work.Go(func() { s.watchDamage(ctx) })
	work.Go(func() { s.trackContacts(ctx) })
	if s.opts.CorruptCheck >= 0 {
		work.Go(func() { s.compareHashes(ctx) })
	}
	if s.opts.CompactAge > 0 {
		work.Go(func() { s.compactByAge(ctx) })
	}
	<-ctx.Done()
}

// Self returns this member's ID.
func (s *Service) Self() uint64 { return s.opts.Self }

// Leader returns the ID of the group's leader, or 0 if none is known.
func (s *Service) Leader() uint64 {
	leaderID, _ := s.opts.Consensus.Leader()
	return leaderID
}

// LeaderChanged returns a channel that is closed at the next change of Leader. Call LeaderChanged before Leader, so
// that no change is missed.
func (s *Service) LeaderChanged() <-chan struct{} { return s.opts.Consensus.Changed() }

// Limits returns the limits of requests, with defaults in place of zero values.
func (s *Service) Limits() Limits { return s.opts.Limits }

// Election returns the election timeout of the raft group.
func (s *Service) Election() time.Duration { return s.opts.Election }

// Header returns a response header with the current revision.
func (s *Service) Header() *pb.ResponseHeader { return s.header(s.opts.Engine.Revision()) }

func (s *Service) header(revision int64) *pb.ResponseHeader {
	term := s.counters.term.Load()
	if term == 0 {
		_, term = s.opts.Consensus.Leader()
	}
	return &pb.ResponseHeader{ClusterId: s.opts.Cluster, MemberId: s.opts.Self, Revision: revision, RaftTerm: term}
}

// Watch serves a watch stream until ctx ends or the stream fails; see watch.Serve.
func (s *Service) Watch(ctx context.Context, receive func() (*pb.WatchRequest, error), send watch.Send) error {
	return watch.Serve(ctx, &s.watch, receive, send)
}

// permitWatch checks whether the caller may read the range of a watch.
func (s *Service) permitWatch(ctx context.Context, key, end []byte) error {
	return s.authorize(ctx, func(p *policy, user string) error { return p.users.CanRange(user, key, end) })
}
