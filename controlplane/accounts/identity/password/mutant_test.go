//go:build mutant

package password

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// The tests of this package fail if wrong passwords are not counted.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.UnlimitedGuesses, TestMissesAreLimitedPerNetwork)
}
