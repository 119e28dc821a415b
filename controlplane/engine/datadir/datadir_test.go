package datadir

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
)

func TestSecondProcessIsRefused(t *testing.T) {
	dir := t.TempDir()
	unlock, err := Lock(dir, 0)
	require.NoError(t, err)
	_, err = Lock(dir, 0)
	require.ErrorContains(t, err, "another member runs in")
	unlock()
	unlock, err = Lock(dir, 0)
	require.NoError(t, err)
	unlock()
}

// TestCheckCluster checks that CheckCluster stores the cluster of the first key, and refuses the keys of other
// clusters.
func TestCheckCluster(t *testing.T) {
	dir := t.TempDir()
	key, other := clusterkey.Generate(), clusterkey.Generate()
	id, err := ClusterID(dir)
	require.NoError(t, err)
	require.Zero(t, id)
	require.NoError(t, CheckCluster(dir, key))
	require.NoError(t, CheckCluster(dir, key))
	id, err = ClusterID(dir)
	require.NoError(t, err)
	require.Equal(t, key.ClusterID(), id)
	require.ErrorContains(t, CheckCluster(dir, other), "use the key of the data's cluster")
	require.NoError(t, os.WriteFile(filepath.Join(dir, layout.ClusterFile), []byte("x\n"), 0o600))
	require.ErrorContains(t, CheckCluster(dir, key), "does not hold a cluster's id")
}

// TestLockRemovesTemporaryFiles checks that Lock removes temporary files that a crash left, but not while another
// process has the lock.
func TestLockRemovesTemporaryFiles(t *testing.T) {
	dir := t.TempDir()
	key := clusterkey.Generate()
	require.NoError(t, MarkCluster(dir, key))
	left := filepath.Join(dir, "."+layout.ClusterFile+"1234567890123456789")
	require.NoError(t, os.WriteFile(left, []byte("77"), 0o600))
	unlock, err := Lock(dir, 0)
	require.NoError(t, err)
	require.NoFileExists(t, left)
	id, err := ClusterID(dir)
	require.NoError(t, err)
	require.Equal(t, key.ClusterID(), id)

	require.NoError(t, os.WriteFile(left, []byte("77"), 0o600))
	_, err = Lock(dir, 0)
	require.Error(t, err)
	require.FileExists(t, left)
	unlock()
}
