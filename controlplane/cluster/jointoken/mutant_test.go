//go:build mutant

package jointoken

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// A token that works for two keys is noticed.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	require.NoError(t, newWorld(t).secondNewcomer())
	mutant.Set(mutant.ReuseInvitation)
	require.Error(t, newWorld(t).secondNewcomer())
}
