package membership

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// patience is the maximum time for which a call waits for the raft groups to make a change.
const patience = 30 * time.Second

// Promote makes a learner a voter if it has caught up, and returns when it is a voter of all groups. It returns
// FailedPrecondition with ReasonNotFound, ReasonNotLearner, ReasonNotReady, ReasonQuorum or ReasonUnverified.
func (s *Service) Promote(ctx context.Context, id uint64) ([]Member, error) {
	m, err := s.before(ctx, id)
	if err != nil {
		return nil, err
	}
	if m.State == Voting {
		return nil, fault.New(fault.FailedPrecondition, "member %d is already a voter", id).WithReason(ReasonNotLearner)
	}
	if _, err := promoteCommand.Call(ctx, s.opts.Commands, id); err != nil {
		return nil, s.inTime(ctx, err)
	}
	return s.await(ctx, func(all []Member) bool { m := find(all, id); return m == nil || m.State == Voting })
}

// before returns the record of a member that a call is about to change, or ReasonNotFound if there is none. It runs on
// the member that received the call, and not on the leader. If a leader is lost before it responds, the command is
// repeated on the next leader, where the change may have been made already. So the leader must not return an error for
// a member that is already gone.
func (s *Service) before(ctx context.Context, id uint64) (*Member, error) {
	all, err := s.List(ctx, false)
	if err != nil {
		return nil, s.inTime(ctx, err)
	}
	if m := find(all, id); m != nil {
		return m, nil
	}
	return nil, notFound(id)
}

var promoteCommand = leader.NewCommand("member.promote", leader.Repeatable, (*Service).promoteOnLeader)

// promoteOnLeader sets the desired role of a learner to voter. It changes only the record. Reconcile then makes the
// learner a voter in the raft groups.
func (s *Service) promoteOnLeader(ctx context.Context, id uint64) (struct{}, error) {
	all, err := s.List(ctx, false)
	if err != nil {
		return struct{}{}, err
	}
	switch m := find(all, id); {
	case m == nil:
		return struct{}{}, notFound(id)
	case m.State == Voting:
		return struct{}{}, nil
	case m.State != Learning:
		return struct{}{}, fault.New(fault.FailedPrecondition, "member %d has not joined yet", id).WithReason(ReasonNotReady)
	}
	if err := s.mayVote(ctx, find(all, id)); err != nil {
		return struct{}{}, err
	}
	err = s.rewrite(ctx, id, func(m *Member) error { m.Wanted = Voter; return nil })
	s.wakeLoop()
	return struct{}{}, err
}

// mayVote returns nil if every raft group would accept the learner as a voter, and the learner presents its own
// certificate at its address. The address must be checked, because a caller without a credential may have set it.
func (s *Service) mayVote(ctx context.Context, m *Member) error {
	if err := s.verifyChange(ctx, consensus.Change{Kind: consensus.Promote, Member: m.ID}, false); err != nil {
		return err
	}
	return s.verify(ctx, m.ID, m.RaftAddr)
}

// removeAsk holds the arguments of removeCommand, the command that removes or replaces a member.
type removeAsk struct {
	ID             uint64
	Force, Replace bool
	// Open is true if the caller has sent no credential.
	Open bool `cbor:",omitempty"`
}

// trio is the minimum number of voters that must remain when a caller without a credential removes a voter. With only
// two voters, the loss of one would leave the cluster without a quorum.
const trio = 3

// Remove removes a member from all raft groups. It returns when the first group, kv, has removed the member. It does
// not wait for the other groups, because a member that removes itself no longer receives their logs. The returned list
// does not contain the removed member. If a process had joined as the member, the ID is not used again. If only one
// voter would remain, force is required. Remove returns FailedPrecondition with ReasonNotFound, ReasonQuorum or
// ReasonLastVoter.
func (s *Service) Remove(ctx context.Context, id uint64, force bool) ([]Member, error) {
	if _, err := s.before(ctx, id); err != nil {
		return nil, err
	}
	if _, err := removeCommand.Call(ctx, s.opts.Commands, removeAsk{ID: id, Force: force}); err != nil {
		return nil, s.inTime(ctx, err)
	}
	return s.awaitGone(ctx, id)
}

// RemoveOpen is Remove for a caller without a credential. It also returns ReasonLastVoter if fewer than three voters
// would remain. It returns ReasonOperator if an operator is replacing the member, or if an operator added the member
// and no process has joined as the member yet.
func (s *Service) RemoveOpen(ctx context.Context, id uint64) ([]Member, error) {
	if _, err := s.before(ctx, id); err != nil {
		return nil, err
	}
	if _, err := removeCommand.Call(ctx, s.opts.Commands, removeAsk{ID: id, Open: true}); err != nil {
		return nil, s.inTime(ctx, err)
	}
	return s.awaitGone(ctx, id)
}

// checkOpen returns the additional errors of RemoveOpen. It counts the voters in the transaction tx, which also sets
// the member's state to Leaving. So concurrent removals cannot together leave too few voters.
func checkOpen(tx *store.Tx, m *Member) error {
	if m.NoExpiry || m.State == Leaving && m.Replace || m.State == Waiting && !m.Open {
		return fault.New(fault.FailedPrecondition, "an operator added member %d: only a caller with a credential can remove it, for example with trivet cluster remove %d",
			m.ID, m.ID).WithReason(ReasonOperator)
	}
	if !m.Votes() {
		return nil
	}
	all, err := list(tx)
	if err != nil {
		return err
	}
	left := 0
	for i := range all {
		if all[i].ID != m.ID && all[i].Votes() {
			left++
		}
	}
	if left < trio {
		return fault.New(fault.FailedPrecondition, "the cluster would have %d voters, and with fewer than %d it stops when it loses one more: "+
			"only a caller with a credential can remove this member, for example with trivet cluster remove %d", left, trio, m.ID).WithReason(ReasonLastVoter)
	}
	return nil
}

// Replace replaces a member whose data directory is lost. The old member is removed from all raft groups. A process
// with an empty directory can then join with the same ID. The parameter force and the errors are those of Remove.
func (s *Service) Replace(ctx context.Context, id uint64, force bool) ([]Member, error) {
	if _, err := removeCommand.Call(ctx, s.opts.Commands, removeAsk{ID: id, Force: force, Replace: true}); err != nil {
		return nil, s.inTime(ctx, err)
	}
	return s.await(ctx, func(all []Member) bool { m := find(all, id); return m == nil || m.State != Leaving })
}

var removeCommand = leader.NewCommand("member.remove", leader.Repeatable, (*Service).removeOnLeader)

// removeOnLeader sets a member's state to Leaving, so that Reconcile removes the member from the groups. If no process
// has joined as the member, removeOnLeader deletes the record instead.
func (s *Service) removeOnLeader(ctx context.Context, q removeAsk) (struct{}, error) {
	all, err := s.List(ctx, false)
	if err != nil {
		return struct{}{}, err
	}
	m := find(all, q.ID)
	switch {
	case m == nil && q.Replace:
		return struct{}{}, notFound(q.ID)
	case m == nil:
		return struct{}{}, nil
	case m.State == Waiting && q.Replace:
		return struct{}{}, nil
	case m.State != Waiting && m.State != Leaving:
		if err := s.verifyChange(ctx, consensus.Change{Kind: consensus.Remove, Member: q.ID}, q.Force); err != nil {
			return struct{}{}, err
		}
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		m, err := Members.Get(tx, path(q.ID))
		if err != nil || m == nil {
			return err
		}
		if q.Open {
			if err := checkOpen(tx, m); err != nil {
				return err
			}
		}
		if m.State == Waiting && !q.Replace {
			Members.Delete(tx, path(q.ID)) // no process has joined with this ID, so it can be used again
			return nil
		}
		if m.State != Leaving {
			m.State, m.Replace = Leaving, q.Replace
		}
		m.Force = m.Force || q.Force
		Members.Put(tx, m, path(q.ID))
		return nil
	})
	s.wakeLoop()
	return struct{}{}, err
}

// UpdateRequest contains the new addresses of a member. If a field is empty, the member keeps its present address.
type UpdateRequest struct {
	ID         uint64
	RaftAddr   string
	ClientURLs []string
	// Report has what the member reports about itself, or is nil.
	Report *Report
}

// Report has the properties that a member reports about itself: see Member.
type Report struct{ MetricsURL, Version string }

// Update changes a member's addresses. If a process has joined as the member, the leader dials a new raft address
// before it is stored, and the member must present its own certificate there. Update returns FailedPrecondition with
// ReasonNotFound, ReasonAddressTaken, ReasonUnverified or, if the member joins during the call, ReasonBusy.
func (s *Service) Update(ctx context.Context, q UpdateRequest) ([]Member, error) {
	var err error
	if q.RaftAddr != "" {
		if q.RaftAddr, err = checkURL("raft_addr", q.RaftAddr); err != nil {
			return nil, err
		}
	}
	if err := checkClientURLs(&q.ClientURLs); err != nil {
		return nil, err
	}
	if _, err := updateCommand.Call(ctx, s.opts.Commands, q); err != nil {
		return nil, s.inTime(ctx, err)
	}
	all, err := s.List(ctx, false)
	return all, s.inTime(ctx, err)
}

var updateCommand = leader.NewCommand("member.update", leader.Repeatable, (*Service).updateOnLeader)

// updateOnLeader implements Update on the leader. It checks a new raft address by dialling it, and then stores the
// addresses in one transaction.
func (s *Service) updateOnLeader(ctx context.Context, q UpdateRequest) (struct{}, error) {
	all, err := s.List(ctx, false)
	if err != nil {
		return struct{}{}, err
	}
	m, err := q.of(all)
	if err != nil {
		return struct{}{}, err
	}
	verified := q.moves(m)
	if verified {
		if err := s.verify(ctx, q.ID, q.RaftAddr); err != nil {
			return struct{}{}, err
		}
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, err := list(tx)
		if err != nil {
			return err
		}
		m, err := q.of(all)
		if err != nil {
			return err
		}
		if q.moves(m) && !verified {
			return fault.New(fault.FailedPrecondition, "member %d joined while its address was being changed: try again", q.ID).WithReason(ReasonBusy).MayRetry()
		}
		if q.RaftAddr != "" {
			m.RaftAddr = q.RaftAddr
		}
		if len(q.ClientURLs) > 0 {
			m.ClientURLs = q.ClientURLs
		}
		if r := q.Report; r != nil {
			m.MetricsURL, m.Version = r.MetricsURL, r.Version
		}
		Members.Put(tx, m, path(q.ID))
		return nil
	})
	return struct{}{}, err
}

// of returns the member in the list all that the request q changes. It returns ReasonNotFound if there is none, and
// ReasonAddressTaken if another member has the requested raft address.
func (q *UpdateRequest) of(all []Member) (*Member, error) {
	m := find(all, q.ID)
	if m == nil {
		return nil, notFound(q.ID)
	}
	for _, other := range all {
		if q.RaftAddr != "" && other.ID != q.ID && HostPort(other.RaftAddr) == HostPort(q.RaftAddr) {
			return nil, fault.New(fault.FailedPrecondition, "the address %s belongs to member %d", other.RaftAddr, other.ID).WithReason(ReasonAddressTaken)
		}
	}
	return m, nil
}

// moves reports whether the request q changes the raft address of the member m, and m has joined.
func (q *UpdateRequest) moves(m *Member) bool {
	return q.RaftAddr != "" && m.Proven() && HostPort(m.RaftAddr) != HostPort(q.RaftAddr)
}

// verifyTime is the timeout of the check that a member presents its certificate at an address.
const verifyTime = 5 * time.Second

// verify connects to a raft address. It returns an error if the member with the given ID does not present its
// certificate there.
func (s *Service) verify(ctx context.Context, id uint64, raftAddr string) error {
	if s.opts.Peers == nil {
		return fault.New(fault.FailedPrecondition, "this member does not connect to other members, so it cannot check the address %s", raftAddr).
			WithReason(ReasonUnverified)
	}
	limited, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	err := s.opts.Peers.Verify(limited, HostPort(raftAddr), id)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	return fault.New(fault.FailedPrecondition, "member %d did not show its certificate at %s: %v. Start it there first", id, raftAddr, err).
		WithReason(ReasonUnverified).Because(err)
}

// rewrite applies the function change to a member's record and stores the record. It returns FailedPrecondition with
// ReasonNotFound if there is no record. If change returns an error, rewrite stores nothing and returns the error.
func (s *Service) rewrite(ctx context.Context, id uint64, change func(*Member) error) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		m, err := Members.Get(tx, path(id))
		if err != nil {
			return err
		}
		if m == nil {
			return notFound(id)
		}
		if err := change(m); err != nil {
			return err
		}
		Members.Put(tx, m, path(id))
		return nil
	})
	return err
}

// await reads the list of members whenever it changes, until the function done returns true for it, and returns that
// list. It returns DeadlineExceeded after the time patience.
func (s *Service) await(ctx context.Context, done func([]Member) bool) (all []Member, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		var from int64
		err = s.opts.Store.View(ctx, func(v *store.View) (err error) {
			from = v.Revision() + 1
			all, err = list(v)
			return err
		})
		if err != nil {
			return nil, s.inTime(ctx, err)
		}
		if done(all) {
			return all, nil
		}
		w := Members.WatchPaths(s.opts.Store, from)
		_, _, err = w.Next(ctx)
		w.Close()
		if err != nil && !fault.Is(err, fault.OutOfRange) {
			return nil, s.inTime(ctx, err)
		}
	}
}

// gonePause is the interval at which awaitGone requests the status of the first raft group from its leader.
const gonePause = 50 * time.Millisecond

// awaitGone waits until the first raft group has removed a member, and returns the other members. It returns
// DeadlineExceeded after the time patience.
func (s *Service) awaitGone(ctx context.Context, id uint64) ([]Member, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		all, err := s.List(ctx, true)
		if err != nil {
			return nil, err
		}
		others := slices.DeleteFunc(slices.Clone(all), func(m Member) bool { return m.ID == id })
		if len(others) == len(all) || len(s.opts.Groups) == 0 {
			return others, nil
		}
		var removed *consensus.RemovedError
		if _, err := s.opts.Consensus.Status(ctx); id == s.opts.Self && errors.As(err, &removed) {
			return others, nil
		}
		g, err := s.Look(ctx, s.opts.Groups[0].ID)
		if err == nil && g.Role == leaderRole && !slices.Contains(slices.Concat(g.Voters, g.Learners, g.Outgoing), id) {
			return others, nil
		}
		select {
		case <-time.After(gonePause):
		case <-ctx.Done():
			return nil, s.inTime(ctx, ctx.Err())
		}
	}
}

// inTime is called with the error of an operation that used ctx. If err was caused by a deadline, or the deadline of
// ctx has passed, inTime returns DeadlineExceeded instead of err. Otherwise, or if err is nil, it returns err
// unchanged.
func (s *Service) inTime(ctx context.Context, err error) error {
	if err != nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(ctx.Err(), context.DeadlineExceeded)) {
		return fault.New(fault.DeadlineExceeded, "the change was not carried out in time; it may still be carried out").Because(err).MayRetry()
	}
	return err
}

// wakeLoop makes Run call Reconcile at once. Run runs only on the leader, so wakeLoop has an effect only there.
func (s *Service) wakeLoop() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
