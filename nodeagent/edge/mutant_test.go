//go:build mutant

package edge

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables single rules of the package and checks that the test of each then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ForwardDenied, TestDenied, "reaches the denied address 198.51.100.2")
	mutanttest.Notices(t, mutant.LoseReturn, TestFloatingServiceAffinity, "i/o timeout")
	mutanttest.Notices(t, mutant.KeepTranslated, TestRemovedFloatingIP, "a connection to the former port continues")
}
