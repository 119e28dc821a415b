package consensus

import (
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// validateChanges checks the membership changes and converts them to the form that raft needs. If the membership
// already is as requested, it returns nil without an error. If the group must refuse the changes, it returns a
// *MembersError.
func (g *Group) validateChanges(changes []Change, force bool) (*raftpb.ConfChangeV2, error) {
	if len(changes) == 0 {
		return nil, refuse(ReasonMalformed, "no membership change was given")
	}
	cc := &raftpb.ConfChangeV2{}
	now := g.storage.Members()
	seen := map[uint64]bool{}
	for _, c := range changes {
		if c.Member == 0 || raft.IsLocalMsgTarget(c.Member) || seen[c.Member] {
			return nil, refuse(ReasonMalformed, "member %d cannot be changed like this", c.Member)
		}
		seen[c.Member] = true
		kind, err := g.validateChange(now, c)
		if err != nil {
			return nil, err
		}
		if kind != nil {
			cc.Changes = append(cc.Changes, &raftpb.ConfChangeSingle{Type: kind, NodeId: new(c.Member)})
		}
	}
	if len(cc.Changes) == 0 {
		return nil, nil
	}
	if raftconf.IsJoint(now.Conf) {
		return nil, refuse(ReasonPending, "the group is changing its members: try again")
	}
	if leaves := len(now.Conf.Voters) - removals(cc, now.Conf.Voters); leaves == 0 && len(now.Conf.Voters) > 0 {
		return nil, refuse(ReasonLastVoter, "no voter would be left")
	}
	next, err := now.After(cc)
	if err != nil {
		return nil, refuse(ReasonMalformed, "change the members: %v", err)
	}
	return cc, g.checkQuorum(now, next, force)
}

// removals returns how many members of voters are removed by the change cc.
func removals(cc *raftpb.ConfChangeV2, voters []uint64) (n int) {
	for _, c := range cc.Changes {
		if c.GetType() == raftpb.ConfChangeRemoveNode && slices.Contains(voters, c.GetNodeId()) {
			n++
		}
	}
	return n
}

// validateChange checks one membership change and returns raft's type for it. If the membership already is as
// requested, it returns nil without an error. If the group must refuse the change, it returns a *MembersError.
func (g *Group) validateChange(now raftconf.Membership, c Change) (*raftpb.ConfChangeType, error) {
	voter, learner := slices.Contains(now.Conf.Voters, c.Member), slices.Contains(now.Conf.Learners, c.Member)
	switch c.Kind {
	case AddLearner:
		switch {
		case c.DirID == 0:
			return nil, refuse(ReasonMalformed, "member %d cannot be added without its data-directory ID", c.Member)
		case now.Removed[c.Member] == c.DirID && !mutant.On(mutant.ReadmitRemoved):
			return nil, refuse(ReasonOtherDirID, "this data directory of member %d was removed and cannot be used again", c.Member)
		case (voter || learner) && now.DirIDs[c.Member] != c.DirID:
			return nil, refuse(ReasonOtherDirID, "member %d belongs to the group with another data directory", c.Member)
		case voter || learner:
			return nil, nil
		case mutant.On(mutant.LearnerVotes):
			return raftpb.ConfChangeAddNode.Enum(), nil
		}
		return raftpb.ConfChangeAddLearnerNode.Enum(), nil
	case Promote:
		switch {
		case voter:
			return nil, nil
		case !learner:
			return nil, refuse(ReasonUnknown, "member %d does not belong to the group", c.Member)
		}
		if err := g.checkProgress(c.Member); err != nil {
			return nil, err
		}
		return raftpb.ConfChangeAddNode.Enum(), nil
	case Remove:
		if !voter && !learner {
			return nil, nil
		}
		return raftpb.ConfChangeRemoveNode.Enum(), nil
	}
	return nil, refuse(ReasonMalformed, "change %d of member %d is unknown", c.Kind, c.Member)
}

// checkProgress returns an error if a learner must not be promoted to a voter yet. That is so if no message from the
// learner arrived within the last election timeout, or if the learner has less than caughtUp percent of the log.
func (g *Group) checkProgress(member uint64) error {
	if mutant.On(mutant.PromoteEarly) {
		return nil
	}
	var match uint64
	g.node.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		if id == member {
			match = pr.Match
		}
	})
	switch last := g.storage.Last().Index; {
	case !g.host.heardRecently(member):
		return refuse(ReasonNotCaughtUp, "member %d was not heard from recently", member)
	case match < last*caughtUp/100 || match == 0:
		return refuse(ReasonNotCaughtUp, "member %d holds the log up to entry %d of %d: it has to catch up first", member, match, last)
	}
	return nil
}

// checkQuorum returns an error if the voters must not be changed to those in next. That is so if no message arrived
// within the last election timeout from a quorum of the new voters. It is also so if the change leaves a single voter
// and force is not set.
func (g *Group) checkQuorum(now, next raftconf.Membership, force bool) error {
	before, after := len(now.Conf.Voters), len(next.Conf.Voters)
	if mutant.On(mutant.LearnerVotes) || slices.Equal(slices.Sorted(slices.Values(now.Conf.Voters)), slices.Sorted(slices.Values(next.Conf.Voters))) {
		return nil
	}
	if after < before && after == 1 && !force {
		return refuse(ReasonLastVoter, "one voter would be left, which could not fail: an operator may remove it by force")
	}
	heard := 0
	for _, id := range next.Conf.Voters {
		if g.host.heardRecently(id) {
			heard++
		}
	}
	if quorum := after/2 + 1; heard < quorum {
		return refuse(ReasonNoQuorum, "of the %d members that would vote only %d were heard from recently, which is less than a quorum", after, heard)
	}
	return nil
}

// heardRecently reports whether a message from the member arrived within the last election timeout. For this host's own
// member it is always true.
func (h *Host) heardRecently(member uint64) bool {
	at, ok := h.heard[member]
	return member == h.opts.ID || ok && h.now-at <= uint64(h.opts.ElectionTicks)
}
