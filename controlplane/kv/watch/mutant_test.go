//go:build mutant

package watch

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that the tests fail if events are sent out of order, or compacted events are left out.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ReorderWatch, TestWatchFromOldRevision, `a=4@6 a=3@5`)
	mutanttest.Notices(t, mutant.WatchCompacted, TestWatchFromCompactedRevisionIsCanceled, `Should be true`)
}
