package consensus

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// Status is what a host knows of itself.
type Status struct {
	ID      uint64
	DirID   uint64 // of the data directory
	Vouched bool   // whether the data directory may take part, see dirid.go
	Err     error  // why it has stopped
	// Heard tells for each other member how many ticks ago its last message came; absent if none did.
	Heard  map[uint64]uint64
	Groups []GroupStatus // by id
}

// GroupStatus is what a host knows of one of its groups.
type GroupStatus struct {
	ID             uint64
	Role           string // Follower, PreCandidate, Candidate or Leader
	Leader         uint64 // 0 if none is known
	Transferee     uint64 // who shall lead next; 0 outside of a transfer
	Term, Vote     uint64
	Commit         uint64
	Applied        uint64
	First, Last    uint64 // entries in the log
	LogBytes       uint64 // to within 64 KiB
	Voters         []uint64
	Learners       []uint64
	Outgoing       []uint64          // voters of before, while the members change together
	Proposals      int               // waiting, in this member; those of one batch count once
	Reads          int               // waiting, in this member
	Match          map[uint64]uint64 // on the leader: the last entry known to be on each member
	Active         map[uint64]bool   // on the leader: who was heard from in the last election time-out
	SnapshotsUnder int               // on their way to other members
}

// roles names raft's states.
var roles = map[raft.StateType]string{
	raft.StateFollower: "Follower", raft.StatePreCandidate: "PreCandidate",
	raft.StateCandidate: "Candidate", raft.StateLeader: "Leader",
}

// Status describes the host and its groups.
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

// Status describes the group.
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
			s.Match[id], s.Active[id] = pr.Match, g.host.hearing(id)
		})
	}
	return s
}

// transfer is a change of leader that was asked for.
type transfer struct {
	to       uint64
	anyone   bool   // another will do when that one cannot be reached
	deadline uint64 // in ticks
	done     func(error)
}

// TransferLeader asks a member to lead the group in place of this one; 0 takes the one that is furthest, and the next
// when that cannot be reached. done is called once: without error when that member leads, else with a *NotLeaderError,
// ErrTransferFailed, which is ErrAlone too when nobody is left to ask, or ErrStopped. Proposals are refused meanwhile.
func (g *Group) TransferLeader(to uint64, done func(error)) {
	anyone := to == 0
	if anyone {
		to = g.furthest()
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

// furthest is the other voter that holds most of the log among those heard from lately and not lost since, 0 if there is
// none.
func (g *Group) furthest() uint64 {
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

// loseTransferee goes on with a transfer whose target cannot be reached: to another where any will do, or to its end,
// since nothing would come of waiting.
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
		if t.to = g.furthest(); t.to != 0 {
			err = g.transferTo(t.to)
		}
	}
	if err != nil {
		g.node.TransferLeader(g.host.opts.ID) // raft's way to give one up
		g.endTransfer(err)
	}
}

func (g *Group) endTransfer(err error) {
	if t := g.transfer; t != nil {
		g.transfer = nil
		g.host.later(func() { t.done(err) })
	}
}

// ReportUnreachable says that messages to a member were lost, so that its groups stop sending ahead, and wait no longer
// for it to lead.
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

// step gives raft a message that was checked. raft's own refusals (an unknown peer, a dropped proposal) need no answer.
func (g *Group) step(e message.Envelope) {
	if e.Raft.GetType() == raftpb.MsgReadIndex && g.role != raft.StateLeader {
		return // it asks another member by now; raft would pass it on in the name of the first
	}
	if m := e.Raft; m.GetType() == raftpb.MsgAppResp && !m.GetReject() && m.GetIndex() == 0 && m.GetTerm() == g.term {
		// So a member answers a leader of an older term, to tell it the term. Of this term it says nothing; but raft
		// would take a member that it probes for one that has nothing, and send it all there is.
		return
	}
	if err := g.node.Step(e.Raft); err != nil && !errors.Is(err, raft.ErrStepPeerNotFound) && !errors.Is(err, raft.ErrProposalDropped) {
		g.log.Debug("raft refused a message", "from", e.From, "type", e.Raft.GetType(), "err", err)
	}
	g.host.schedule(g)
}
