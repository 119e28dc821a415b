package layout

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Data directories and peers of earlier versions use these values.
func TestGroupsKeepTheirValues(t *testing.T) {
	require.Equal(t, map[uint64]string{1: "system", 2: "kv"}, Names())
	require.Equal(t, "raft/log", RaftLogDir)
}
