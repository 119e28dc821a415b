//go:build mutant

package image

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants breaks the rules of images: verified bytes, a majority of copies, and which files may be imported.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.SkipImageDigest, TestPull, `TestPull/one_is_corrupt`)
	mutanttest.Notices(t, mutant.AvailableEarly, TestMajority, `Not equal`)
	mutanttest.Notices(t, mutant.FollowImportLinks, TestSource, `TestSource/a_link_to_a_file_outside`)
	mutanttest.Notices(t, mutant.ImportAnywhere, TestSource, `TestSource/outside`)
	mutanttest.Notices(t, mutant.ImportForeignDir, TestSource, `TestSource/another_org's_directory`)
}
