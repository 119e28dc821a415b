package members

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFailedStartLeavesNothingOpen(t *testing.T) {
	b, err := Start(t.Context(), t.TempDir(), t.TempDir(), 1)
	require.Error(t, err, "a start without the programs must fail")
	require.Nil(t, b)
}
