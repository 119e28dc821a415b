// Package membership manages the members of the cluster: their records, and the leader task that makes the raft groups
// follow the records. The main type is Service.
//
// A member is a record in the system group. The calls Add, Promote, Remove, Replace and Update change only the record.
// Reconcile, a leader task, applies the change to one group after the other, first kv and then system; a new leader
// continues where the last one stopped. Before a change is made in the first group, all groups check whether they would
// accept it.
//
// Guarantees:
//   - A new entry (the record of a member whose process has not joined yet) has no effect until a process proves that
//     it is the member. The proof is the certificate member/<id>, which only a holder of the cluster key can create.
//     The process also sends the ID of its data directory. Only then is the member added to the groups, as a learner
//     bound to that directory. Callers without a credential can add entries too. At most 8 such entries exist at a
//     time, each for at most 10 minutes, and they affect no quorum, log or traffic.
//   - A learner is promoted when it has caught up in all groups, unless it was added to stay a learner. Before the
//     promotion, the leader dials the learner's address and checks the certificate member/<id>, because the address in
//     the entry may be wrong. A learner with a wrong address receives no log, so it stays a learner. Learners count for
//     no quorum.
//   - The address of a member that has joined changes only after the leader has dialled the new address and the member
//     has presented its certificate there: a wrong address disconnects a member, and two wrong addresses take the
//     quorum from three members.
//   - A voter is removed only while the leader receives messages from a quorum of the remaining voters. Removing one of
//     the last two voters needs force. A caller without a credential (RemoveOpen, for the key-value REST API) cannot
//     remove a voter if fewer than three would remain. It cannot remove an entry that an operator added either, because
//     it could then add the entry again with another address.
//   - The ID of a member whose process has joined is not used again, except by Replace: the old directory is removed
//     from all groups before a process with a new directory may join.
//
// The first members are those of the `--cluster` list; their records are written first. Agents, the command line and
// the transport between members get the members' addresses from this package. The package uses the numbers and names of
// the groups, and does not depend on their contents.
package membership

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of entries, the records of members whose process has not joined yet.
const (
	// MaxWaiting is the maximum number of entries, without those that have NoExpiry. Entries that were added without a
	// credential are counted separately, with the same maximum.
	MaxWaiting = 8
	// WaitingTime is how long a member's entry waits for its process to join. It is then deleted, unless it has
	// NoExpiry.
	WaitingTime = 10 * time.Minute
	// MaxID is the largest ID that this package generates. Larger integers are not exact in all JSON parsers.
	MaxID = 1<<53 - 1
)

// Reasons of the FailedPrecondition errors of this package, for programs:
const (
	ReasonExists       = "MEMBER_EXISTS"      // the ID exists with another address
	ReasonAddressTaken = "PEER_URL_EXISTS"    // another member has the address
	ReasonRemoved      = "MEMBER_ID_REMOVED"  // the ID belonged to a member that was removed
	ReasonNotFound     = "MEMBER_NOT_FOUND"   // there is no member with the ID
	ReasonNotLearner   = "MEMBER_NOT_LEARNER" // the member is already a voter
	ReasonNotReady     = "LEARNER_NOT_READY"  // the member has not joined, or its log has not caught up
	ReasonQuorum       = "UNHEALTHY_CLUSTER"  // no quorum of the remaining members is reachable
	ReasonLastVoter    = "LAST_VOTER"         // fewer than two voters would remain, or fewer than three without a credential
	ReasonTooMany      = "TOO_MANY_UNPROVEN"  // there are MaxWaiting waiting entries already
	ReasonBusy         = "CHANGE_UNDER_WAY"   // the group changes its members, or this member is leaving
	ReasonIsLearner    = "TARGET_IS_LEARNER"  // a learner cannot become leader
	ReasonTransfer     = "TRANSFER_FAILED"    // the target did not become leader
	ReasonWiped        = "MEMBER_WIPED"       // the member joined with another data directory
	ReasonUnverified   = "ADDRESS_UNVERIFIED" // the member did not present its certificate at the address
	ReasonOperator     = "OPERATOR_NEEDED"    // an operator added the member: only a caller with a credential can remove it
)

// Role is the current or future role of a member in the raft groups: voter or learner.
type Role string

// Roles of a member in the raft groups:
const (
	Voter   Role = "VOTER"
	Learner Role = "LEARNER"
)

// State is how far a member has got between being added and being removed. The text is stored in records.
type State string

// The states of a member, in the order in which it passes through them.
const (
	// Waiting is the state of a member whose process has not joined yet.
	Waiting State = "WAITING"
	// Joined is the state of a member whose process has joined and that is being added to the groups as a learner.
	Joined State = "JOINED"
	// Learning is the state of a member that is a learner of every group.
	Learning State = "LEARNER"
	// Voting is the state of a member that is a voter of every group.
	Voting State = "VOTER"
	// Leaving is the state of a member that is being removed from the groups.
	Leaving State = "LEAVING"
)

// Member is the record of one member. A record with the state Waiting is called an entry.
type Member struct {
	ID   uint64
	Name string
	// RaftAddr is the URL at which the member receives raft messages. Connections always use mutual TLS, even if the
	// scheme is http.
	RaftAddr string
	// ClientURLs are the URLs at which the member serves clients; the first one is preferred.
	ClientURLs []string
	// MetricsURL is the URL at which Prometheus reaches the member's metrics, without a path, or empty if it cannot.
	// Version is the version of the member's program. The member reports both.
	MetricsURL string `cbor:",omitempty"`
	Version    string `cbor:",omitempty"`
	// Wanted is the role that the member is to have. Reconcile changes the groups accordingly.
	Wanted Role
	State  State
	// DirID is the ID of the data directory with which the process joined. It is 0 before a process has joined, and for
	// members of the first configuration.
	DirID uint64 `cbor:"Birth"`
	// FormerDirIDs holds the IDs of the data directories that the member had before it was replaced. A process with
	// such a directory is refused.
	FormerDirIDs []uint64 `cbor:"Lost"`
	// Since is when the entry was added. After Replace, it is when the old member was removed from the groups.
	Since cloud.Time
	// NoExpiry is true if an operator replaced the member. The record is then not deleted after WaitingTime.
	NoExpiry bool `cbor:"Kept"`
	// Replace is true if the member is being replaced. When it has left the groups, its state becomes Waiting, so that
	// a process with an empty data directory can join.
	Replace bool
	// Open is true if a caller without a credential added the entry.
	Open bool `cbor:",omitempty"`
	// Force is true if an operator removes the member with force.
	Force bool
}

// Proven reports whether a process has joined as the member.
func (m *Member) Proven() bool { return m.State != Waiting }

// Votes reports whether the member is a voter of every group.
func (m *Member) Votes() bool { return m.State == Voting }

// Members is the table of members: member/<id>.
var Members = store.NewTable[Member]("member")

// removed holds the IDs of removed members: member-removed/<id>.
var removed = store.NewTable[tombstone]("member-removed")

// clusterOf holds the ID of the cluster that wrote the records of members: member-cluster/id. If a backup of another
// cluster was restored, the ID differs from Options.Cluster.
var clusterOf = store.NewTable[uint64]("member-cluster")

type tombstone struct {
	Name string
	At   cloud.Time
}

// Group identifies a raft group. Every member becomes a voter or a learner of every group.
type Group struct {
	ID         uint64
	Name       string
	Leadership leader.Leadership
}

// Consensus changes the raft groups that this member leads. *consensus.Runner implements it.
type Consensus interface {
	ChangeMembers(ctx context.Context, group uint64, changes []consensus.Change, force bool) error
	VerifyMembers(ctx context.Context, group uint64, changes []consensus.Change, force bool) error
	TransferLeader(ctx context.Context, group, to uint64) error
	Status(ctx context.Context) (consensus.Status, error)
}

// Peers connects to the other members. Its calls go to the given member, not to the leader. *transport.Transport
// implements it.
type Peers interface {
	// Verify connects to an address (host:port), and returns an error if the given member does not present its own
	// certificate there.
	Verify(ctx context.Context, address string, member uint64) error
	// Direct runs a command on a member. Its errors are those of leader.Caller.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
	// HandleDirect registers the function f for a command that other members can call. The parameter from of f is the
	// calling member.
	HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error))
	// HandleNonMember registers the function f for a command that any process with a member certificate of the cluster
	// can call, also before it is a member. The parameter from of f is the member ID in the certificate, or 0.
	HandleNonMember(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error))
	// Members returns the addresses (host:port) of the other members to which this one connects, by ID. SetMembers
	// replaces these addresses; its second parameter holds the IDs of removed members.
	Members() map[uint64]string
	SetMembers(addresses map[uint64]string, removed []uint64) error
}

// Options configures New.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	// Consensus executes changes in the groups that this member leads.
	Consensus Consensus
	// Peers calls other members. If it is nil, groups that another member leads cannot be changed.
	Peers Peers
	// Groups lists the groups in the order in which changes are executed: kv, then system.
	Groups []Group
	Self   uint64
	// First holds the members of the first configuration. The leader writes their records if there are none. First is
	// empty on a member that joined an existing cluster.
	First []Member
	// Cluster is the cluster's ID. If the records are from a backup of another cluster, they are replaced by First.
	Cluster uint64
	Log     *slog.Logger
}

// Service lists and changes the members of the cluster, and serves the calls of joining processes, on one member.
type Service struct {
	opts Options
	// wake makes Run call Reconcile at once. unknownMembers is the queue of IDs that UnknownMember fills.
	wake           chan struct{}
	unknownMembers chan uint64

	mu sync.Mutex
	// logged holds, by member ID, the last logged reason why a change of the member cannot be made yet.
	logged map[uint64]string
}

// New creates the service, and registers its commands with opts.Commands and opts.Peers.
func New(opts Options) *Service {
	s := &Service{opts: opts, wake: make(chan struct{}, 1), unknownMembers: make(chan uint64, 16), logged: map[uint64]string{}}
	leader.Register(opts.Commands, s, addCommand, joinCommand, promoteCommand, removeCommand, updateCommand)
	if opts.Peers != nil {
		opts.Peers.HandleDirect(groupCall, s.serveGroup)
		opts.Peers.HandleDirect(listCall, s.serveList)
		opts.Peers.HandleNonMember(joinCall, s.serveJoin)
		opts.Peers.HandleNonMember(locateCall, s.serveLocate)
	}
	return s
}

// List returns all members sorted by ID, including those whose process has not joined yet. If no records have been
// written, List returns the members in Options.First. If serializable is true, it reads the local records, which may be
// outdated.
func (s *Service) List(ctx context.Context, serializable bool) (members []Member, err error) {
	read := func(v *store.View) error {
		members, err = list(v)
		return err
	}
	if serializable {
		err = s.opts.Store.Local(read)
	} else {
		err = s.opts.Store.View(ctx, read)
	}
	if err != nil || len(members) > 0 {
		return members, err
	}
	return s.first(), nil // no records have been written yet
}

// first returns the members in Options.First. All of them are voters.
func (s *Service) first() []Member {
	members := slices.Clone(s.opts.First)
	for i := range members {
		members[i].Wanted, members[i].State = Voter, Voting
	}
	return members
}

// joined returns the members whose process has joined, according to the local records.
func (s *Service) joined() []Member {
	all, err := s.List(context.Background(), true)
	if err != nil {
		all = s.first()
	}
	return slices.DeleteFunc(all, func(m Member) bool { return !m.Proven() })
}

func list(r store.Reader) ([]Member, error) {
	records, _, err := Members.List(r, 0)
	if err != nil {
		return nil, err
	}
	out := make([]Member, 0, len(records))
	for _, r := range records {
		out = append(out, *r.Value)
	}
	slices.SortFunc(out, func(a, b Member) int {
		switch {
		case a.ID < b.ID:
			return -1
		case a.ID > b.ID:
			return 1
		}
		return 0
	})
	return out, nil
}

// find returns the member with the given ID, or nil.
func find(members []Member, id uint64) *Member {
	for i := range members {
		if members[i].ID == id {
			return &members[i]
		}
	}
	return nil
}

func path(id uint64) string { return strconv.FormatUint(id, 10) }

func notFound(id uint64) error {
	return fault.New(fault.FailedPrecondition, "there is no member %d", id).WithReason(ReasonNotFound)
}
