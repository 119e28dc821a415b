package layout

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGroupsKeepTheirValues checks that the IDs, names and paths do not change, because data directories and peers of
// earlier versions use them.
func TestGroupsKeepTheirValues(t *testing.T) {
	require.Equal(t, map[uint64]string{1: "system", 2: "kv"}, Names())
	require.Equal(t, "raft/log", RaftLogDir)
}
