//go:build mutant

package disk

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables the comparison of the SHA-256 after a fetch, and checks that TestEnsureVerifies then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.SkipImageDigest, TestEnsureVerifies, `image has another checksum`)
}
