//go:build mutant

package leader_test

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// The tests of this package fail if a command without an idempotency key is sent again after its leader was lost.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.RepeatUnkeyed, TestLostCalls, "answer lost")
}
