//go:build mutant

package password

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that TestMissesAreLimitedPerNetwork fails if wrong passwords are not limited (mutant
// UnlimitedGuesses).
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.UnlimitedGuesses, TestMissesAreLimitedPerNetwork)
}
