package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/failstop"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

// leadershipTransferTime is how long a member whose disk has failed may take to give its leadership away.
const leadershipTransferTime = time.Second

// supervisor is the disk that a member stands on. When that fails nothing above can be closed in order any more, and the
// process ends without; see package disk.
type supervisor struct {
	*failstop.FS
	dir          string
	singleMember bool // there are no other members to get the data from

	mu     sync.Mutex
	id     uint64
	runner *consensus.Runner
}

func newSupervisor(c config.Config) *supervisor {
	roots := []string{filepath.Join(c.DataDir, layout.RaftLogDir)}
	for _, name := range layout.Names() {
		roots = append(roots, filepath.Join(c.DataDir, name))
	}
	return &supervisor{
		FS: failstop.New(context.Background(), vfs.Default, roots...), dir: c.DataDir, singleMember: len(c.Cluster) <= 1 && len(c.Join) == 0, id: c.NodeID,
	}
}

// setMember says which member it is; r is nil until that takes part.
func (f *supervisor) setMember(id uint64, r *consensus.Runner) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.id, f.runner = id, r
}

func (f *supervisor) member() (uint64, *consensus.Runner) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.id, f.runner
}

// supervise runs a member until it ends or the disk does. In the second case the member is left as it is, and the process
// has to end.
func (f *supervisor) supervise(run func(*supervisor) error) error {
	ended := make(chan error, 1)
	go func() { ended <- run(f) }()
	select {
	case err := <-ended:
		return f.explain(err)
	case <-f.Failed():
		f.transferLeadership()
		return f.explain(nil)
	}
}

// transferLeadership gives away what this member leads: that takes no disk here, and spares the others an election time-out.
func (f *supervisor) transferLeadership() {
	id, runner := f.member()
	if runner == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), leadershipTransferTime)
	defer cancel()
	var work sync.WaitGroup
	for group := range layout.Names() {
		if runner.Leader(group).Leader == id {
			// Nobody may be there to take it.
			work.Go(func() { _ = runner.TransferLeader(ctx, group, 0) })
		}
	}
	work.Wait()
}

// explain tells an operator what has happened to the disk, if something has, and what to do.
func (f *supervisor) explain(err error) error {
	var failure *failstop.Error
	switch {
	case errors.As(f.Err(), &failure):
	case errors.Is(err, mvcc.ErrCorrupt), errors.Is(err, consensus.ErrDamaged), pebble.IsCorruptionError(err):
		line, _, _ := strings.Cut(err.Error(), "\n")
		return fmt.Errorf("the data of this member is damaged (%s). It has stopped: %s", line, f.recoveryAdvice())
	default:
		return err
	}
	dir := f.dir
	if whole, err := filepath.Abs(dir); err == nil {
		dir = whole
	}
	if failure.Full() {
		return fmt.Errorf("the disk of %s is full (%w). This member has stopped and keeps what it acknowledged: make room there, then start it as before", dir, failure)
	}
	return fmt.Errorf("the disk of %s fails (%w). This member has stopped: when the disk is sound again start it as before; if its files are lost or damaged, %s",
		dir, failure, f.recoveryAdvice())
}

// recoveryAdvice is what to do about a member whose files are of no use any more.
func (f *supervisor) recoveryAdvice() string {
	if f.singleMember {
		return "restore a backup: trivet-controlplane restore"
	}
	id, _ := f.member()
	return fmt.Sprintf("replace it: trivet cluster replace %d, then start it with an empty data directory", id)
}
