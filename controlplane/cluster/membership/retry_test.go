package membership

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

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

func (*losing) Exchange(context.Context, uint64, string, []byte, *cloud.Caller, leader.Pipe) error {
	return errors.New("no exchanges")
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
