//go:build mutant

package balancer

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables single rules of the package and checks that the test of each then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.BalanceUnhealthy, TestRules, "testdata/rules")
}
