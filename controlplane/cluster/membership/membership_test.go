package membership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	systemGroup = 1
	kvGroup     = 2
)

// world is the membership service of member 1, which leads. The raft groups are replaced by lists of members.
type world struct {
	t      *testing.T
	now    time.Time
	s      *Service
	store  *store.Store
	leads  *leader.Commands
	mu     sync.Mutex // guards groups, dirIDs and log while Run is running
	groups map[uint64]*consensus.GroupStatus
	dirIDs map[uint64]uint64
	// cluster is Options.Cluster, the ID of the cluster.
	cluster uint64
	ready   map[uint64]bool // the learners that have caught up, by ID
	// refuse, if set, returns the error for a change or its verification.
	refuse func(group uint64, c consensus.Change, verifyOnly bool) error
	log    []string // the changes made to groups, in order
	// at holds the ID of the member whose certificate is presented at an address (host:port). Without an entry, member
	// N presents its certificate at 10.0.0.N:2380.
	at map[string]uint64
}

func newWorld(t *testing.T, first ...uint64) *world {
	w := &world{t: t, now: time.UnixMilli(1_000_000), groups: map[uint64]*consensus.GroupStatus{}, dirIDs: map[uint64]uint64{}, ready: map[uint64]bool{}}
	w.store = storetest.Memory(t, func() time.Time { return w.now })
	var members []Member
	for _, id := range first {
		members = append(members, Member{ID: id, Name: fmt.Sprint("node-", id), RaftAddr: fmt.Sprintf("https://10.0.0.%d:2380", id)})
	}
	for _, g := range []uint64{systemGroup, kvGroup} {
		w.groups[g] = &consensus.GroupStatus{ID: g, Role: leaderRole, Leader: 1, Voters: slices.Clone(first)}
	}
	w.open(members)
	require.NoError(t, w.s.Reconcile(t.Context()))
	return w
}

// open creates the service. A second call simulates a new leader.
func (w *world) open(first []Member) {
	w.leads = leadertest.Single()
	w.s = New(Options{
		Cluster: w.cluster, Store: w.store, Commands: w.leads, Consensus: w, Peers: network{w}, Self: 1, First: first,
		Log:    slog.New(slog.DiscardHandler),
		Groups: []Group{{kvGroup, "kv", testLeadership{w, kvGroup}}, {systemGroup, "system", testLeadership{w, systemGroup}}},
	})
}

// network implements Peers with the certificates of w.at. Calls to other members fail.
type network struct{ w *world }

func (n network) Verify(_ context.Context, address string, member uint64) error {
	answers, known := n.w.at[address]
	if !known {
		fmt.Sscanf(address, "10.0.0.%d:2380", &answers)
	}
	if answers != member {
		return fmt.Errorf("member/%d answers", answers)
	}
	return nil
}

func (network) Direct(context.Context, uint64, string, []byte) ([]byte, error) {
	return nil, leader.ErrNotSent
}
func (network) HandleDirect(string, func(context.Context, uint64, []byte) ([]byte, error))    {}
func (network) HandleNonMember(string, func(context.Context, uint64, []byte) ([]byte, error)) {}
func (network) Members() map[uint64]string                                                    { return nil }
func (network) SetMembers(map[uint64]string, []uint64) error                                  { return nil }

func (w *world) verifyChange(group uint64, changes []consensus.Change, force, verifyOnly bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range changes {
		if w.refuse != nil {
			if err := w.refuse(group, c, verifyOnly); err != nil {
				return err
			}
		}
		switch {
		case c.Kind == consensus.Promote && !w.ready[c.Member]:
			return &consensus.MembersError{Reason: consensus.ReasonNotCaughtUp, Text: "not caught up"}
		case c.Kind == consensus.Remove && len(w.groups[group].Voters) == 2 && slices.Contains(w.groups[group].Voters, c.Member) && !force:
			return &consensus.MembersError{Reason: consensus.ReasonLastVoter, Text: "one would be left"}
		}
	}
	return nil
}

func (w *world) VerifyMembers(_ context.Context, group uint64, changes []consensus.Change, force bool) error {
	return w.verifyChange(group, changes, force, true)
}

func (w *world) ChangeMembers(_ context.Context, group uint64, changes []consensus.Change, force bool) error {
	if err := w.verifyChange(group, changes, force, false); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	g := w.groups[group]
	for _, c := range changes {
		without := func(list []uint64) []uint64 {
			return slices.DeleteFunc(slices.Clone(list), func(id uint64) bool { return id == c.Member })
		}
		had := slices.Contains(slices.Concat(g.Voters, g.Learners), c.Member)
		switch c.Kind {
		case consensus.AddLearner:
			if had {
				continue
			}
			g.Learners = append(g.Learners, c.Member)
			w.dirIDs[c.Member] = c.DirID
		case consensus.Promote:
			if slices.Contains(g.Voters, c.Member) {
				continue
			}
			g.Learners, g.Voters = without(g.Learners), append(g.Voters, c.Member)
		case consensus.Remove:
			if !had {
				continue
			}
			g.Learners, g.Voters = without(g.Learners), without(g.Voters)
		}
		w.log = append(w.log, fmt.Sprintf("group %d: %d of %d", group, c.Kind, c.Member))
	}
	return nil
}

func (w *world) TransferLeader(_ context.Context, group, to uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, fmt.Sprintf("group %d: to %d", group, to))
	return nil
}

func (w *world) Status(context.Context) (consensus.Status, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := consensus.Status{ID: 1}
	for _, id := range []uint64{systemGroup, kvGroup} {
		g := *w.groups[id]
		g.Voters, g.Learners = slices.Clone(g.Voters), slices.Clone(g.Learners)
		out.Groups = append(out.Groups, g)
	}
	return out, nil
}

// testLeadership implements leader.Leadership for one group of a world.
type testLeadership struct {
	w     *world
	group uint64
}

func (r testLeadership) Leader() (uint64, uint64) {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	return r.w.groups[r.group].Leader, 1
}

func (testLeadership) Changed() <-chan struct{} { return nil }

func (w *world) reconcile() { require.NoError(w.t, w.s.Reconcile(w.t.Context())) }

func (w *world) add(id uint64) (Member, []Member, error) {
	return w.s.Add(w.t.Context(), AddRequest{ID: id, RaftAddr: fmt.Sprintf("10.0.0.%d:2380", id)})
}

// join sends a JoinRequest of a process with the certificate of the member id and the data directory dirID.
func (w *world) join(id, dirID uint64) error {
	body, err := cbor.Marshal(JoinRequest{ID: id, DirID: dirID})
	require.NoError(w.t, err)
	_, err = w.s.serveJoin(w.t.Context(), id, body)
	return err
}

func (w *world) state(id uint64) State {
	all, err := w.s.List(w.t.Context(), false)
	require.NoError(w.t, err)
	if m := find(all, id); m != nil {
		return m.State
	}
	return ""
}

func (w *world) refused(err error, reason string) {
	w.t.Helper()
	var f *fault.Fault
	require.ErrorAs(w.t, err, &f)
	require.Equal(w.t, fault.FailedPrecondition, f.Kind, "%v", f)
	require.Equal(w.t, reason, f.Reason, "%v", f)
}

// in calls f while Run is running, which makes the changes for which f waits. It returns the error of f.
func (w *world) in(f func() error) error {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = w.s.Run(ctx)
	}()
	err := f()
	cancel()
	<-done
	return err
}

// TestUnauthenticatedEntriesDoNotVote checks that added entries stay waiting and change no group until a process joins,
// that at most MaxWaiting are accepted, and that they are deleted after WaitingTime.
func TestUnauthenticatedEntriesDoNotVote(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	for id := uint64(4); id <= 6; id++ {
		m, all, err := w.add(id)
		require.NoError(t, err)
		require.Equal(t, Waiting, m.State)
		require.Equal(t, Voter, m.Wanted)
		require.Equal(t, fmt.Sprintf("http://10.0.0.%d:2380", id), m.RaftAddr)
		require.Equal(t, []string{fmt.Sprintf("http://10.0.0.%d:50051", id)}, m.ClientURLs)
		require.Len(t, all, int(id))
	}
	w.reconcile()
	require.Empty(t, w.log, "no group has heard of them")
	for id := uint64(7); id <= 11; id++ {
		_, _, err := w.add(id)
		require.NoError(t, err)
	}
	_, _, err := w.add(12)
	w.refused(err, ReasonTooMany)
	_, _, err = w.add(4)
	require.NoError(t, err, "asked again")
	w.refused(w.s.Transfer(t.Context(), 4), ReasonIsLearner)
	_, err = w.s.Promote(t.Context(), 4)
	w.refused(err, ReasonNotReady)

	// One entry is removed, and its ID can be used again. The others are deleted after WaitingTime (10 minutes).
	_, err = w.s.Remove(t.Context(), 4, false)
	require.NoError(t, err)
	_, _, err = w.add(4)
	require.NoError(t, err)
	w.now = w.now.Add(WaitingTime)
	w.reconcile()
	all, err := w.s.List(t.Context(), false)
	require.NoError(t, err)
	require.Len(t, all, 3)
	require.Empty(t, w.log)
}

// TestAddIsChecked checks the errors of Add for invalid and conflicting requests, and the defaults of a request without
// an ID.
func TestAddIsChecked(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	for name, c := range map[string]struct {
		q      AddRequest
		reason string
	}{
		"no address":        {AddRequest{ID: 4}, ""},
		"no host":           {AddRequest{ID: 4, RaftAddr: "http://:2380"}, ""},
		"bad port":          {AddRequest{ID: 4, RaftAddr: "10.0.0.4:0"}, ""},
		"large id":          {AddRequest{ID: 1 << 63, RaftAddr: "10.0.0.4"}, ""},
		"line break":        {AddRequest{ID: 4, RaftAddr: "10.0.0.4", Name: "a\nb"}, ""},
		"other address":     {AddRequest{ID: 2, RaftAddr: "10.0.0.9"}, ReasonExists},
		"address of others": {AddRequest{ID: 9, RaftAddr: "http://10.0.0.2:2380"}, ReasonAddressTaken},
	} {
		_, _, err := w.s.Add(t.Context(), c.q)
		if c.reason == "" {
			require.True(t, fault.Is(err, fault.InvalidArgument), "%s: %v", name, err)
			continue
		}
		w.refused(err, c.reason)
	}
	m, _, err := w.s.Add(t.Context(), AddRequest{RaftAddr: "host-4", Learner: true})
	require.NoError(t, err)
	require.Positive(t, m.ID)
	require.LessOrEqual(t, m.ID, uint64(MaxID))
	require.Empty(t, m.Name, "a member that was given an id has no name before it starts, as in etcd")
	require.Equal(t, "host-4:2380", HostPort(m.RaftAddr))
}

// TestMemberBecomesVoter checks that a member is added to the group kv and then to system, first as a learner and then
// as a voter, and that each step waits until the former one is done in both groups.
func TestMemberBecomesVoter(t *testing.T) {
	w := newWorld(t, 1)
	w.refused(w.join(2, 22), ReasonNotFound)
	_, _, err := w.add(2)
	require.NoError(t, err)
	body, err := cbor.Marshal(JoinRequest{ID: 2, DirID: 22})
	require.NoError(t, err)
	_, err = w.s.serveJoin(t.Context(), 3, body)
	require.True(t, fault.Is(err, fault.PermissionDenied), "with the certificate of another: %v", err)
	require.NoError(t, w.join(2, 22))
	require.NoError(t, w.join(2, 22), "it may ask again")
	w.refused(w.join(2, 23), ReasonWiped)
	w.reconcile()
	require.Equal(t, Learning, w.state(2))
	require.Equal(t, uint64(22), w.dirIDs[2])
	w.ready[2] = true
	w.reconcile()
	require.Equal(t, Voting, w.state(2))
	require.Equal(t, []string{"group 2: 1 of 2", "group 1: 1 of 2", "group 2: 2 of 2", "group 1: 2 of 2"}, w.log)
	_, err = w.s.Promote(t.Context(), 2)
	w.refused(err, ReasonNotLearner)
	require.NoError(t, w.s.Transfer(t.Context(), 2))
	require.NoError(t, w.s.Transfer(t.Context(), 1), "it leads already")
	w.refused(w.s.Transfer(t.Context(), 7), ReasonNotFound)
}

// TestPromote checks that a member added as a learner becomes a voter only by Promote, which returns ReasonNotReady for
// a learner that has not caught up.
func TestPromote(t *testing.T) {
	w := newWorld(t, 1)
	_, _, err := w.s.Add(t.Context(), AddRequest{ID: 2, RaftAddr: "10.0.0.2", Learner: true})
	require.NoError(t, err)
	require.NoError(t, w.join(2, 22))
	w.reconcile()
	_, err = w.s.Promote(t.Context(), 2)
	w.refused(err, ReasonNotReady)
	w.ready[2] = true
	w.reconcile()
	require.Equal(t, Learning, w.state(2))
	require.NoError(t, w.in(func() error { _, err := w.s.Promote(t.Context(), 2); return err }))
	require.Equal(t, Voting, w.state(2))
}

// TestNoVoteAtAWrongAddress checks that a learner that has caught up is not promoted while its record has a wrong
// address.
func TestNoVoteAtAWrongAddress(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	_, _, err := w.s.Add(t.Context(), AddRequest{ID: 4, RaftAddr: "10.0.0.99:2380"})
	require.NoError(t, err)
	require.NoError(t, w.join(4, 44))
	w.ready[4] = true
	w.reconcile()
	w.reconcile()
	require.Equal(t, Learning, w.state(4))
	require.Equal(t, []uint64{1, 2, 3}, w.groups[kvGroup].Voters)
	_, err = w.s.Promote(t.Context(), 4)
	w.refused(err, ReasonUnverified)
	_, err = w.s.Update(t.Context(), UpdateRequest{ID: 4, RaftAddr: "10.0.0.4:2380"})
	require.NoError(t, err)
	w.reconcile()
	require.Equal(t, Voting, w.state(4))
}

// TestRemovalWithoutACredential checks that a caller without a credential can remove neither a voter of a cluster with
// one to three voters, nor an entry that an operator added or is replacing.
func TestRemovalWithoutACredential(t *testing.T) {
	remove := func(w *world, id uint64) error {
		return w.in(func() error { _, err := w.s.RemoveOpen(t.Context(), id); return err })
	}
	for _, first := range [][]uint64{{1}, {1, 2}, {1, 2, 3}} {
		w := newWorld(t, first...)
		for _, id := range first {
			w.refused(remove(w, id), ReasonLastVoter)
		}
		w.refused(remove(w, 9), ReasonNotFound)
		require.Empty(t, w.log)
	}

	// Of two removals from four voters, the second is refused before the first has reached the groups.
	w := newWorld(t, 1, 2, 3, 4)
	_, err := w.s.removeOnLeader(t.Context(), removeAsk{ID: 4, Open: true})
	require.NoError(t, err)
	require.Equal(t, Leaving, w.state(4))
	_, err = w.s.removeOnLeader(t.Context(), removeAsk{ID: 3, Open: true})
	w.refused(err, ReasonLastVoter)
	w.reconcile()
	require.Equal(t, []uint64{1, 2, 3}, w.groups[kvGroup].Voters)

	// Learners, and entries whose process has not joined, may be removed.
	_, _, err = w.s.Add(t.Context(), AddRequest{ID: 5, RaftAddr: "10.0.0.5", Learner: true})
	require.NoError(t, err)
	require.NoError(t, w.join(5, 55))
	w.reconcile()
	require.NoError(t, remove(w, 5))
	for id := uint64(20); id < 20+MaxWaiting; id++ {
		_, _, err = w.s.Add(t.Context(), AddRequest{ID: id, RaftAddr: fmt.Sprintf("10.0.0.%d", id), Open: true})
		require.NoError(t, err)
	}
	_, _, err = w.s.Add(t.Context(), AddRequest{ID: 30, RaftAddr: "10.0.0.30", Open: true})
	w.refused(err, ReasonTooMany)
	require.NoError(t, remove(w, 20))

	// An operator's entry cannot be removed. Otherwise an unauthenticated caller could replace it by an entry with
	// another address.
	_, _, err = w.add(6)
	require.NoError(t, err, "entries of callers without a credential do not count for the operator's limit")
	w.refused(remove(w, 6), ReasonOperator)
	require.NoError(t, w.in(func() error { _, err := w.s.Replace(t.Context(), 3, false); return err }))
	w.refused(remove(w, 3), ReasonOperator)
	require.Equal(t, Waiting, w.state(3))
	_, err = w.s.Remove(t.Context(), 3, false)
	require.NoError(t, err, "an operator may")
}

// losing is a leader.Caller that runs a command on the leader. It replaces the first response by an error, as if the
// connection were lost.
type losing struct {
	w    *world
	lost int
}

func (l *losing) Call(ctx context.Context, _ uint64, command string, body []byte, caller *cloud.Caller) ([]byte, error) {
	answer, err := l.w.leads.Serve(ctx, command, body, caller)
	if l.lost == 0 {
		l.lost++
		if err := l.w.s.Reconcile(ctx); err != nil {
			return nil, err
		}
		return nil, errors.New("connection lost")
	}
	return answer, err
}

func (*losing) Open(context.Context, uint64, string, []byte, *cloud.Caller, func([]byte) error) error {
	return errors.New("no streams")
}

// TestRepeatedCalls checks that Promote and Remove succeed if the response of the leader is lost and the command is
// repeated, and that a second call of the same kind is refused.
func TestRepeatedCalls(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	follower := func(to *losing) *Service {
		return New(Options{Store: w.store, Commands: leader.NewCommands(2, leadertest.NewLeadership(1), to), Self: 2, Consensus: w, Log: slog.New(slog.DiscardHandler)})
	}
	_, _, err := w.s.Add(t.Context(), AddRequest{ID: 4, RaftAddr: "10.0.0.4", Learner: true})
	require.NoError(t, err)
	require.NoError(t, w.join(4, 44))
	w.reconcile()
	w.ready[4] = true
	way := &losing{w: w}
	_, err = follower(way).Promote(t.Context(), 4)
	require.NoError(t, err)
	require.Equal(t, 1, way.lost)
	require.Equal(t, Voting, w.state(4))
	_, err = follower(way).Promote(t.Context(), 4)
	w.refused(err, ReasonNotLearner)

	way = &losing{w: w}
	_, err = follower(way).Remove(t.Context(), 4, false)
	require.NoError(t, err)
	require.Equal(t, 1, way.lost)
	require.Empty(t, w.state(4))
	_, err = follower(way).Remove(t.Context(), 4, false)
	w.refused(err, ReasonNotFound)
	_, err = follower(way).Promote(t.Context(), 4)
	w.refused(err, ReasonNotFound)
}

// TestChangeIsVerifiedInAllGroups checks that a removal that one group would refuse is made in no group.
func TestChangeIsVerifiedInAllGroups(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	w.refuse = func(group uint64, _ consensus.Change, _ bool) error {
		if group == systemGroup {
			return &consensus.MembersError{Reason: consensus.ReasonNoQuorum, Text: "too few"}
		}
		return nil
	}
	_, err := w.s.Remove(t.Context(), 3, true)
	w.refused(err, ReasonQuorum)
	w.reconcile()
	require.Empty(t, w.log)
	require.Equal(t, Voting, w.state(3))
}

// TestNewLeaderContinues simulates the loss of the leader after the group kv has removed a member and before system
// has. The next leader must complete the removal.
func TestNewLeaderContinues(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	lost := errors.New("leader lost")
	w.refuse = func(group uint64, _ consensus.Change, verifyOnly bool) error {
		if group == systemGroup && !verifyOnly {
			return lost
		}
		return nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, w.in(func() error {
		others, err := w.s.Remove(ctx, 3, false)
		require.Len(t, others, 2, "kv has it")
		return err
	}))
	cancel()
	require.Equal(t, []string{"group 2: 3 of 3"}, w.log)
	require.Equal(t, Leaving, w.state(3))
	_, _, err := w.add(3)
	w.refused(err, ReasonBusy)
	w.refuse = nil
	w.open(nil)
	w.reconcile()
	require.Equal(t, []string{"group 2: 3 of 3", "group 1: 3 of 3"}, w.log)
	require.Empty(t, w.state(3))
	_, _, err = w.add(3)
	w.refused(err, ReasonRemoved)
	w.refused(w.join(3, 33), ReasonRemoved)
	_, err = w.s.Remove(t.Context(), 3, false)
	w.refused(err, ReasonNotFound)
	_, err = w.s.Remove(t.Context(), 2, false)
	w.refused(err, ReasonLastVoter)
}

// TestReplace checks that a replaced member is removed from both groups, that its entry then waits without expiry, and
// that only a process with another data directory can join as it.
func TestReplace(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	w.refused(w.join(3, 33), ReasonWiped)
	require.NoError(t, w.in(func() error { _, err := w.s.Replace(t.Context(), 3, false); return err }))
	require.Equal(t, Waiting, w.state(3))
	require.Equal(t, []string{"group 2: 3 of 3", "group 1: 3 of 3"}, w.log)
	w.now = w.now.Add(10 * WaitingTime)
	w.reconcile()
	require.Equal(t, Waiting, w.state(3))
	_, err := w.s.Replace(t.Context(), 3, false)
	require.NoError(t, err, "nothing is left to remove")
	require.NoError(t, w.join(3, 34))
	w.ready[3] = true
	w.reconcile()
	w.reconcile()
	require.Equal(t, Voting, w.state(3))
	require.NoError(t, w.in(func() error { _, err := w.s.Replace(t.Context(), 3, false); return err }))
	w.refused(w.join(3, 34), ReasonWiped)
	require.NoError(t, w.join(3, 35))
}

// TestReplaceLeaderOfAnotherGroup replaces an unreachable member that leads the group kv. The removal must continue
// with the next leader of kv.
func TestReplaceLeaderOfAnotherGroup(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	w.groups[kvGroup].Leader = 3
	w.s.opts.Peers = dead{w}
	require.NoError(t, w.in(func() error { _, err := w.s.Replace(t.Context(), 3, false); return err }))
	require.Equal(t, Waiting, w.state(3))
	require.Equal(t, []string{"group 2: 3 of 3", "group 1: 3 of 3"}, w.log)
}

// dead implements Peers with unreachable members. After the first call, member 1 leads the group kv.
type dead struct{ w *world }

func (d dead) Direct(_ context.Context, member uint64, _ string, _ []byte) ([]byte, error) {
	d.w.mu.Lock()
	defer d.w.mu.Unlock()
	d.w.groups[kvGroup].Leader = 1
	return nil, fmt.Errorf("member %d cannot be reached: %w", member, leader.ErrNotSent)
}

func (dead) Verify(context.Context, string, uint64) error { return errors.New("cannot be reached") }

func (dead) HandleDirect(string, func(context.Context, uint64, []byte) ([]byte, error))    {}
func (dead) HandleNonMember(string, func(context.Context, uint64, []byte) ([]byte, error)) {}
func (dead) Members() map[uint64]string                                                    { return nil }
func (dead) SetMembers(map[uint64]string, []uint64) error                                  { return nil }

// TestRemovalOfLeaderWithoutTransferTarget removes a leader that has received messages from no other voter, to which it
// could transfer the leadership. It must be removed from both groups without a transfer.
func TestRemovalOfLeaderWithoutTransferTarget(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	for _, g := range w.groups {
		g.Leader = 1
	}
	_, err := w.s.removeOnLeader(t.Context(), removeAsk{ID: 1})
	require.NoError(t, err)
	w.reconcile() // no voter can be the successor: the removal itself ends the leadership
	require.Empty(t, w.state(1))
	require.Equal(t, []string{"group 2: 3 of 1", "group 1: 3 of 1"}, w.log)
}

// TestUpdate checks that Update stores a new address of a joined member only if the member presents its certificate
// there, and the errors of Update.
func TestUpdate(t *testing.T) {
	w := newWorld(t, 1, 2)
	_, err := w.s.Update(t.Context(), UpdateRequest{ID: 2, RaftAddr: "10.0.0.1:2380"})
	w.refused(err, ReasonAddressTaken)
	_, err = w.s.Update(t.Context(), UpdateRequest{ID: 9, RaftAddr: "10.0.0.9:2380"})
	w.refused(err, ReasonNotFound)
	// An address at which the member does not present its certificate is refused, because it would isolate the member.
	for address, answers := range map[string]uint64{"10.0.0.7:2380": 0, "10.0.0.8:2380": 1} {
		w.at = map[string]uint64{address: answers}
		_, err = w.s.Update(t.Context(), UpdateRequest{ID: 2, RaftAddr: address})
		w.refused(err, ReasonUnverified)
		unchanged, err := w.s.List(t.Context(), false)
		require.NoError(t, err)
		require.Equal(t, "https://10.0.0.2:2380", find(unchanged, 2).RaftAddr)
	}
	_, err = w.s.Update(t.Context(), UpdateRequest{ID: 2, RaftAddr: "http://10.0.0.2"})
	require.NoError(t, err, "the same address in another spelling")
	w.at = map[string]uint64{"10.0.0.9:2380": 2}
	all, err := w.s.Update(t.Context(), UpdateRequest{ID: 2, RaftAddr: "10.0.0.9:2380", ClientURLs: []string{"https://h:1"}})
	require.NoError(t, err)
	require.Equal(t, "http://10.0.0.9:2380", find(all, 2).RaftAddr)
	require.Equal(t, []string{"https://h:1"}, find(all, 2).ClientURLs)
}

// TestListBeforeTheRecordsExist checks that List returns the members of the first configuration until the leader has
// written their records.
func TestListBeforeTheRecordsExist(t *testing.T) {
	w := newWorld(t)
	for _, serializable := range []bool{true, false} {
		none, err := w.s.List(t.Context(), serializable)
		require.NoError(t, err)
		require.Empty(t, none, "of one that joins")
	}
	w.open([]Member{{ID: 1, RaftAddr: "https://10.0.0.1:2380"}, {ID: 2, RaftAddr: "https://10.0.0.2:2380"}})
	for _, serializable := range []bool{true, false} {
		all, err := w.s.List(t.Context(), serializable)
		require.NoError(t, err)
		require.Len(t, all, 2)
		require.True(t, all[1].Votes())
	}
	w.reconcile()
	all, err := w.s.List(t.Context(), false)
	require.NoError(t, err)
	require.Len(t, all, 2)
}

// TestRestoredRecordsAreReplaced checks that records restored from another cluster's backup are replaced by the members
// of the first configuration, once, and that the IDs of removed members can be used again.
func TestRestoredRecordsAreReplaced(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	require.NoError(t, w.in(func() error { _, err := w.s.Remove(t.Context(), 3, false); return err }))
	w.cluster = 77
	w.open([]Member{{ID: 3, Name: "node-3", RaftAddr: "https://10.0.0.3:2380"}})
	w.reconcile()
	all, err := w.s.List(t.Context(), false)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, Voting, w.state(3))
	w.reconcile()
	_, _, err = w.add(1)
	require.NoError(t, err)
	w.reconcile()
	require.Equal(t, Waiting, w.state(1), "once only")
}
