//go:build mutant

package session

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants checks that Confirm goes on after the answer no with the mutant ActUnasked, so that TestConfirm fails with
// that mutant.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	for name, goesOn := range map[string]bool{"": false, mutant.ActUnasked: true} {
		mutant.Set(name)
		require.Equal(t, goesOn, confirm(t, "n") == nil, name)
	}
}
