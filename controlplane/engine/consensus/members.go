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

// A membership change is an entry of the group's log. One change at a time is under way; a change of several members
// uses a joint configuration, which raft leaves by itself.
//
// The membership is a function of the log: the membership at the log's begin plus the changes up to the entry in
// question. So when a change is applied, only its commit is stored. A member that starts computes the membership as of
// the entry that its state machine has applied, and applies later changes before anything else. A change takes effect
// when it is applied, in order with all other entries.
//
// A member that joins starts with an empty log (Options.Join) and must not assume the first configuration. Therefore
// logs begin after entry 1: the new member needs a snapshot, which contains the membership.
//
// A change that adds a member names its data-directory ID. From then on the group accepts and sends messages of that
// member ID only with this directory (dirid.go). A member that lost its disk comes back by removal and addition, as a
// learner with another directory, so its old acknowledgements never count together with new ones.

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

// Change is one change of a group's members.
type Change struct {
	Kind   ChangeKind
	Member uint64
	// DirID is the ID of the data directory of the member. Required with AddLearner, ignored otherwise.
	DirID uint64
}

// MembersReason is the reason for which a membership change is refused.
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

// MembersError is returned for a refused membership change. Nothing was changed.
type MembersError struct {
	Reason MembersReason
	Text   string
}

func (e *MembersError) Error() string { return e.Text }

func refuse(reason MembersReason, format string, args ...any) error {
	return &MembersError{reason, fmt.Sprintf(format, args...)}
}

// RemovedError stops a host whose member was removed from all groups.
type RemovedError struct{ Member uint64 }

func (e *RemovedError) Error() string {
	return fmt.Sprintf("member %d was removed from the cluster", e.Member)
}

// caughtUp is the share of the leader's log that a learner must have to be promoted, in percent, as in etcd.
const caughtUp = 90

// VerifyMembers returns the error with which ChangeMembers would refuse the changes now, nil if ChangeMembers would
// propose them.
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

// ChangeMembers proposes changes of the group's members, to be applied together. done is called once: with nil when the
// change is applied here or nothing had to be changed; with a *NotLeaderError, a *MembersError or ErrStopped when
// nothing was changed; with ErrUncertain when the change may still be applied. Removing the last voter but one requires
// force. The last voter cannot be removed.
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

// stepChange passes an encoded change to raft as a proposal.
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

// memberChange is a membership change that this member has proposed.
// token is a random number in the proposed entry, by which this member recognizes it.
type memberChange struct {
	token    uint64
	deadline uint64 // in ticks
	term     uint64
	applied  bool // the change is applied, but its commit index is not durable yet
	done     func(error)
}

// endChange ends the change that is under way, if there is one: it queues the callback with err. An error after the
// change was applied is wrapped in ErrUncertain.
func (g *Group) endChange(err error) {
	if c := g.change; c != nil {
		g.change = nil
		if c.applied && err != nil {
			err = fmt.Errorf("%w: %w", ErrUncertain, err)
		}
		g.host.queueCallback(func() { c.done(err) })
	}
}

// checkChange ends an unapplied change with ErrUncertain at its deadline or when this member no longer leads in the
// change's term.
func (g *Group) checkChange(now uint64) {
	if c := g.change; c != nil && !c.applied && (c.deadline <= now || g.role != raft.StateLeader || g.term != c.term) {
		g.endChange(ErrUncertain)
	}
}

// applyMembers applies a committed membership change to raft and to the stored membership, and makes its commit
// durable.
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

// persistCommit durably stores that the entry at index is committed; then is called after the fsync. Other entries need
// no stored commit index, because a quorum of the members can establish it again after a restart. A membership change
// determines who forms the quorum, and removed members may not run any more.
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

// checkRemoved sets h.removed if this member was removed from all groups of the host.
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

// sendRemoved informs the sender of e that the group has removed it, because the sender may not have received the entry
// that removed it.
func (g *Group) sendRemoved(e message.Envelope) {
	answer := g.envelope(e.From, message.KindRemoved)
	answer.ToDirID = e.FromDirID
	g.host.opts.Transport.Send(answer)
}

// handleRemoved marks this member as removed from the group. The sender has applied the removal, so the removal is
// committed.
func (g *Group) handleRemoved(e message.Envelope) {
	if e.ToDirID == g.host.dirIDs.own {
		g.removed = true
		g.host.checkRemoved()
	}
}

// VerifyMembers returns the error with which ChangeMembers would refuse the changes; see Group.VerifyMembers.
func (r *Runner) VerifyMembers(ctx context.Context, group uint64, changes []Change, force bool) error {
	return r.ask(ctx, group, func(g *Group, done func(error)) { done(g.VerifyMembers(changes, force)) })
}

// ChangeMembers returns when the change is applied on this member, which must lead the group; see Group.ChangeMembers.
func (r *Runner) ChangeMembers(ctx context.Context, group uint64, changes []Change, force bool) error {
	return r.ask(ctx, group, func(g *Group, done func(error)) { g.ChangeMembers(changes, force, done) })
}

// Removed marks this member as removed, because another member reported it. The next tick stops the host with a
// RemovedError.
func (r *Runner) Removed() { _ = r.call(func() { r.host.removed = true }, true) }

// ask calls f with the group on the Runner's goroutine and returns the error that f passes to done. It returns
// ErrNoGroup if the host has no such group, and ErrUncertain if ctx ends first.
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
