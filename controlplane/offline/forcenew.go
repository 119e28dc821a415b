package offline

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/datadir"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// ForceNewCluster turns the data directory of one member into a new cluster that has only this member and the key in c.
// It is for clusters whose majority is lost permanently. Log entries that a majority had not confirmed may become part
// of the state. After a crash, it can be called again.
func ForceNewCluster(ctx context.Context, c config.Config, log *slog.Logger) error {
	if len(c.Cluster) > 1 || len(c.Join) > 0 {
		return errors.New("force-new-cluster makes a cluster of this member alone: start it without cluster and join, and let the others join it")
	}
	unlock, err := datadir.Lock(c.DataDir, 0)
	if err != nil {
		return err
	}
	defer unlock()
	key, err := datadir.LoadKey(c.DataDir, c.ClusterKey)
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
		raft = filepath.Join(c.DataDir, layout.NewRaftDir) // a crash interrupted installRaft between its two renames
		if err := os.Rename(raft, filepath.Join(c.DataDir, layout.RaftDir)); err != nil {
			return err
		}
	}
	groups, err := replayLogs(ctx, c)
	if err != nil {
		return err
	}
	if err := seedRaft(c, groups); err != nil {
		return err
	}
	if err := installRaft(c.DataDir); err != nil {
		return err
	}
	// The new cluster does not accept the administrator's token of the old one. The member writes a new token when it
	// starts.
	if err := os.Remove(filepath.Join(c.DataDir, layout.AdminTokenFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := datadir.MarkCluster(c.DataDir, key); err != nil {
		return err
	}
	log.Info("this member alone is a new cluster: "+hostInstructions(have), "cluster", key.ClusterID(), "was", have)
	return nil
}

// replayLogs applies every entry of each group's raft log to the state of the group, and writes the states to disk. For
// each group it returns the position of the last applied entry, after which the new raft log must begin.
func replayLogs(ctx context.Context, c config.Config) (groups []consensus.SeedGroup, err error) {
	for id, name := range layout.Names() {
		engine, err := mvcc.Open(vfs.Default, filepath.Join(c.DataDir, name), mvcc.Options{})
		if err != nil {
			return nil, err
		}
		machine := store.NewStateMachine(engine, store.StateMachineOptions{Inline: true, NoIDs: id == layout.KVGroup})
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

// hostInstructions returns a sentence for operators: how hosts leave the old cluster and join the new one. The
// parameter was is the ID of the old cluster.
func hostInstructions(was uint64) string {
	id := "and the id that their log names" // the data directory was created before layout.ClusterFile existed
	if was != 0 {
		id = strconv.FormatUint(was, 10)
	}
	return "hosts join it with a token of `trivet host token` each, their agents started with --leave-cluster " + id + "; guests run on meanwhile"
}
