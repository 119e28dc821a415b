//go:build mutant

package jointoken

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants checks that secondNewcomer, which TestBring calls, returns an error with the mutant ReuseInvitation,
// which accepts a token for two keys.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	require.NoError(t, newWorld(t).secondNewcomer())
	mutant.Set(mutant.ReuseInvitation)
	require.Error(t, newWorld(t).secondNewcomer())
}
