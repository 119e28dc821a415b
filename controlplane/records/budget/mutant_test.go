//go:build mutant

package budget

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Without budgets (mutant NoWriteBudget) the tests of this package fail.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	mutant.Set(mutant.NoWriteBudget)
	require.Error(t, checkFlood())
}
