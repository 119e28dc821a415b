package postgres

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFailedStartLeavesNothingOpen(t *testing.T) {
	b, err := Start(t.Context(), t.TempDir(), t.TempDir())
	require.Error(t, err, "a start without the programs must fail")
	require.Nil(t, b)
}
