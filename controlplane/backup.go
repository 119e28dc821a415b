package main

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/backup"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/version"
)

// backupWriter writes backups: archives of the state of every raft group, as stored on this member.
type backupWriter struct {
	c       config.Config
	key     *clusterkey.Key
	engines map[uint64]*mvcc.Engine
	runner  *consensus.Runner
	log     *slog.Logger
	// running is a semaphore of size 1: only one backup at a time can be written.
	running chan struct{}
}

func newBackupWriter(c config.Config, key *clusterkey.Key, engines map[uint64]*mvcc.Engine, runner *consensus.Runner, log *slog.Logger) *backupWriter {
	a := &backupWriter{c: c, key: key, engines: engines, runner: runner, log: log, running: make(chan struct{}, 1)}
	os.RemoveAll(a.dir()) // remove what a backup left that a crash interrupted
	return a
}

func (a *backupWriter) dir() string { return filepath.Join(a.c.DataDir, layout.BackupDir) }

// write makes a backup and passes the archive in pieces to the function in the parameter write. The archive includes
// every write that was acknowledged before the call. The state of each raft group is consistent in itself, but the
// states of different groups are from different moments.
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
	m := backup.Manifest{Cluster: a.key.ClusterID(), Made: time.Now().UTC(), By: version.Version()}
	dirs := map[string]string{}
	for _, g := range layout.Groups() {
		id, name := g.ID, g.Name
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
	if err := backup.Write(out, a.key.Derive(backup.KeyPurpose), m, dirs); err != nil {
		return err
	}
	if err := out.Flush(); err != nil {
		return err
	}
	text := strconv.FormatInt(m.Made.Unix(), 10) + "\n"
	if err := atomicfile.WriteFile(filepath.Join(a.c.DataDir, layout.BackupTimeFile), []byte(text), 0o600); err != nil {
		a.log.Error("the backup was sent, but its time cannot be recorded for the metrics", "err", err)
	}
	return nil
}

// writerFunc is an io.Writer. The function must either consume all of its argument or return an error.
type writerFunc func([]byte) error

func (w writerFunc) Write(p []byte) (int, error) {
	if err := w(p); err != nil {
		return 0, err
	}
	return len(p), nil
}
