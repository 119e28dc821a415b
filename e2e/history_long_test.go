//go:build long

package e2e

import (
	"errors"
	"testing"
	"time"

	"github.com/trivet-cloud/trivet/e2e/history"
)

// TestHistoryNoticesMutants runs a control plane with a mutant (a deliberate fault) under buyers' calls and injected
// faults. It checks that package history finds a violation for each mutant within six runs, from the responses and the
// journal alone. It repeats the run, because a mutant has an effect only after a fault at the right time.
func TestHistoryNoticesMutants(t *testing.T) {
	const most, ops = 6, 800
	for name, faults := range map[string][]string{
		"stale-read":  {"the leader is cut off", "a follower is cut off"},
		"own-clock":   {"the leader's clock jumps", "the leader's clock jumps and it is killed"},
		"late-commit": {"a follower is cut off"},
	} {
		t.Run(name, func(t *testing.T) {
			seed := number(t, seedEnv, uint64(time.Now().UnixNano()))
			for n := range uint64(most) {
				var found *history.Violation
				t.Run("round", func(t *testing.T) {
					s := newSaga(t, seed+n, name)
					ctx := s.context(3 * time.Minute)
					s.live(ctx, ops, faults...)
					_, err := s.judge(ctx)
					t.Logf("seed %d: %v", seed+n, err)
					errors.As(err, &found)
				})
				if found != nil || t.Failed() {
					return
				}
			}
			t.Fatalf("%d runs found no violation", most)
		})
	}
}
