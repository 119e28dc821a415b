package consensus

import (
	"context"
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// A membership change is an entry of the group's log. Only one change can be under way at a time. A change of several
// members uses a joint configuration, which raft leaves automatically.
//
// The membership is not stored separately, because it follows from the log: it is the membership where the log begins,
// changed by the membership changes in the log. So when a change is applied, only its commit index is made durable. A
// member that starts computes the membership as of the last entry that its state machine has applied. It then applies
// the later entries again. A change takes effect when its entry is applied.
//
// A member that joins starts with an empty log (Options.Join) and must not assume the first configuration. Therefore no
// log has entry 1. So the new member needs a snapshot, and the snapshot contains the membership.
//
// A change that adds a member names the ID of the member's data directory. From then on, the group exchanges messages
// with this member only if it has this directory (dirid.go). A member that lost its disk must be removed and added
// again, as a learner with a new directory. So its old acknowledgements never count together with new ones.

// ChangeKind says whether a Change adds, promotes or removes a member.
type ChangeKind uint8

// Values of Change.Kind.
const (
	// AddLearner adds a member that receives the log and does not vote.
	AddLearner ChangeKind = 1
	// Promote makes a learner a voter.
	Promote ChangeKind = 2
	// Remove removes a voter or a learner.
	Remove ChangeKind = 3
)

// Change is one change of a group's membership: one member is added, promoted or removed.
type Change struct {
	Kind   ChangeKind
	Member uint64
	// DirID is the ID of the member's data directory. It is required if Kind is AddLearner, and otherwise ignored.
	DirID uint64
}

// MembersReason says why a membership change was refused.
type MembersReason uint8

// Values of MembersError.Reason.
const (
	ReasonUnknown     MembersReason = 1 // the member is not in the group
	ReasonOtherDirID  MembersReason = 2 // the member is in the group with another data directory
	ReasonNotCaughtUp MembersReason = 3 // no recent message from the learner, or it has too little of the log
	ReasonNoQuorum    MembersReason = 4 // no recent message from a quorum of the new voters
	ReasonLastVoter   MembersReason = 5 // one voter would be left (which force allows), or none
	ReasonPending     MembersReason = 6 // another change is under way
	ReasonMalformed   MembersReason = 7 // the changes are not valid
)

// MembersError is returned for a membership change that was refused. The membership was not changed.
type MembersError struct {
	Reason MembersReason
	Text   string
}

func (e *MembersError) Error() string { return e.Text }

func refuse(reason MembersReason, format string, args ...any) error {
	return &MembersError{reason, fmt.Sprintf(format, args...)}
}

// RemovedError is the error with which a host stops when its member was removed from all groups.
type RemovedError struct{ Member uint64 }

func (e *RemovedError) Error() string {
	return fmt.Sprintf("member %d was removed from the cluster", e.Member)
}

// caughtUp is the part of the leader's log that a learner must have before it can be promoted to a voter, in percent.
// The value is that of etcd.
const caughtUp = 90

// VerifyMembers checks whether ChangeMembers would propose the changes now. If it would not, VerifyMembers returns the
// error. It changes nothing.
func (g *Group) VerifyMembers(changes []Change, force bool) error {
	switch {
	case g.host.err != nil:
		return g.host.err
	case g.role != raft.StateLeader:
		return &NotLeaderError{g.leader}
	}
	_, err := g.validateChanges(changes, force)
	return err
}

// ChangeMembers proposes changes of the group's members, which take effect together. done is called once, with one of
// these errors:
//
//   - nil: this member has applied the changes, or nothing had to be changed.
//   - *NotLeaderError, *MembersError, ErrOverloaded or ErrStopped: nothing was changed.
//   - ErrUncertain: the changes may still be applied.
//
// The parameter force is required for a change that leaves a single voter. The last voter cannot be removed.
func (g *Group) ChangeMembers(changes []Change, force bool, done func(error)) {
	if err := g.VerifyMembers(changes, force); err != nil {
		done(err)
		return
	}
	cc, _ := g.validateChanges(changes, force)
	if cc == nil {
		done(nil)
		return
	}
	status := g.node.BasicStatus()
	switch {
	case status.RaftState != raft.StateLeader:
		done(&NotLeaderError{status.Lead})
		return
	case status.LeadTransferee != 0:
		done(&NotLeaderError{status.LeadTransferee})
		return
	case g.change != nil || raftconf.IsJoint(g.storage.Members().Conf) || g.applied.Term != g.term:
		done(refuse(ReasonPending, "the group is changing its members: try again"))
		return
	}
	token, err := random(g.host.opts.Rand)
	if err != nil {
		done(err)
		return
	}
	dirIDs := map[uint64]uint64{}
	for _, c := range changes {
		if c.Kind == AddLearner {
			dirIDs[c.Member] = c.DirID
		}
	}
	cc.Context = raftconf.AppendChange(nil, token, dirIDs)
	data, err := proto.Marshal(cc)
	if err != nil {
		done(fmt.Errorf("encode a membership change: %w", err))
		return
	}
	if err := g.stepChange(data); err != nil {
		done(err)
		return
	}
	g.change = &memberChange{token: token, deadline: g.host.now + g.host.opts.Limits.ProposalTicks, term: g.term, done: done}
	g.host.schedule(g)
}

// stepChange passes data, an encoded membership change, to raft as a proposal.
func (g *Group) stepChange(data []byte) (err error) {
	defer g.host.guard(&err)
	err = g.node.Step(&raftpb.Message{Type: raftpb.MsgProp.Enum(), From: &g.host.opts.ID, Entries: []*raftpb.Entry{
		{Type: raftpb.EntryConfChangeV2.Enum(), Data: data},
	}})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrOverloaded, err)
	}
	return nil
}

// memberChange is a membership change that this member has proposed and that has not ended. token is a random number in
// the proposed entry; by it this member recognizes the entry.
type memberChange struct {
	token    uint64
	deadline uint64 // in ticks
	term     uint64
	applied  bool // the change is applied, but its commit index is not durable yet
	done     func(error)
}

// endChange ends the pending membership change, if there is one, by queuing its callback with err. If the change was
// applied already and err is not nil, the callback gets ErrUncertain, which wraps err.
func (g *Group) endChange(err error) {
	if c := g.change; c != nil {
		g.change = nil
		if c.applied && err != nil {
			err = fmt.Errorf("%w: %w", ErrUncertain, err)
		}
		g.host.queueCallback(func() { c.done(err) })
	}
}

// checkChange ends the pending membership change with ErrUncertain if it is not applied yet and either its deadline has
// passed or this member no longer leads in the term of the proposal.
func (g *Group) checkChange(now uint64) {
	if c := g.change; c != nil && !c.applied && (c.deadline <= now || g.role != raft.StateLeader || g.term != c.term) {
		g.endChange(ErrUncertain)
	}
}

// applyMembers applies a committed membership change: it updates raft's configuration and the stored membership, and
// makes the commit index durable.
func (g *Group) applyMembers(ent *raftpb.Entry) error {
	cc, token, dirIDs, err := raftconf.ParseChange(ent)
	if err != nil {
		return fmt.Errorf("entry %d changes the members: %w", ent.GetIndex(), err)
	}
	next, err := g.storage.Members().After(cc)
	if err != nil {
		return fmt.Errorf("entry %d changes the members: %w", ent.GetIndex(), err)
	}
	next.RecordDirIDs(dirIDs, g.host.dirIDs.known, g.storage.Members())
	conf := g.node.ApplyConfChange(cc)
	if err := conf.Equivalent(next.Conf); err != nil {
		return fmt.Errorf("entry %d changes the members: raft takes it differently: %w", ent.GetIndex(), err)
	}
	g.storage.SetMembers(ent.GetIndex(), next)
	g.log.Info("membership changed", "index", ent.GetIndex(), "voters", conf.GetVoters(), "learners", conf.GetLearners(), "outgoing", conf.GetVotersOutgoing())
	asked := g.change != nil && token == g.change.token
	if asked {
		g.change.applied = true
	}
	return g.persistCommit(ent.GetIndex(), func() error {
		if asked {
			g.endChange(nil)
		}
		g.host.checkRemoved()
		return nil
	})
}

// persistCommit durably stores that the entry at the given index is committed, and calls the function then after the
// fsync. It is used for membership changes. The commit of other entries need not be stored, because after a restart a
// quorum of the members can establish it again. A membership change determines which members form the quorum, and the
// members that it removed may no longer run.
func (g *Group) persistCommit(index uint64, then func() error) error {
	h, l := g.host, g.storage
	if g.installing == nil {
		if err := l.PutCommit(h.batch(), index); err != nil {
			return err
		}
	}
	h.next.after = append(h.next.after, after{g: g, then: then})
	h.schedule(g)
	return nil
}

// checkRemoved sets h.removed if this member has been removed from every group of the host.
func (h *Host) checkRemoved() {
	if len(h.groups) == 0 {
		return
	}
	for _, g := range h.groups {
		if !g.removed && (g.storage.Members().Has(h.opts.ID) || len(g.storage.Members().Conf.GetVoters()) == 0) {
			return
		}
	}
	h.removed = true
}

// sendRemoved notifies the sender of envelope e that it was removed from the group. The sender may not know, because a
// removed member need not receive the entry that removed it.
func (g *Group) sendRemoved(e message.Envelope) {
	answer := g.envelope(e.From, message.KindRemoved)
	answer.ToDirID = e.FromDirID
	g.host.opts.Transport.Send(answer)
}

// handleRemoved handles another member's notification that this member was removed from the group. It marks this member
// as removed. This is safe because the other member has applied the removal, so the removal is committed.
func (g *Group) handleRemoved(e message.Envelope) {
	if e.ToDirID == g.host.dirIDs.own {
		g.removed = true
		g.host.checkRemoved()
	}
}

// VerifyMembers is the blocking form of Group.VerifyMembers.
func (r *Runner) VerifyMembers(ctx context.Context, group uint64, changes []Change, force bool) error {
	return r.ask(ctx, group, func(g *Group, done func(error)) { done(g.VerifyMembers(changes, force)) })
}

// ChangeMembers is the blocking form of Group.ChangeMembers. This member must lead the group. ChangeMembers returns nil
// when the change is applied on this member.
func (r *Runner) ChangeMembers(ctx context.Context, group uint64, changes []Change, force bool) error {
	return r.ask(ctx, group, func(g *Group, done func(error)) { g.ChangeMembers(changes, force, done) })
}

// Removed marks this member as removed from the cluster. It is called when another member has reported that. At the
// next tick the host stops with a RemovedError.
func (r *Runner) Removed() { _ = r.call(func() { r.host.removed = true }, true) }

// ask calls f with the group on the Host's goroutine, and waits until f calls its argument done. It returns the error
// that done got, ErrNoGroup if the host does not have the group, or ErrUncertain if ctx ends first.
func (r *Runner) ask(ctx context.Context, group uint64, f func(g *Group, done func(error))) error {
	ended := make(chan error, 1)
	err := r.call(func() {
		if g := r.host.Group(group); g != nil {
			f(g, func(err error) { ended <- err })
		} else {
			ended <- ErrNoGroup
		}
	}, false)
	if err != nil {
		return err
	}
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUncertain, context.Cause(ctx))
	}
}
