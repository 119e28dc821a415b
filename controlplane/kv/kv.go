// Package kv is the users' keys: etcd's service over one raft group of ours, by gRPC (etcdrpc) and by REST (rest.go).
//
// A Service takes etcd's requests and gives etcd's answers and errors (rpctypes), so that whatever speaks etcd works
// unchanged. What is written becomes a program that is agreed on and carried out by every member (wire, mvcc); what is
// read comes from a snapshot of the engine here, after a read index unless the client takes an old answer. The leader of
// the group alone decides when leases end (lessor). It must not know how requests arrive, TLS or ports, and keeps nothing
// of its own: the keyspace's records (users and alarms) and leases are in the engine.
//
// # Who may
//
// While etcd's Auth is disabled everybody who gets here may do everything: who gets here is the edge's affair. Once it is
// enabled etcd's rules hold. A request is checked against the records as this member has them, and what it proposes
// carries their epoch: when they have changed meanwhile the engine refuses it, and it is checked and proposed anew. A
// check that fails is made again with newer records first, if there are any.
//
// # Choices
//
//   - A proposal whose outcome is not known is told to the client as etcd tells it, and not proposed again. One that was
//     refused before it was agreed on (no leader, a change of leaders) is said to be so at once: etcd lets it time out.
//   - Of what must not be forwarded, the ending of leases by a leader that does not know yet that it is deposed, the
//     engine decides: a new leader writes its term as a record, which moves the epoch on, and ends leases under that
//     epoch only. What an old leader still has under way is refused.
//   - A renewal is acknowledged by a leader that has asked a quorum whether it leads, every time.
//   - Under Auth a lease is ended by whoever may write all its keys. What is proposed says which keys those are: if the lease
//     has others by the time it would be ended, it is not, and they are checked anew.
//   - A put may carry a value of Limits.RequestBytes, whatever its key is; of a transaction the whole request counts. etcd
//     counts the whole of both.
//   - Keys are limited to 4 KiB (mvcc.MaxKeyBytes), which etcd does not do.
//   - The quota counts what the engine takes on disk and in memory. Compaction and Defragment bring it down; no request
//     waits for them.
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

// Agreement is how the members agree on commands: one group of consensus, whose errors it has.
type Agreement interface {
	// Propose returns what came of a command, and of its steps, once it is carried out here. One that is alone shares no
	// index with others; see command.Command.
	Propose(ctx context.Context, data []byte, alone bool) (command.Result, error)
	// ReadIndex returns when everything acknowledged before the call is carried out here.
	ReadIndex(ctx context.Context) error
	// Status describes the group as this member knows it.
	Status(ctx context.Context) (consensus.GroupStatus, error)
	// Self is this member.
	Self() uint64
	leader.Leadership
}

// Peers reaches a certain member; *transport.Mesh. Errors are as those of leader.Caller.
type Peers interface {
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
	HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error))
}

// Limits of requests. Zero fields mean etcd's defaults.
type Limits struct {
	RequestBytes int           // of a transaction that writes, and of a put's value; default 1.5 MiB
	TxnOps       int           // of a transaction; default 128
	Progress     time.Duration // between notices to a watch that asked for them; default 10 min, at least 100 ms
}

// Etcd's defaults.
const (
	DefaultRequestBytes = 3 << 19
	DefaultTxnOps       = 128
	DefaultProgress     = 10 * time.Minute
	DefaultQuota        = 2 << 30
	leastProgress       = 100 * time.Millisecond
)

// Options of a Service. All are required but where it says otherwise.
type Options struct {
	Engine    *mvcc.Engine
	Agreement Agreement
	// Leases is what the engine's OnLeases tells.
	Leases *LeaseFeed
	// Tokens issues and opens the tokens of etcd's Auth.
	Tokens *users.Tokens
	// Peers may be nil in a cluster of one.
	Peers Peers
	// Transfer makes a member lead the group; nil where nobody can be asked to.
	Transfer func(ctx context.Context, to uint64) error
	// Members is who belongs to the cluster, for snapshot files; nobody when nil.
	Members func(ctx context.Context) ([]snapfile.Member, error)
	// Self is this member, Cluster the cluster's id.
	Self, Cluster uint64
	// Election is the election time-out, from which the shortest TTL of a lease follows as in etcd.
	Election time.Duration

	Limits Limits
	// Quota is how large the keyspace may become, in bytes; 0 is DefaultQuota, below 0 none.
	Quota int64
	// Full reports whether a member's disk is nearly full. Requests that add data then fail with the same error as over
	// Quota, but without etcd's alarm, so that they succeed again when there is space. Optional.
	Full func() bool
	// CompactAge is how long history is kept, 0: until somebody compacts it.
	CompactAge time.Duration
	// CorruptCheck is the pause between two comparisons of all members' keys, at least: 0 is DefaultCorruptCheck, below 0
	// members are never compared.
	CorruptCheck time.Duration
	// BcryptCost of passwords; 0 is bcrypt's default.
	BcryptCost int
	Log        *slog.Logger
	// Now is time.Now unless set.
	Now func() time.Time
	// Clock, by which leases end, goes forward only; the process's own unless set.
	Clock func() time.Duration
}

// Service serves the keyspace on one member. Run its work.
type Service struct {
	opts  Options
	watch watch.Options
	grant int64 // shortest TTL of a lease, seconds

	policy   atomic.Pointer[policy]
	reloads  sync.Mutex    // held while a policy is read
	raising  sync.Mutex    // held while an alarm is raised
	telling  sync.Mutex    // held while the keyspace is hashed for the leader
	queue    chan struct{} // passwords that are hashed or wait for it
	hashing  chan struct{} // those that are hashed
	lessor   tenure
	contacts contacts
	counters counters
}

// New makes the service.
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
	l.Progress = max(l.Progress, leastProgress)
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
		opts: opts, grant: leastTTL(opts.Election),
		queue: make(chan struct{}, maxHashing+maxQueue), hashing: make(chan struct{}, maxHashing),
	}
	s.counters.histograms()
	s.watch = watch.Options{
		Engine: opts.Engine, Header: s.header, Permit: s.permitWatch, Progress: l.Progress, FragmentBytes: l.RequestBytes,
	}
	opts.Leases.attach(&s.lessor, opts.Clock)
	if opts.Peers != nil {
		s.handlePeers()
		s.handleHash()
		s.handleContacts()
	}
	return s
}

// leastTTL is etcd's: one and a half election time-outs in whole seconds.
func leastTTL(election time.Duration) int64 {
	least := election * 3 / 2
	return int64((least + time.Second - 1) / time.Second)
}

// Run does the work of the background until ctx ends: the leader's with leases and hashes, compaction by
// age, alarms of damage, figures.
func (s *Service) Run(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() { leader.While(ctx, s.opts.Agreement, s.opts.Self, s.endLeases) })
	work.Go(func() { s.counters.follow(ctx, s.opts.Agreement) })
	work.Go(func() { s.reportDamage(ctx) })
	work.Go(func() { s.keepContacts(ctx) })
	if s.opts.CorruptCheck >= 0 {
		work.Go(func() { s.compareHashes(ctx) })
	}
	if s.opts.CompactAge > 0 {
		work.Go(func() { s.compactByAge(ctx) })
	}
	<-ctx.Done()
}

// Self is this member's id.
func (s *Service) Self() uint64 { return s.opts.Self }

// Leader is the member that leads the group, 0 when none is known.
func (s *Service) Leader() uint64 {
	leaderID, _ := s.opts.Agreement.Leader()
	return leaderID
}

// LeaderChanged is closed at the next change of Leader. Ask for it first.
func (s *Service) LeaderChanged() <-chan struct{} { return s.opts.Agreement.Changed() }

// Limits are those in force.
func (s *Service) Limits() Limits { return s.opts.Limits }

// Election is the election time-out.
func (s *Service) Election() time.Duration { return s.opts.Election }

// Header makes the header of an answer as of now.
func (s *Service) Header() *pb.ResponseHeader { return s.header(s.opts.Engine.Revision()) }

func (s *Service) header(revision int64) *pb.ResponseHeader {
	term := s.counters.term.Load()
	if term == 0 {
		_, term = s.opts.Agreement.Leader()
	}
	return &pb.ResponseHeader{ClusterId: s.opts.Cluster, MemberId: s.opts.Self, Revision: revision, RaftTerm: term}
}

// Watch serves a stream of watches; see watch.Serve.
func (s *Service) Watch(ctx context.Context, receive func() (*pb.WatchRequest, error), send watch.Send) error {
	return watch.Serve(ctx, &s.watch, receive, send)
}

// permitWatch is asked by watches, who do not read records.
func (s *Service) permitWatch(ctx context.Context, key, end []byte) error {
	return s.checked(ctx, func(p *policy, user string) error { return p.users.CanRange(user, key, end) })
}
