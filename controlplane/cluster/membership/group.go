package membership

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// groupCall is the name of a command between members. The called member executes an act on a raft group that it leads.
const groupCall = "member.group"

// leaderRole is the value of consensus.GroupStatus.Role for the leader.
const leaderRole = "Leader"

// act is a request that only the leader of a raft group can execute.
type act struct {
	Group   uint64
	Changes []consensus.Change
	// VerifyOnly means that the leader only checks whether the group would accept Changes.
	VerifyOnly bool `cbor:"Judge"`
	Force      bool
	// Transfer is the member to which the leadership of the group is to be transferred, or 0. If it is not 0, the other
	// fields except Group are ignored.
	Transfer uint64
	// StatusOnly means that the leader only returns the status of the group.
	StatusOnly bool `cbor:"Look"`
}

// onGroup sends an act to the leader of a raft group. If the leader is lost, onGroup sends the act to the next leader,
// even if it may have been executed already. That is safe because all acts are idempotent.
func (s *Service) onGroup(ctx context.Context, a act) error {
	g, err := s.group(a.Group)
	if err != nil {
		return err
	}
	return leader.Route(ctx, g.Leadership, s.opts.Self, true, func(ctx context.Context, leaderID uint64) error {
		if leaderID == s.opts.Self {
			return s.onOwn(ctx, a)
		}
		_, err := s.ask(ctx, leaderID, a)
		return err
	})
}

// Look returns the status of a raft group as the group's leader reports it. If no leader is known, Look returns the
// status that this member has.
func (s *Service) Look(ctx context.Context, group uint64) (out consensus.GroupStatus, err error) {
	g, err := s.group(group)
	if err != nil {
		return out, err
	}
	leaderID, _ := g.Leadership.Leader()
	if leaderID == 0 || leaderID == s.opts.Self {
		return s.ownStatus(ctx, group)
	}
	answer, err := s.ask(ctx, leaderID, act{Group: group, StatusOnly: true})
	if err != nil {
		return out, err
	}
	return out, cbor.Unmarshal(answer, &out)
}

func (s *Service) group(id uint64) (Group, error) {
	if i := slices.IndexFunc(s.opts.Groups, func(g Group) bool { return g.ID == id }); i >= 0 {
		return s.opts.Groups[i], nil
	}
	return Group{}, consensus.ErrNoGroup
}

// ask sends an act to the member that leads the group, and returns the encoded response.
func (s *Service) ask(ctx context.Context, leaderID uint64, a act) ([]byte, error) {
	if s.opts.Peers == nil {
		return nil, fmt.Errorf("member %d: %w", leaderID, leader.ErrNotSent)
	}
	body, err := cbor.Marshal(a)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", groupCall, err)
	}
	return s.opts.Peers.Direct(ctx, leaderID, groupCall, body)
}

func (s *Service) ownStatus(ctx context.Context, group uint64) (out consensus.GroupStatus, err error) {
	status, err := s.opts.Consensus.Status(ctx)
	if err != nil {
		return out, err
	}
	for _, g := range status.Groups {
		if g.ID == group {
			return g, nil
		}
	}
	return out, consensus.ErrNoGroup
}

// serveGroup executes an act that another member has sent to this one as the leader of the group.
func (s *Service) serveGroup(ctx context.Context, _ uint64, body []byte) ([]byte, error) {
	var a act
	if err := cbor.Unmarshal(body, &a); err != nil {
		return nil, fmt.Errorf("decode %s: %w", groupCall, err)
	}
	if a.StatusOnly {
		status, err := s.ownStatus(ctx, a.Group)
		if err != nil {
			return nil, err
		}
		return cbor.Marshal(status)
	}
	return nil, s.onOwn(ctx, a)
}

func (s *Service) onOwn(ctx context.Context, a act) error {
	var err error
	switch {
	case a.Transfer != 0:
		err = s.opts.Consensus.TransferLeader(ctx, a.Group, a.Transfer)
	case a.VerifyOnly:
		err = s.opts.Consensus.VerifyMembers(ctx, a.Group, a.Changes, a.Force)
	default:
		err = s.opts.Consensus.ChangeMembers(ctx, a.Group, a.Changes, a.Force)
	}
	return explain(err)
}

// reasons maps each reason of a consensus.MembersError to a Reason constant of this package.
var reasons = map[consensus.MembersReason]string{
	consensus.ReasonUnknown:     ReasonNotFound,
	consensus.ReasonOtherDirID:  ReasonExists,
	consensus.ReasonNotCaughtUp: ReasonNotReady,
	consensus.ReasonNoQuorum:    ReasonQuorum,
	consensus.ReasonLastVoter:   ReasonLastVoter,
	consensus.ReasonPending:     ReasonBusy,
}

// explain converts an error of package consensus. A NotLeaderError becomes leader.ErrNotLeader. The other errors that
// explain knows become a fault.Fault for the caller, and all others stay unchanged.
func explain(err error) error {
	var refused *consensus.MembersError
	var notLeader *consensus.NotLeaderError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		f := fault.New(fault.FailedPrecondition, "%s", refused.Error()).WithReason(reasons[refused.Reason])
		if refused.Reason == consensus.ReasonPending {
			f = f.MayRetry()
		}
		return f
	case errors.As(err, &notLeader):
		return leader.ErrNotLeader
	case errors.Is(err, consensus.ErrTransferFailed):
		return fault.New(fault.FailedPrecondition, "%s", err.Error()).WithReason(ReasonTransfer)
	case errors.Is(err, consensus.ErrUncertain):
		return fault.New(fault.Unavailable, "the leader was lost before it answered; whether the change took effect is not known").
			Because(err).MayRetry()
	}
	return err
}

// verifyChange returns nil if every raft group would accept the membership change c. It changes nothing.
func (s *Service) verifyChange(ctx context.Context, c consensus.Change, force bool) error {
	for _, g := range s.opts.Groups {
		if err := s.onGroup(ctx, act{Group: g.ID, Changes: []consensus.Change{c}, VerifyOnly: true, Force: force}); err != nil {
			return err
		}
	}
	return nil
}

// change executes the membership change c in every group, in the order of Options.Groups. In a group that has executed
// c already, it has no effect.
func (s *Service) change(ctx context.Context, c consensus.Change, force bool) error {
	for _, g := range s.opts.Groups {
		if err := s.onGroup(ctx, act{Group: g.ID, Changes: []consensus.Change{c}, Force: force}); err != nil {
			return fmt.Errorf("group %s: %w", g.Name, err)
		}
	}
	return nil
}

// Transfer transfers the leadership of the given groups to a member. If no groups are given, it transfers the
// leadership of all groups. If the member leads a group already, nothing changes in that group. Transfer returns
// FailedPrecondition with ReasonNotFound, ReasonIsLearner, ReasonBusy or ReasonTransfer.
func (s *Service) Transfer(ctx context.Context, to uint64, groups ...uint64) error {
	all, err := s.List(ctx, false)
	if err != nil {
		return s.inTime(ctx, err)
	}
	switch m := find(all, to); {
	case m == nil:
		return notFound(to)
	case m.State == Leaving:
		return fault.New(fault.FailedPrecondition, "member %d is being removed", to).WithReason(ReasonBusy)
	case !m.Votes():
		return fault.New(fault.FailedPrecondition, "member %d is a learner, which cannot lead", to).WithReason(ReasonIsLearner)
	}
	if len(groups) == 0 {
		for _, g := range s.opts.Groups {
			groups = append(groups, g.ID)
		}
	}
	for _, g := range groups {
		if err := s.onGroup(ctx, act{Group: g, Transfer: to}); err != nil {
			return s.inTime(ctx, err)
		}
	}
	return nil
}
