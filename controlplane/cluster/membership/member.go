// Package membership manages the members of the cluster: their records, and the leader task that makes the raft groups
// follow the records. The main type is Service.
//
// A member is a record in the system group. The calls Add, Promote, Remove, Replace and Update change only the record.
// Reconcile, a leader task, applies the change to one group after the other, first kv and then system; a new leader
// continues where the last one stopped. Before a change begins in any group, all groups check it.
//
// Guarantees:
//   - A new entry has no effect until a process proves that it is the member. The proof is the certificate member/<id>,
//     which only a holder of the cluster key can create. The process also sends the ID of its data directory. Only then
//     is the member added to the groups, as a learner bound to that directory. A caller that can add entries without a
//     credential can therefore add at most 8 entries for 10 minutes. They affect no quorum, log or traffic.
//   - A learner is promoted when it has caught up in all groups, unless it was added to stay a learner. Its address is
//     that of the entry, which may be wrong, so before the promotion the leader dials the address and checks the
//     certificate member/<id>. A learner with a wrong address receives no log and stays a learner, which counts for no
//     quorum.
//   - The address of a member that has joined changes only after the leader has dialled the new address and the
//     member has presented its certificate there: a wrong address disconnects a member, and two wrong addresses take
//     the quorum from three members.
//   - A voter is removed only while the leader receives messages from a quorum of the remaining voters. Removing one
//     of the last two voters needs force. A caller without a credential (RemoveOpen, for the key-value REST API) can
//     remove neither a voter if fewer than three would remain, nor an entry that an operator added, which it could
//     replace with another address.
//   - The ID of a member whose process has joined is not used again, except by Replace: the old directory is removed
//     from all groups before a process with a new directory may join.
//
// The first members are those of the `--cluster` list; their records are written first. Agents, the command line and
// the transport between members read addresses from here. The package uses the numbers and names of the groups, and
// does not depend on their contents.
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
	// MaxWaiting is the maximum number of entries whose process has not joined. Entries that were added without a
	// credential have a separate limit of the same size.
	MaxWaiting = 8
	// WaitingTime is the age at which an entry is deleted if its process has not joined.
	WaitingTime = 10 * time.Minute
	// MaxID is the largest ID that this package generates: every JSON reader represents it exactly.
	MaxID = 1<<53 - 1
)

// Reasons of a fault.FailedPrecondition, for programs.
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

// Role is what a member is, or is to become, in the raft groups: a voter or a learner.
type Role string

// Roles of a member in the raft groups:
const (
	Voter   Role = "VOTER"
	Learner Role = "LEARNER"
)

// State is the step that a member has reached between being added and being removed. Its text is stored in records.
type State string

// The states, in the order in which a member passes through them.
const (
	// Waiting means that no process has joined as the member yet.
	Waiting State = "WAITING"
	// Joined means that a process has joined, and that the member is being added to the groups as a learner.
	Joined State = "JOINED"
	// Learning means that the member is a learner of every group.
	Learning State = "LEARNER"
	// Voting means that the member is a voter of every group.
	Voting State = "VOTER"
	// Leaving means that the member is being removed from the groups.
	Leaving State = "LEAVING"
)

// Member is the record of one member. While it is Waiting, it is called an entry.
type Member struct {
	ID   uint64
	Name string
	// RaftAddr is the URL at which the member receives raft messages. Connections always use mutual TLS, whatever the
	// scheme.
	RaftAddr string
	// ClientURLs are the URLs at which the member serves clients; the first one is preferred.
	ClientURLs []string
	// Wanted is the desired role, which Reconcile establishes.
	Wanted Role
	State  State
	// DirID is the ID of the data directory with which the process joined; 0 before, and for members of the first
	// configuration.
	DirID uint64 `cbor:"Birth"`
	// FormerDirIDs holds the IDs of the data directories that the member had before it was replaced; they are refused.
	FormerDirIDs []uint64 `cbor:"Lost"`
	// Since is when the entry was added or, after Replace, when the former member had left the groups.
	Since cloud.Time
	// NoExpiry means that the entry does not expire while it is Waiting, because an operator replaced the member.
	NoExpiry bool `cbor:"Kept"`
	// Replace, for a leaving member, means that its entry then waits for a process with an empty data directory.
	Replace bool
	// Open is set if a caller without a credential added the entry.
	Open bool `cbor:",omitempty"`
	// Force, for a leaving member, means that an operator forced the removal.
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

// clusterOf holds the ID of the cluster to which the records belong: member-cluster/id. It differs from Options.Cluster
// after a backup of another cluster was restored.
var clusterOf = store.NewTable[uint64]("member-cluster")

type tombstone struct {
	Name string
	At   cloud.Time
}

// Group identifies a raft group, of which all members become voters or learners.
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

// Peers calls a given member, independent of the leader. *transport.Transport implements it.
type Peers interface {
	// Verify returns an error unless the member presents its own certificate at the address (host:port).
	Verify(ctx context.Context, address string, member uint64) error
	// Direct runs a command on a member. Its errors are those of leader.Caller.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
	// HandleDirect registers a command that other members can call.
	HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error))
	// HandleNonMember registers a command that any holder of the cluster key can call.
	HandleNonMember(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error))
	// Members returns the addresses (host:port) of the other members to which this one connects, by ID. SetMembers
	// replaces them, and names the removed members.
	Members() map[uint64]string
	SetMembers(addresses map[uint64]string, removed []uint64) error
}

// Options configures New.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	// Consensus executes changes in the groups that this member leads.
	Consensus Consensus
	// Peers calls other members. It may be nil; then groups that another member leads cannot be changed.
	Peers Peers
	// Groups lists the groups in the order in which changes are executed: kv, then system.
	Groups []Group
	Self   uint64
	// First holds the members of the first configuration, whose records seed writes. It is empty on a member that
	// joins.
	First []Member
	// Cluster is the cluster's ID. If restored records belong to another cluster, First replaces them.
	Cluster uint64
	Log     *slog.Logger
}

// Service lists and changes the members of the cluster, and serves the calls of joining processes, on one member.
type Service struct {
	opts Options
	// wake makes Run call Reconcile at once. unknownMembers is the queue of UnknownMember.
	wake           chan struct{}
	unknownMembers chan uint64

	mu sync.Mutex
	// logged holds the last logged reason why a member's change waits, by member ID.
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

// List returns every member by ID, including waiting ones. Before the first records are written, it returns the first
// members. With serializable, it reads the local state, which may be old.
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

// first returns the members in Options.First, with the role and the state of voters.
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

// find returns the member with the ID, or nil.
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
