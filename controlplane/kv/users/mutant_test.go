//go:build mutant

package users

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that a test fails if tokens remain valid after a change of their user's password.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.KeepOldTokens, TestOldTokens, `invalid auth token`)
}
