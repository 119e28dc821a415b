package offline

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

// seedRaft creates the raft logs of a new cluster with the members of c, in the directory layout.NewRaftDir. Each
// group's log begins after the last entry that the state of the group already includes.
func seedRaft(c config.Config, groups []consensus.SeedGroup) error {
	fresh := filepath.Join(c.DataDir, layout.NewRaftDir)
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("remove an unfinished log: %w", err)
	}
	return consensus.Seed(consensus.Options{ID: c.NodeID, Members: c.MemberIDs(), Dir: fresh}, groups)
}

// installRaft replaces the directory layout.RaftDir by layout.NewRaftDir. After a crash, it can be called again.
func installRaft(dir string) error {
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
	if err := atomicfile.SyncDir(dir); err != nil {
		return err
	}
	return os.RemoveAll(old)
}
