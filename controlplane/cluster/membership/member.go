// Package member keeps who belongs to the cluster: the records that say so, and the leader's work that makes the raft
// groups follow them.
//
// A member is a record in the system group. What is asked of it (Add, Promote, Remove, Replace, Update) changes the
// record only; Settle, a task of the leader, carries it out group by group, first kv and then system, and a new leader
// continues where the last one stopped. A change is judged for all groups before it begins in any.
//
// What holds:
//   - An entry is noise until a process proved to be it: with the certificate member/<id>, which only the holder of the
//     cluster key can make, it brings the birth of its directory. Only then does a group learn of it, as a learner that
//     is bound to that directory. So whoever may add entries without proof can lengthen a list by eight for ten minutes,
//     and no more: no quorum, no log, no traffic is touched by an entry.
//   - A learner is promoted when it is caught up in all groups, unless it was added to stay a learner. Its address
//     comes from the entry that added it, so before the promotion the leader dials the address and checks the
//     certificate member/<id>. A learner with a wrong address receives no log and stays a learner, which no quorum
//     counts.
//   - The address of a member that has joined changes only after the leader has dialled the new address and the member
//     has presented its certificate there: a wrong address disconnects a member, and two wrong addresses take the
//     quorum from three members.
//   - A voter leaves only while a quorum of those who stay is heard from, and the last but one only by force. A caller
//     without a credential (RemoveOpen, for the key-value REST) cannot remove a voter if fewer than three would remain,
//     nor an entry that an operator added, whose place it could take with another address.
//   - The id of a member that once was proven does not come back, but by Replace: the old directory is removed from
//     all groups, and only then may a new one prove itself.
//
// The first members are those of the `--cluster` list; they seed the table. Agents, the command line and the mesh of
// peers read addresses from here. The package knows the groups by number and name, and nothing of what they hold.
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

// Limits of the unproven.
const (
	// MaxWaiting bounds the entries whose process has not joined yet. Entries that were added without a credential have
	// the same limit of their own.
	MaxWaiting = 8
	// WaitingTime is how long one that was added waits.
	WaitingTime = 10 * time.Minute
	// MaxID is the largest id that is made here, so that every JSON reader keeps it exactly.
	MaxID = 1<<53 - 1
)

// Reasons of a refusal (fault.FailedPrecondition), for a program.
const (
	ReasonExists       = "MEMBER_EXISTS"      // the id is there with another address
	ReasonAddressTaken = "PEER_URL_EXISTS"    // another member has the address
	ReasonRemoved      = "MEMBER_ID_REMOVED"  // the id belonged to a member that was removed
	ReasonNotFound     = "MEMBER_NOT_FOUND"   // no such member
	ReasonNotLearner   = "MEMBER_NOT_LEARNER" // it is already a voter
	ReasonNotReady     = "LEARNER_NOT_READY"  // it has not joined, or not caught up
	ReasonQuorum       = "UNHEALTHY_CLUSTER"  // those who would stay cannot be heard
	ReasonLastVoter    = "LAST_VOTER"         // fewer than two voters would remain, or fewer than three without a credential
	ReasonTooMany      = "TOO_MANY_UNPROVEN"  // MaxWaiting entries wait already
	ReasonBusy         = "CHANGE_UNDER_WAY"   // the group changes its members, or this member is leaving
	ReasonIsLearner    = "TARGET_IS_LEARNER"  // leadership cannot go to a learner
	ReasonTransfer     = "TRANSFER_FAILED"    // the target did not take the leadership
	ReasonWiped        = "MEMBER_WIPED"       // the directory is not the one that the cluster knows
	ReasonUnverified   = "ADDRESS_UNVERIFIED" // the member did not show its certificate at the address
	ReasonOperator     = "OPERATOR_NEEDED"    // an operator added the member: only a caller with a credential can remove it
)

// Role is what a member shall be, or is.
type Role string

// The roles.
const (
	Voter   Role = "VOTER"
	Learner Role = "LEARNER"
)

// State is how far a member has come. The text is stored.
type State string

// The states, in the order in which a member goes through them.
const (
	// Waiting: nobody has proved to be it.
	Waiting State = "WAITING"
	// Joined: a process has; the groups are told.
	Joined State = "JOINED"
	// Learning: it is a learner of every group.
	Learning State = "LEARNER"
	// Voting: it votes in every group.
	Voting State = "VOTER"
	// Leaving: it is being removed from the groups.
	Leaving State = "LEAVING"
)

// Member is one member's record.
type Member struct {
	ID   uint64
	Name string
	// RaftAddr is where it takes what peers send, as a URL. Its scheme is text: the wire is mutual TLS always.
	RaftAddr string
	// ClientURLs are where it serves clients; the first one counts.
	ClientURLs []string
	// Wanted is what it shall become.
	Wanted Role
	State  State
	// Birth is the directory that proved to be it; 0 before, and for members of the first configuration.
	Birth uint64
	// Lost are directories that were it before it was replaced: they do not come back.
	Lost []uint64
	// Since is when it was added.
	Since cloud.Time
	// Kept entries wait without an end: their member was replaced by an operator.
	Kept bool
	// Replace says of a leaving member that its id comes back, for another directory.
	Replace bool
	// Open is set if a caller without a credential added the entry.
	Open bool `cbor:",omitempty"`
	// Force says of a leaving member that an operator takes the consequences.
	Force bool
}

// Proven says that a process has proved to be the member.
func (m *Member) Proven() bool { return m.State != Waiting }

// Votes says that the member votes in every group.
func (m *Member) Votes() bool { return m.State == Voting }

// Members is the table: member/<id>.
var Members = store.NewTable[Member]("member")

// removed are the ids that were members: member-removed/<id>.
var removed = store.NewTable[tombstone]("member-removed")

// clusterOf is the id of the cluster that the records are of.
var clusterOf = store.NewTable[uint64]("member-cluster")

type tombstone struct {
	Name string
	At   cloud.Time
}

// Group is a raft group that members belong to.
type Group struct {
	ID         uint64
	Name       string
	Leadership leader.Leadership
}

// Consensus is what this member's groups can do; *consensus.Runner.
type Consensus interface {
	ChangeMembers(ctx context.Context, group uint64, changes []consensus.Change, force bool) error
	JudgeMembers(ctx context.Context, group uint64, changes []consensus.Change, force bool) error
	TransferLeader(ctx context.Context, group, to uint64) error
	Status(ctx context.Context) (consensus.Status, error)
}

// Peers reaches a certain member, whoever leads; *transport.Mesh.
type Peers interface {
	// Verify fails unless the member answers at the address (host:port) with its own certificate.
	Verify(ctx context.Context, address string, member uint64) error
	// Direct calls a command on a member. Errors are as those of leader.Caller.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
	// HandleDirect adds a command that members call here.
	HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error))
	// HandleStranger adds one that whoever holds the cluster key may call.
	HandleStranger(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error))
	// Members are the addresses of those that can be reached; SetMembers replaces them.
	Members() map[uint64]string
	SetMembers(addresses map[uint64]string, removed []uint64) error
}

// Options of the service.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	// Consensus carries changes out on the groups that this member leads.
	Consensus Consensus
	// Peers reaches the leaders of the other groups; nil in a cluster that cannot grow.
	Peers Peers
	// Groups in the order in which a change is carried out: kv, then system.
	Groups []Group
	Self   uint64
	// First are the members of the first configuration, which seed the table. Empty on one that joins.
	First []Member
	// Cluster is the cluster's id. Records of another cluster, in a state that was restored, are replaced by First.
	Cluster uint64
	Log     *slog.Logger
}

// Service is the members' service of one member.
type Service struct {
	opts Options
	// wake makes Settle run at once; strangers are members that called and are not known here.
	wake      chan struct{}
	strangers chan uint64

	mu sync.Mutex
	// said is what was last logged of why a member's change waits, by member.
	said map[uint64]string
}

// New makes the service and registers its commands.
func New(opts Options) *Service {
	s := &Service{opts: opts, wake: make(chan struct{}, 1), strangers: make(chan uint64, 16), said: map[uint64]string{}}
	leader.Register(opts.Commands, s, addCommand, joinCommand, promoteCommand, removeCommand, updateCommand)
	if opts.Peers != nil {
		opts.Peers.HandleDirect(groupCall, s.serveGroup)
		opts.Peers.HandleDirect(listCall, s.serveList)
		opts.Peers.HandleStranger(joinCall, s.serveJoin)
		opts.Peers.HandleStranger(locateCall, s.serveLocate)
	}
	return s
}

// List is every member, waiting ones too, by id; of a cluster that has just begun, the first. With serializable it is what
// this member has, however old.
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
	return s.first(), nil // nobody has written the records yet
}

// first are the members of a cluster that begins.
func (s *Service) first() []Member {
	members := slices.Clone(s.opts.First)
	for i := range members {
		members[i].Wanted, members[i].State = Voter, Voting
	}
	return members
}

// joined are the members that have joined, as far as this one knows.
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

// find is one of a list.
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
