package consensus

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// Status describes a host: its data directory, when it last heard from other members, and its groups.
type Status struct {
	ID      uint64
	DirID   uint64 // ID of the data directory
	Vouched bool   // whether the other members have accepted the data directory; see dirid.go
	Err     error  // the error that stopped the host; nil while it runs
	// Heard maps each other member to the number of ticks since its last message. A member that has sent no message is
	// not in the map.
	Heard  map[uint64]uint64
	Groups []GroupStatus // ordered by id
}

// GroupStatus describes a group on this host: raft's state, the log, the members and the pending work.
type GroupStatus struct {
	ID             uint64
	Role           string // Follower, PreCandidate, Candidate or Leader
	Leader         uint64 // 0 if none is known
	Transferee     uint64 // the target of a leadership transfer; 0 if none is under way
	Term, Vote     uint64
	Commit         uint64
	Applied        uint64
	First, Last    uint64 // indexes of the first and last entry in the log
	LogBytes       uint64 // to within 64 KiB
	Voters         []uint64
	Learners       []uint64
	Outgoing       []uint64          // voters of the old configuration while the configuration is joint, otherwise none
	Proposals      int               // number of pending proposals of this member; a batch counts once
	Reads          int               // number of pending reads of this member
	Match          map[uint64]uint64 // on the leader: raft's Match, the last entry that each member has acknowledged
	Active         map[uint64]bool   // on the leader: whether each member sent a message in the last election timeout
	SnapshotsUnder int               // number of snapshots that are being made for, or sent to, other members
}

// roles maps each raft state to its name in GroupStatus.Role.
var roles = map[raft.StateType]string{
	raft.StateFollower: "Follower", raft.StatePreCandidate: "PreCandidate",
	raft.StateCandidate: "Candidate", raft.StateLeader: "Leader",
}

// Status returns the state of the host and of its groups. The groups are ordered by ID.
func (h *Host) Status() Status {
	s := Status{ID: h.opts.ID, DirID: h.dirIDs.own, Vouched: h.dirIDs.vouched, Err: h.err, Heard: map[uint64]uint64{}}
	for m, at := range h.heard {
		s.Heard[m] = h.now - at
	}
	for _, g := range h.groups {
		s.Groups = append(s.Groups, g.Status())
	}
	return s
}

// Status returns the group's state on this member. GroupStatus.Match and GroupStatus.Active are set only if this member
// leads.
func (g *Group) Status() GroupStatus {
	b := g.node.BasicStatus()
	s := GroupStatus{
		ID: g.id, Role: roles[b.RaftState], Leader: b.Lead, Transferee: b.LeadTransferee,
		Term: b.GetTerm(), Vote: b.GetVote(), Commit: b.GetCommit(), Applied: g.applied.Index,
		First: g.storage.Begin().Index + 1, Last: g.storage.Last().Index, LogBytes: g.storage.Bytes(),
		Voters: g.storage.Members().Conf.GetVoters(), Learners: g.storage.Members().Conf.GetLearners(),
		Outgoing: g.storage.Members().Conf.GetVotersOutgoing(), Proposals: len(g.queue) + len(g.inflight) + g.sent.count, Reads: g.reads.count,
		SnapshotsUnder: len(g.outgoing),
	}
	if b.RaftState == raft.StateLeader {
		s.Match, s.Active = map[uint64]uint64{}, map[uint64]bool{}
		g.node.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
			s.Match[id], s.Active[id] = pr.Match, g.host.heardRecently(id)
		})
	}
	return s
}

// transfer is a leadership transfer that this leader has begun and that has not ended.
type transfer struct {
	to       uint64
	anyone   bool   // whether another voter is tried if the target cannot be reached
	deadline uint64 // in ticks
	done     func(error)
}

// TransferLeader transfers the leadership of the group from this member to the member with the ID to. If to is 0, it
// chooses the reachable voter whose log is most complete; if that voter becomes unreachable, it tries another one.
//
// done is called once: with nil when the target leads; otherwise with a *NotLeaderError, the error that stopped the
// host, or ErrTransferFailed, which also wraps ErrAlone if no voter is left to try. A transfer fails after two election
// timeouts. Until done is called, proposals fail with a *NotLeaderError; in a group with GroupOptions.Forward they wait
// instead.
func (g *Group) TransferLeader(to uint64, done func(error)) {
	anyone := to == 0
	if anyone {
		to = g.mostCurrentVoter()
	}
	switch {
	case g.host.err != nil:
		done(g.host.err)
		return
	case g.role != raft.StateLeader:
		done(&NotLeaderError{g.leader})
		return
	case to == g.host.opts.ID:
		done(nil)
		return
	case to == 0:
		done(fmt.Errorf("%w: %w", ErrTransferFailed, ErrAlone))
		return
	case g.transfer != nil:
		done(fmt.Errorf("%w: one to member %d is under way", ErrTransferFailed, g.transfer.to))
		return
	}
	if err := g.transferTo(to); err != nil {
		done(err)
		return
	}
	g.transfer = &transfer{to: to, anyone: anyone, deadline: g.host.now + 2*uint64(g.host.opts.ElectionTicks), done: done}
	g.host.schedule(g)
}

func (g *Group) transferTo(to uint64) (err error) {
	defer g.host.guard(&err)
	known := false
	for _, id := range g.storage.Members().Conf.GetVoters() {
		known = known || id == to
	}
	if !known {
		return fmt.Errorf("%w: member %d does not vote in the group", ErrTransferFailed, to)
	}
	g.node.TransferLeader(to)
	return nil
}

// mostCurrentVoter returns the other voter whose log is most complete, or 0 if there is none. It considers only voters
// that raft considers active and from which a message arrived since they were last reported unreachable.
func (g *Group) mostCurrentVoter() uint64 {
	best, match := uint64(0), uint64(0)
	g.node.WithProgress(func(id uint64, typ raft.ProgressType, pr tracker.Progress) {
		if id != g.host.opts.ID && typ == raft.ProgressTypePeer && pr.RecentActive && !g.host.lost[id] && (best == 0 || pr.Match > match) {
			best, match = id, pr.Match
		}
	})
	return best
}

func (g *Group) checkTransfer(now uint64) {
	t := g.transfer
	switch {
	case t == nil:
	case g.leader == t.to:
		g.endTransfer(nil)
	case g.leader != 0 && g.leader != g.host.opts.ID:
		g.endTransfer(fmt.Errorf("%w: member %d leads", ErrTransferFailed, g.leader))
	case t.deadline <= now:
		g.endTransfer(ErrTransferFailed)
	}
}

// loseTransferee is called when messages to a member were lost. If leadership is being transferred to that member, it
// tries another voter if transfer.anyone is set. Otherwise the transfer fails at once.
func (g *Group) loseTransferee(member uint64) {
	t := g.transfer
	if t == nil || t.to != member {
		return
	}
	g.host.schedule(g)
	if g.node.BasicStatus().RaftState != raft.StateLeader {
		g.endTransfer(&NotLeaderError{g.leader})
		return
	}
	err := fmt.Errorf("%w: member %d cannot be reached", ErrTransferFailed, member)
	if t.anyone {
		err = fmt.Errorf("%w: %w", ErrTransferFailed, ErrAlone)
		if t.to = g.mostCurrentVoter(); t.to != 0 {
			err = g.transferTo(t.to)
		}
	}
	if err != nil {
		g.node.TransferLeader(g.host.opts.ID) // aborts the transfer in raft
		g.endTransfer(err)
	}
}

func (g *Group) endTransfer(err error) {
	if t := g.transfer; t != nil {
		g.transfer = nil
		g.host.queueCallback(func() { t.done(err) })
	}
}

// ReportUnreachable is called when messages to a member were lost. raft then sends that member one append at a time,
// until it responds, instead of pipelining appends. A leadership transfer to the member ends, or goes to another
// member.
func (h *Host) ReportUnreachable(member uint64) (err error) {
	if h.err != nil {
		return h.err
	}
	defer h.guard(&err)
	h.lost[member] = true
	for _, g := range h.groups {
		g.node.ReportUnreachable(member)
		g.loseTransferee(member)
	}
	return nil
}

// step passes the raft message in an envelope to raft. The caller has checked the sender and the content. step ignores
// raft's errors.
func (g *Group) step(e message.Envelope) {
	if e.Raft.GetType() == raftpb.MsgReadIndex && g.role != raft.StateLeader {
		return // the sender will send the request to the new leader; raft would forward it with the wrong sender
	}
	if m := e.Raft; m.GetType() == raftpb.MsgAppResp && !m.GetReject() && m.GetIndex() == 0 && m.GetTerm() == g.term {
		// Drop this response. A member sends it to the leader of an older term, to announce the newer term. A leader of
		// the newer term would misinterpret it: raft would conclude that the member has no entries, and send it a
		// snapshot.
		return
	}
	if err := g.node.Step(e.Raft); err != nil && !errors.Is(err, raft.ErrStepPeerNotFound) && !errors.Is(err, raft.ErrProposalDropped) {
		g.log.Debug("raft refused a message", "from", e.From, "type", e.Raft.GetType(), "err", err)
	}
	g.host.schedule(g)
}
