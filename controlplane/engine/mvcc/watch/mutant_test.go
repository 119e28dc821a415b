//go:build mutant

package watch

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that TestWatcherFarBehind fails when a mutant loses or reorders events of watchers.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.SkipWatchEvent, TestWatcherFarBehind, `Not equal`)
	mutanttest.Notices(t, mutant.ReorderWatch, TestWatcherFarBehind, `Not equal`)
}
