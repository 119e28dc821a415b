//go:build mutant

package watch

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants sends events out of order.
func TestMutants(t *testing.T) {
	mutanttest.Noticed(t, mutant.ReorderWatch, watchFromThePast)
}
