//go:build mutant

package leader_test

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants makes Call repeat commands without an idempotency key after a lost response (mutant RepeatUnkeyed) and
// checks that TestLostCalls fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.RepeatUnkeyed, TestLostCalls, "answer lost")
}
