//go:build mutant

package image

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules of images, and checks that a test notices it. The
// rules are that checksums are verified, that AVAILABLE and the acknowledgement of a part need a majority of copies,
// that acknowledged parts remain until the image is AVAILABLE, that expired uploads free their space, and that only
// permitted files are imported.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.SkipImageDigest, TestPull, `TestPull/one_is_corrupt`)
	mutanttest.Notices(t, mutant.AvailableEarly, TestMajority, `Not equal`)
	mutanttest.Notices(t, mutant.AckPartEarly, TestPartNeedsMajority, `acknowledged without a majority`)
	mutanttest.Notices(t, mutant.DropPartsEarly, TestImporterFailsBeforeMajority, `an acknowledged part was deleted`)
	mutanttest.Notices(t, mutant.KeepExpiredUpload, TestUploadExpires, `the expired session keeps space`)
	mutanttest.Notices(t, mutant.FollowImportLinks, TestSource, `TestSource/a_link_to_a_file_outside`)
	mutanttest.Notices(t, mutant.ImportAnywhere, TestSource, `TestSource/outside`)
	mutanttest.Notices(t, mutant.ImportForeignDir, TestSource, `TestSource/another_org's_directory`)
}
