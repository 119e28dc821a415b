//go:build mutant

package restapi

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that a test fails if a rule of forwarded requests is broken.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.AcceptAnyForward, TestForwardedRequestsAreAuthenticated, "was accepted")
	mutanttest.Notices(t, mutant.ReplayForward, TestForwardedRequestsAreAuthenticated, "a replay")
}
