//go:build mutant

package disk

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants disables each safety rule of the package in turn, and checks that a test then fails.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.SkipImageDigest, TestEnsureVerifies, `image has another checksum`)
	mutanttest.Notices(t, mutant.EvictUsedImage, TestTrim, `an image in use was removed`)
}
