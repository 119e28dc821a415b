package members

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFailedStartLeavesNothingOpen(t *testing.T) {
	b, err := Start(t.Context(), t.TempDir(), t.TempDir(), 1)
	require.Error(t, err, "there are no programs")
	require.Nil(t, b)
}
