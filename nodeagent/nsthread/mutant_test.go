//go:build mutant

package nsthread

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables the rule about the main thread and checks that the test of it then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.EnterMainThread, TestMainThreadKeepsNamespace, "the function runs on the main thread")
}
