//go:build mutant

package watch

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants loses and reorders events of watchers.
func TestMutants(t *testing.T) {
	mutanttest.Noticed(t, mutant.SkipWatchEvent, watcherFarBehind)
	mutanttest.Noticed(t, mutant.ReorderWatch, watcherFarBehind)
}
