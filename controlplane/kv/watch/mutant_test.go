//go:build mutant

package watch

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants sends events out of order, and leaves out compacted ones.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ReorderWatch, TestWatchFromOldRevision, `a=4@6 a=3@5`)
	mutanttest.Notices(t, mutant.WatchCompacted, TestWatchFromCompactedRevisionIsCanceled, `Should be true`)
}
