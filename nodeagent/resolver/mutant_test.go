//go:build mutant

package resolver

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables single rules of the package and checks that the test of each then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.OpenResolver, TestOutside, "An error is expected")
	mutanttest.Notices(t, mutant.ForwardPrivate, TestResolve, "forwarded")
}
