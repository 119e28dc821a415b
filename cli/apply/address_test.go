package apply

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSameAddress(t *testing.T) {
	require.True(t, SameAddress("FD00::1", "fd00:0::1"))
	require.True(t, SameAddress("fd00:0::/64", "fd00::/64"))
	require.True(t, SameAddress("any", "any"))
	require.False(t, SameAddress("10.0.0.1", "10.0.0.1/32"))
	require.False(t, SameAddress("10.0.0.1", "10.0.0.2"))
	require.False(t, SameAddress("", "10.0.0.2"))
}
