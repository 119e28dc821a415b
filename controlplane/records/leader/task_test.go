package leader_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
)

// TestWhile checks that While calls its function once in each term in which this member leads, ends the function's
// context with the term, and returns only after the function has returned.
func TestWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := leadertest.NewLeadership(2)
		var log []string
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			leader.While(ctx, l, 1, func(ctx context.Context, term uint64) {
				log = append(log, fmt.Sprintf("begin %d", term))
				<-ctx.Done()
				log = append(log, fmt.Sprintf("end %d: %v", term, context.Cause(ctx)))
			})
		}()
		for _, c := range []struct {
			elect uint64
			says  []string
		}{
			{3, nil},
			{1, []string{"begin 3"}},
			{1, []string{"end 3: this member no longer leads in the term", "begin 4"}},
			{2, []string{"end 4: this member no longer leads in the term"}},
			{0, nil},
			{1, []string{"begin 7"}},
		} {
			log = nil
			l.Elect(c.elect)
			synctest.Wait()
			require.Equal(t, c.says, log)
		}
		cancel()
		<-done
		require.Equal(t, []string{"begin 7", "end 7: context canceled"}, log)
	})
}

// TestWhileCallsAgainWithinATerm checks that While calls a function again, with a new context, if it returns before its
// term ends.
func TestWhileCallsAgainWithinATerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		calls := 0
		var last context.Context
		leader.While(ctx, leadertest.NewLeadership(1), 1, func(inTerm context.Context, _ uint64) {
			if last != nil {
				require.Error(t, last.Err(), "the context of an earlier call has ended")
			}
			require.NoError(t, inTerm.Err())
			last = inTerm
			if calls++; calls == 3 {
				cancel()
			}
		})
		require.Equal(t, 3, calls)
	})
}

// TestInTermOfAnEarlierTerm calls InTerm with a term that has already ended. The context must end with ErrTermOver.
func TestInTermOfAnEarlierTerm(t *testing.T) {
	l := leadertest.NewLeadership(1)
	l.Elect(1)
	ctx, stop := leader.InTerm(t.Context(), l, 1, 1)
	defer stop()
	<-ctx.Done()
	require.ErrorIs(t, context.Cause(ctx), leader.ErrTermOver)
}
