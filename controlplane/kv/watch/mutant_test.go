//go:build mutant

package watch

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants sends events out of order, and leaves out compacted ones.
func TestMutants(t *testing.T) {
	mutanttest.Noticed(t, mutant.ReorderWatch, watchFromThePast)
	mutanttest.Noticed(t, mutant.WatchCompacted, compactedWatchIsCanceled)
}
