//go:build mutant

package volume

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of the rules for opening, flushing and flattening volumes, and
// checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.OpenStaleVolume, TestOlderAttachmentIsRefused)
	mutanttest.Notices(t, mutant.OpenVolumeTwice, TestOpenVolumeIsLocked)
	mutanttest.Notices(t, mutant.FlushOpenVolume, TestOpenVolumeIsLocked)
	mutanttest.Notices(t, mutant.FlattenOverlayOnly, TestFlatten)
	mutanttest.Notices(t, mutant.RecordIncomplete, TestRecordFlattened)
	mutanttest.Notices(t, mutant.SkipConfirm, TestAttachmentEndsWhileQEMUOpens)
	for _, name := range []string{
		mutant.OpenStaleVolume, mutant.OpenVolumeTwice, mutant.FlushOpenVolume, mutant.OpenUnflushedImage, mutant.OpenBeforeRecord,
	} {
		mutanttest.Notices(t, name, TestRBDAttachments)
	}
}
