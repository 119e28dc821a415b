//go:build mutant

package budget

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants turns budgets off (mutant NoWriteBudget) and checks that checkFlood notices it.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	mutant.Set(mutant.NoWriteBudget)
	require.Error(t, checkFlood())
}
