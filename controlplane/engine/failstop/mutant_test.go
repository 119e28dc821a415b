//go:build mutant

package failstop

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that a test fails with the mutant WriteAfterFailure, which does not block writes after the first
// I/O error.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.WriteAfterFailure, TestCallsBlockAfterFailure, `Error`)
}
