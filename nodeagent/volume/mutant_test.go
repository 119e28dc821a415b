//go:build mutant

package volume

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that the tests notice a volume that is opened for an older attachment or twice, and one that counts
// as flushed while it is open.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.OpenStaleVolume, TestOlderAttachmentIsRefused)
	mutanttest.Notices(t, mutant.OpenVolumeTwice, TestOpenVolumeIsLocked)
	mutanttest.Notices(t, mutant.FlushOpenVolume, TestOpenVolumeIsLocked)
}
