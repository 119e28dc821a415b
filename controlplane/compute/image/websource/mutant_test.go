//go:build mutant

package websource

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules about sources, and checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.FetchAnyAddress, TestRefusedAddress)
	mutanttest.Notices(t, mutant.FetchAnyLength, TestRefusals, "too long")
}
