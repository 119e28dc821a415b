//go:build mutant

package disk

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants keeps fetched bytes without comparing their SHA-256.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.SkipImageDigest, TestEnsureVerifies, `image has another checksum`)
}
