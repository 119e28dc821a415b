package netdev

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMissingFeatures(t *testing.T) {
	newLab(t, 0) // requires root
	missing, err := MissingFeatures(t.Context())
	require.NoError(t, err)
	require.Empty(t, missing)
	requireNoThreads(t)
}
