//go:build mutant

package image

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants breaks the rules of images: verified bytes, a majority of copies, and which files may be imported.
func TestMutants(t *testing.T) {
	mutanttest.Noticed(t, mutant.SkipImageDigest, pullVerifies)
	mutanttest.Noticed(t, mutant.AvailableEarly, availableWithMajority)
	mutanttest.Noticed(t, mutant.FollowImportLinks, importRules)
	mutanttest.Noticed(t, mutant.ImportAnywhere, importRules)
	mutanttest.Noticed(t, mutant.ImportForeignDir, importRules)
}
