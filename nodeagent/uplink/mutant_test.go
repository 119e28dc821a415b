//go:build mutant

package uplink

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Each broken rule shows in what is handed on.
func TestMutants(t *testing.T) {
	require.Empty(t, violation())
	for _, name := range []string{followLowerTerm, deliverIncomplete} {
		mutant.Set(name)
		require.NotEmpty(t, violation(), name)
	}
	mutant.Set("")
}
