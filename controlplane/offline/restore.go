package offline

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/backup"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/datadir"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

// restore returns the command `trivet-controlplane restore`, which creates the data directory of a member of a new
// cluster from a backup.
func restore() *cobra.Command {
	var from string
	c := config.Default()
	cmd := &cobra.Command{
		Use: "restore --from FILE", Short: "Create a member's data directory from a backup", Args: cobra.NoArgs,
		Long: `Create a data directory from an archive that ` + "`trivet cluster backup`" + ` wrote. The result is a new cluster with the records and
keys of the old one. Create its cluster key first, with keygen --renew, so that members and hosts of the old cluster are
refused. With --cluster, do this on each of the listed members, with the same archive and key.

The archive has no image files: copy the directory images of an old member into the new data directory.
Hosts keep running their VMs. They join the new cluster when an operator follows the printed instructions.`,
		Example: "  trivet-controlplane keygen --renew old.key > new.key; chmod 600 new.key\n" +
			"  trivet-controlplane restore --from cloud.backup --cluster-key new.key --data-dir /var/lib/trivet/1",
	}
	cmd.Flags().StringVar(&from, "from", "", "the archive")
	cmd.Flags().Uint64Var(&c.NodeID, "node-id", c.NodeID, "this member's id")
	cmd.Flags().StringVar(&c.Listen, "listen", c.Listen, "address of a cluster of one member")
	cmd.Flags().StringVar(&c.DataDir, "data-dir", c.DataDir, "directory that is made")
	cmd.Flags().Var(&c.Cluster, "cluster", "all members of the new cluster, this one included")
	cmd.Flags().StringVar(&c.ClusterKey, "cluster-key", "", "file with the new cluster's key")
	cmd.MarkFlagRequired("from")
	cmd.MarkFlagRequired("cluster-key")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := c.Validate(); err != nil {
			return err
		}
		m, err := restoreArchive(cmd.Context(), c, from)
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "restored %s as of %s: cluster %d, which was %d\n%s\n", from, m.Made.Format(time.RFC3339), mustID(c), m.Cluster, hostInstructions(m.Cluster))
		return nil
	}
	return cmd
}

// mustID returns the ID of the new cluster, which restoreArchive has written into the data directory.
func mustID(c config.Config) uint64 {
	id, _ := datadir.ClusterID(c.DataDir)
	return id
}

// restoreArchive creates the data directory of c from the archive at the path in from. If it fails, it removes what it
// has created.
func restoreArchive(ctx context.Context, c config.Config, from string) (m backup.Manifest, err error) {
	key, err := clusterkey.Load(c.ClusterKey)
	if err != nil {
		return m, err
	}
	if entries, err := os.ReadDir(c.DataDir); err == nil && len(entries) > 0 {
		return m, fmt.Errorf("%s is not empty: restore into a new directory", c.DataDir)
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return m, err
	}
	f, err := os.Open(from)
	if err != nil {
		return m, fmt.Errorf("open the archive: %w", err)
	}
	defer f.Close()
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return m, fmt.Errorf("make data directory: %w", err)
	}
	defer func() {
		if err != nil {
			entries, _ := os.ReadDir(c.DataDir)
			for _, e := range entries {
				os.RemoveAll(filepath.Join(c.DataDir, e.Name()))
			}
		}
	}()
	unlock, err := datadir.Lock(c.DataDir, 0)
	if err != nil {
		return m, err
	}
	defer unlock()
	files := filepath.Join(c.DataDir, layout.RestoreDir)
	if err := os.MkdirAll(files, 0o700); err != nil {
		return m, err
	}
	if m, err = backup.Extract(bufio.NewReaderSize(f, 1<<20), key.Derive(backup.KeyPurpose), files); err != nil {
		return m, err
	}
	if m.Cluster == key.ClusterID() {
		return m, errors.New("the key is that of the cluster that was backed up, for whose members and hosts this would be taken: " +
			"make one with `trivet-controlplane keygen --renew old.key > new.key; chmod 600 new.key` and give that")
	}
	groups, err := restoreStates(ctx, c, m, files)
	if err != nil {
		return m, err
	}
	if err := os.RemoveAll(files); err != nil {
		return m, err
	}
	if err := seedRaft(c, groups); err != nil {
		return m, err
	}
	if len(c.Cluster) == 0 {
		// A cluster of one member loads its key from this file.
		if err := atomicfile.WriteFile(filepath.Join(c.DataDir, layout.ClusterKeyFile), []byte(key.Encode()), 0o600); err != nil {
			return m, err
		}
	}
	if err := datadir.MarkCluster(c.DataDir, key); err != nil {
		return m, err
	}
	return m, installRaft(c.DataDir)
}

// restoreStates loads the checkpoint of each group, which is below the directory in the parameter files, into the
// group's engine. For each group it returns the position of the last entry in the checkpoint, after which the raft log
// must begin.
func restoreStates(ctx context.Context, c config.Config, m backup.Manifest, files string) (groups []consensus.SeedGroup, err error) {
	for id, name := range layout.Names() {
		i := slices.IndexFunc(m.Groups, func(g backup.Group) bool { return g.ID == id && g.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("the archive has no group %s", name)
		}
		g := m.Groups[i]
		engine, err := mvcc.Open(vfs.Default, filepath.Join(c.DataDir, name), mvcc.Options{})
		if err != nil {
			return nil, err
		}
		err = engine.Restore(filepath.Join(files, name))
		at := engine.Applied()
		if err == nil && (at.Index != g.Index || at.Term != g.Term) {
			err = fmt.Errorf("the state of %s is at entry %d, the archive says %d", name, at.Index, g.Index)
		}
		if err := errors.Join(err, engine.Close()); err != nil {
			return nil, err
		}
		groups = append(groups, consensus.SeedGroup{ID: id, Index: g.Index, Term: g.Term})
	}
	return groups, ctx.Err()
}
