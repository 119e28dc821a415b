//go:build mutant

package users

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants keeps tokens valid for longer than their password.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.KeepOldTokens, TestOldTokens, `invalid auth token`)
}
