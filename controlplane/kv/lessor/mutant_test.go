//go:build mutant

package lessor

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that a test fails if a new leader lets leases expire too early.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ExpireEarly, TestNewRestartsTTLs, `Should be empty, but was [2]`)
}
