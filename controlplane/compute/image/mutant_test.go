//go:build mutant

package image

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// The tests of this package fail if a rule of copying images is broken.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.MinorityImage, TestMajority, "one of three is no majority")
	mutanttest.Notices(t, mutant.SkipImageDigest, TestPull)
}
