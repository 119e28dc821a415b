package membership

import (
	"context"
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
