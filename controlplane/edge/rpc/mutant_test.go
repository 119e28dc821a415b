//go:build mutant

package rpc

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that TestOpenStreamEndsWithItsToken notices when streams go on after their token became invalid.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.KeepInvalidStreams, TestOpenStreamEndsWithItsToken, "Should be true")
}
