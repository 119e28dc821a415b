//go:build mutant

package metadata

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables single rules of the package and checks that the test of each then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ForeignPortToken, TestTokensOverTheNetwork, "expected: 401")
	mutanttest.Notices(t, mutant.KeepHopLimit, TestPacketsHaveHopLimitOne, "packet 1 from")
}
