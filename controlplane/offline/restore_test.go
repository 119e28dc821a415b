package offline

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/backup"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/datadir"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

// writeArchive writes a backup with the empty state of each group, encrypted with the given key, and returns its path.
func writeArchive(t *testing.T, key *clusterkey.Key) (path string) {
	dir := t.TempDir()
	manifest, checkpoints := backup.Manifest{Cluster: key.ClusterID(), Made: time.Now()}, map[string]string{}
	for _, g := range layout.Groups() {
		engine, err := mvcc.Open(vfs.Default, filepath.Join(dir, g.Name), mvcc.Options{Quiet: true})
		require.NoError(t, err)
		checkpoints[g.Name] = filepath.Join(dir, g.Name+".checkpoint")
		at, err := engine.Checkpoint(t.Context(), checkpoints[g.Name])
		require.NoError(t, err)
		require.NoError(t, engine.Close())
		manifest.Groups = append(manifest.Groups, backup.Group{ID: g.ID, Name: g.Name, Index: at.Index, Term: at.Term})
	}
	path = filepath.Join(dir, "archive")
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, backup.Write(f, key.Derive(backup.KeyPurpose), manifest, checkpoints))
	require.NoError(t, f.Close())
	return path
}

func writeKey(t *testing.T, key *clusterkey.Key) (path string) {
	path = filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(path, []byte(key.Encode()), 0o600))
	return path
}

func entries(t *testing.T, dir string) (names []string) {
	all, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}

// TestRestoreAndForceNewCluster restores an archive with a renewed key, and then turns the result into a new cluster
// with another renewed key. A failed restore must leave no files. ForceNewCluster must also work after a crash between
// the two renames of the raft log.
func TestRestoreAndForceNewCluster(t *testing.T) {
	old := clusterkey.Generate()
	archive := writeArchive(t, old)
	c := config.Default()
	c.DataDir = filepath.Join(t.TempDir(), "data")

	c.ClusterKey = writeKey(t, old)
	_, err := restoreArchive(t.Context(), c, archive)
	require.ErrorContains(t, err, "the key is that of the cluster that was backed up")
	require.Empty(t, entries(t, c.DataDir))

	restored := old.Renewed()
	c.ClusterKey = writeKey(t, restored)
	m, err := restoreArchive(t.Context(), c, archive)
	require.NoError(t, err)
	require.Equal(t, old.ClusterID(), m.Cluster)
	require.NoError(t, datadir.CheckCluster(c.DataDir, restored))
	require.ElementsMatch(t, []string{
		layout.ClusterFile, layout.ClusterKeyFile, layout.LockFile, layout.RaftDir, layout.SystemName, layout.KVName,
	}, entries(t, c.DataDir))
	_, err = restoreArchive(t.Context(), c, archive)
	require.ErrorContains(t, err, "is not empty")

	log := slog.New(slog.DiscardHandler)
	require.ErrorContains(t, ForceNewCluster(t.Context(), c, log), "the data is of this key's cluster")
	forced := restored.Renewed()
	c.ClusterKey = writeKey(t, forced)
	require.NoError(t, os.WriteFile(filepath.Join(c.DataDir, layout.AdminTokenFile), []byte("old"), 0o600))
	require.NoError(t, os.Rename(filepath.Join(c.DataDir, layout.RaftDir), filepath.Join(c.DataDir, layout.NewRaftDir)))
	require.NoError(t, ForceNewCluster(t.Context(), c, log))
	require.NoError(t, datadir.CheckCluster(c.DataDir, forced))
	require.ElementsMatch(t, []string{
		layout.ClusterFile, layout.ClusterKeyFile, layout.LockFile, layout.RaftDir, layout.SystemName, layout.KVName,
	}, entries(t, c.DataDir))

	c.DataDir = t.TempDir()
	require.ErrorContains(t, ForceNewCluster(t.Context(), c, log), "holds no member's data")
	c.Join = []string{"10.0.0.1"}
	require.ErrorContains(t, ForceNewCluster(t.Context(), c, log), "makes a cluster of this member alone")
}
