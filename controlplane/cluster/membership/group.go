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

// groupCall is the name of the command between members that executes an act on the leader of a raft group.
const groupCall = "member.group"

// leaderRole is the name of the leader role in consensus.GroupStatus.
const leaderRole = "Leader"

// act is an operation that only the leader of a group can execute.
type act struct {
	Group   uint64
	Changes []consensus.Change
	// VerifyOnly checks whether the group would accept Changes, without making them.
	VerifyOnly bool `cbor:"Judge"`
	Force      bool
	// Transfer, if not 0, is the member to which the group's leadership is transferred. The other fields except Group
	// are then ignored.
	Transfer uint64
	// StatusOnly requests the status of the group. Nothing is changed.
	StatusOnly bool `cbor:"Look"`
}

// onGroup executes an act on the leader of a raft group. If the leader is lost, onGroup repeats the act on the next
// one, because all acts are idempotent.
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

// Look returns the status of a raft group as its leader reports it. If no leader is known, it returns the status on
// this member.
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

// ask sends an act to another member, which leads the group, and returns the encoded response.
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

// serveGroup executes an act that another member sent, because this member leads the group.
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

// reasons maps the reasons of a consensus.MembersError to the Reason constants of this package.
var reasons = map[consensus.MembersReason]string{
	consensus.ReasonUnknown:     ReasonNotFound,
	consensus.ReasonOtherDirID:  ReasonExists,
	consensus.ReasonNotCaughtUp: ReasonNotReady,
	consensus.ReasonNoQuorum:    ReasonQuorum,
	consensus.ReasonLastVoter:   ReasonLastVoter,
	consensus.ReasonPending:     ReasonBusy,
}

// explain converts an error of package consensus to a fault.Fault for the caller, or to leader.ErrNotLeader.
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

// verifyChange returns an error unless every group would accept the change.
func (s *Service) verifyChange(ctx context.Context, c consensus.Change, force bool) error {
	for _, g := range s.opts.Groups {
		if err := s.onGroup(ctx, act{Group: g.ID, Changes: []consensus.Change{c}, VerifyOnly: true, Force: force}); err != nil {
			return err
		}
	}
	return nil
}

// change executes the membership change c in every group, in the order of Options.Groups. It does nothing in a group in
// which c was executed before.
func (s *Service) change(ctx context.Context, c consensus.Change, force bool) error {
	for _, g := range s.opts.Groups {
		if err := s.onGroup(ctx, act{Group: g.ID, Changes: []consensus.Change{c}, Force: force}); err != nil {
			return fmt.Errorf("group %s: %w", g.Name, err)
		}
	}
	return nil
}

// Transfer transfers the leadership of the given groups, or of all groups, to a member. It succeeds if the member leads
// already. It returns FailedPrecondition with ReasonNotFound, ReasonIsLearner, ReasonBusy or ReasonTransfer.
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
