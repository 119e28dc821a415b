package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
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
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// backupPurpose derives the key of archives from the cluster's. It is the same for all generations of that.
const backupPurpose = "backup"

// backupWriter makes archives of this member's states.
type backupWriter struct {
	c       config.Config
	key     *clusterkey.Key
	engines map[uint64]*mvcc.Engine
	names   map[uint64]string
	runner  *consensus.Runner
	// turn is held by the one that is under way.
	running chan struct{}
}

func newBackupWriter(c config.Config, key *clusterkey.Key, engines map[uint64]*mvcc.Engine, names map[uint64]string, runner *consensus.Runner) *backupWriter {
	a := &backupWriter{c: c, key: key, engines: engines, names: names, runner: runner, running: make(chan struct{}, 1)}
	os.RemoveAll(a.dir()) // of an earlier life
	return a
}

func (a *backupWriter) dir() string { return filepath.Join(a.c.DataDir, layout.BackupDir) }

// write writes an archive with everything that was acknowledged before the call, each group as of one moment.
func (a *backupWriter) write(ctx context.Context, write func([]byte) error) error {
	select {
	case a.running <- struct{}{}:
		defer func() { <-a.running }()
	default:
		return fault.New(fault.Unavailable, "another backup of this member is under way").MayRetry()
	}
	if err := os.MkdirAll(a.dir(), 0o700); err != nil {
		return fmt.Errorf("make room for a backup: %w", err)
	}
	defer os.RemoveAll(a.dir())
	m := backup.Manifest{Cluster: a.key.ClusterID(), Made: time.Now().UTC(), By: version()}
	dirs := map[string]string{}
	for _, id := range slices.Sorted(maps.Keys(a.engines)) {
		name := a.names[id]
		if err := a.runner.ReadIndex(ctx, id); err != nil {
			return fault.New(fault.Unavailable, "no leader of %s: this member may be behind", name).Because(err).MayRetry()
		}
		dirs[name] = filepath.Join(a.dir(), name)
		p, err := a.engines[id].Checkpoint(ctx, dirs[name])
		if err != nil {
			return fmt.Errorf("back up %s: %w", name, err)
		}
		m.Groups = append(m.Groups, backup.Group{ID: id, Name: name, Index: p.Index, Term: p.Term, Revision: a.engines[id].Revision()})
	}
	out := bufio.NewWriterSize(writerFunc(func(p []byte) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return write(p)
	}), 256<<10)
	if err := backup.Write(out, a.key.Derive(backupPurpose), m, dirs); err != nil {
		return err
	}
	return out.Flush()
}

// writerFunc is a function that takes all that is written.
type writerFunc func([]byte) error

func (w writerFunc) Write(p []byte) (int, error) {
	if err := w(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// seedRaft makes a log in which the groups begin where the states are, for the members of c.
func seedRaft(c config.Config, groups []consensus.SeedGroup) error {
	fresh := filepath.Join(c.DataDir, layout.NewRaftDir)
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("remove an unfinished log: %w", err)
	}
	return consensus.Seed(consensus.Options{ID: c.NodeID, Members: c.MemberIDs(), Dir: fresh}, groups)
}

// takeRaft puts the new log into its place. Called again after a crash it goes on.
func takeRaft(dir string) error {
	raft, fresh, old := filepath.Join(dir, layout.RaftDir), filepath.Join(dir, layout.NewRaftDir), filepath.Join(dir, layout.OldRaftDir)
	if err := os.RemoveAll(old); err != nil {
		return fmt.Errorf("remove the old log: %w", err)
	}
	if err := os.Rename(raft, old); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("set the old log aside: %w", err)
	}
	if err := os.Rename(fresh, raft); err != nil {
		return fmt.Errorf("put the new log in place: %w", err)
	}
	if err := datadir.Sync(dir); err != nil {
		return err
	}
	return os.RemoveAll(old)
}

// restore is `trivet-controlplane restore`.
func restore() *cobra.Command {
	var from string
	c := config.Default()
	cmd := &cobra.Command{
		Use: "restore --from FILE", Short: "Make a member's data directory of a backup", Args: cobra.NoArgs,
		Long: `Make a new data directory of an archive that ` + "`trivet cluster backup`" + ` wrote. What starts from it is a new cluster with the
old one's records and keys: make its key first, with keygen --renew, so that members and hosts of the old one are refused.
With --cluster, do this on each of the listed hosts, with the same archive and key.

The bytes of images are not in it: copy the directory images of a member of before into the new data directory.
Hypervisor hosts run their guests on and join the new cluster when they are told to, as what is printed says.`,
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
		m, err := restoreFrom(cmd.Context(), c, from)
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "restored %s as of %s: cluster %d, which was %d\n%s\n", from, m.Made.Format(time.RFC3339), mustID(c), m.Cluster, hostsJoin(m.Cluster))
		return nil
	}
	return cmd
}

// hostsJoin tells how hosts of a cluster join the one that takes its place.
func hostsJoin(was uint64) string {
	id := "and the id that their log names" // of data from before directories were marked
	if was != 0 {
		id = strconv.FormatUint(was, 10)
	}
	return "hosts join it with a token of `trivet node token` each, their agents started with --leave-cluster " + id + "; guests run on meanwhile"
}

// mustID is the id of the cluster that a directory was just marked with.
func mustID(c config.Config) uint64 {
	id, _ := datadir.ClusterID(c.DataDir)
	return id
}

// restoreFrom makes the data directory. When it fails, what it made is removed.
func restoreFrom(ctx context.Context, c config.Config, from string) (m backup.Manifest, err error) {
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
	unlock, err := datadir.Lock(c.DataDir)
	if err != nil {
		return m, err
	}
	defer unlock()
	files := filepath.Join(c.DataDir, layout.RestoreDir)
	if err := os.MkdirAll(files, 0o700); err != nil {
		return m, err
	}
	if m, err = backup.Extract(bufio.NewReaderSize(f, 1<<20), key.Derive(backupPurpose), files); err != nil {
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
		// One member alone finds its key here.
		if err := datadir.WriteFile(c.DataDir, layout.ClusterKeyFile, key.Encode()); err != nil {
			return m, err
		}
	}
	if err := datadir.MarkCluster(c.DataDir, key); err != nil {
		return m, err
	}
	return m, takeRaft(c.DataDir)
}

// restoreStates puts each group's checkpoint into its engine.
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

// forceNew makes a cluster of one member of what one member has, with a new key: for when the majority is lost for good.
func forceNew(ctx context.Context, c config.Config) error {
	if len(c.Cluster) > 1 || len(c.Join) > 0 {
		return errors.New("force-new-cluster makes a cluster of this member alone: start it without cluster and join, and let the others join it")
	}
	unlock, err := datadir.Lock(c.DataDir)
	if err != nil {
		return err
	}
	defer unlock()
	key, err := clusterKey(ctx, c, slog.Default())
	if err != nil {
		return err
	}
	have, err := datadir.ClusterID(c.DataDir)
	if err != nil {
		return err
	}
	if have == key.ClusterID() {
		return errors.New("the data is of this key's cluster. If it was made a new cluster before, start it without --force-new-cluster; otherwise " +
			"make a key with `trivet-controlplane keygen --renew old.key > new.key; chmod 600 new.key`, so that nobody takes the new cluster for the old one")
	}
	raft := filepath.Join(c.DataDir, layout.RaftDir)
	if _, err := os.Stat(raft); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(filepath.Join(c.DataDir, layout.NewRaftDir)); err != nil {
			return fmt.Errorf("%s holds no member's data", c.DataDir)
		}
		raft = filepath.Join(c.DataDir, layout.NewRaftDir) // it was interrupted between two renames
		if err := os.Rename(raft, filepath.Join(c.DataDir, layout.RaftDir)); err != nil {
			return err
		}
	}
	groups, err := salvage(ctx, c)
	if err != nil {
		return err
	}
	if err := seedRaft(c, groups); err != nil {
		return err
	}
	if err := takeRaft(c.DataDir); err != nil {
		return err
	}
	// A token of the old cluster is good for nothing; a new one is made at the start.
	if err := os.Remove(filepath.Join(c.DataDir, layout.AdminTokenFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := datadir.MarkCluster(c.DataDir, key); err != nil {
		return err
	}
	newLog(c).Info("this member alone is a new cluster: "+hostsJoin(have), "cluster", key.ClusterID(), "was", have)
	return nil
}

// salvage brings the states up to the end of the log, durably, and says where they are.
func salvage(ctx context.Context, c config.Config) (groups []consensus.SeedGroup, err error) {
	for id, name := range layout.Names() {
		engine, err := mvcc.Open(vfs.Default, filepath.Join(c.DataDir, name), mvcc.Options{})
		if err != nil {
			return nil, err
		}
		machine := store.NewMachine(engine, store.MachineOptions{Inline: true, NoIDs: id == layout.KVGroup})
		term, err := consensus.Salvage(consensus.Options{
			ID: c.NodeID, Members: c.MemberIDs(), Dir: filepath.Join(c.DataDir, layout.RaftDir),
		}, id, machine)
		if err == nil {
			_, err = engine.Flush(ctx)
		}
		at := engine.Applied()
		machine.Close()
		if err := errors.Join(err, engine.Close()); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		groups = append(groups, consensus.SeedGroup{ID: id, Index: at.Index, Term: at.Term, Known: term})
	}
	return groups, nil
}
