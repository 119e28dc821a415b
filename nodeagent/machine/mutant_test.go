//go:build mutant

package machine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Each broken rule shows in some plan.
func TestMutants(t *testing.T) {
	require.Empty(t, violation())
	for _, name := range []string{startTwice, destroyUnruled, applyForeign} {
		mutant.Set(name)
		require.NotEmpty(t, violation(), name)
	}
	mutant.Set("")
}
