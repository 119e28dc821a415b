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

// leadershipTransferTime is the time limit of transferring the leadership when the disk of this member has failed.
const leadershipTransferTime = time.Second

// supervisor is the file system through which a member writes. If the disk fails, the process exits without stopping
// the parts of the member in order, because their writes block (package failstop).
type supervisor struct {
	*failstop.FS
	dir          string
	singleMember bool // set if no other member has a copy of the data

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

// setMember sets this member's ID and runner. The runner r is nil until this member takes part in raft.
func (s *supervisor) setMember(id uint64, r *consensus.Runner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.id, s.runner = id, r
}

// member returns the ID and the runner that setMember has set.
func (s *supervisor) member() (uint64, *consensus.Runner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.id, s.runner
}

// supervise calls run and returns the error of run. If the disk fails, supervise returns an error at once. The function
// run may then still be running, so the process must exit.
func (s *supervisor) supervise(run func(*supervisor) error) error {
	ended := make(chan error, 1)
	go func() { ended <- run(s) }()
	select {
	case err := <-ended:
		return s.explain(err)
	case <-s.Failed():
		s.transferLeadership()
		return s.explain(nil)
	}
}

// transferLeadership transfers the leadership of the groups that this member leads to other members, so that they need
// not wait for an election timeout. The transfer does not use this member's disk.
func (s *supervisor) transferLeadership() {
	id, runner := s.member()
	if runner == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), leadershipTransferTime)
	defer cancel()
	var work sync.WaitGroup
	for group := range layout.Names() {
		if runner.Leader(group).Leader == id {
			// Ignore the error: there may be no other member.
			work.Go(func() { _ = runner.TransferLeader(ctx, group, 0) })
		}
	}
	work.Wait()
}

// explain returns an error with advice for operators if the disk has failed or its data is damaged. Otherwise it
// returns err.
func (s *supervisor) explain(err error) error {
	var failure *failstop.Error
	switch {
	case errors.As(s.Err(), &failure):
	case errors.Is(err, mvcc.ErrCorrupt), errors.Is(err, consensus.ErrDamaged), pebble.IsCorruptionError(err):
		line, _, _ := strings.Cut(err.Error(), "\n")
		return fmt.Errorf("the data of this member is damaged (%s). It has stopped: %s", line, s.recoveryAdvice())
	default:
		return err
	}
	dir := s.dir
	if whole, err := filepath.Abs(dir); err == nil {
		dir = whole
	}
	if failure.Full() {
		return fmt.Errorf("the disk of %s is full (%w). This member has stopped and keeps what it acknowledged: make room there, then start it as before", dir, failure)
	}
	return fmt.Errorf("the disk of %s fails (%w). This member has stopped: when the disk is sound again start it as before; if its files are lost or damaged, %s",
		dir, failure, s.recoveryAdvice())
}

// recoveryAdvice returns, for an error message, what an operator must do if the files of this member are lost or
// damaged.
func (s *supervisor) recoveryAdvice() string {
	if s.singleMember {
		return "restore a backup: trivet-controlplane restore"
	}
	id, _ := s.member()
	return fmt.Sprintf("replace it: trivet cluster replace %d, then start it with an empty data directory", id)
}
