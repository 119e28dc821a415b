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

// leadershipTransferTime limits the transfer of leadership by a member whose disk has failed.
const leadershipTransferTime = time.Second

// supervisor implements the file system of a member, and stops the member when the disk fails. After a failure the
// process exits without closing its parts in order, because their writes block. See package failstop.
type supervisor struct {
	*failstop.FS
	dir          string
	singleMember bool // no other member has the data

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

// setMember sets the member's ID, and its runner once it takes part in raft.
func (s *supervisor) setMember(id uint64, r *consensus.Runner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.id, s.runner = id, r
}

// member returns what setMember has set.
func (s *supervisor) member() (uint64, *consensus.Runner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.id, s.runner
}

// supervise calls run and returns its error, or an error as soon as the disk fails. In the second case run has not
// returned, and the process must exit.
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

// transferLeadership transfers the leadership of the groups that this member leads, so that the others need not wait
// for an election timeout. The transfer needs no disk on this member.
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
			// The error is ignored: there may be no other member.
			work.Go(func() { _ = runner.TransferLeader(ctx, group, 0) })
		}
	}
	work.Wait()
}

// explain returns an error with advice for operators if the disk has failed or its data is damaged, and err otherwise.
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

// recoveryAdvice returns what to do if the files of the member are lost or damaged.
func (s *supervisor) recoveryAdvice() string {
	if s.singleMember {
		return "restore a backup: trivet-controlplane restore"
	}
	id, _ := s.member()
	return fmt.Sprintf("replace it: trivet cluster replace %d, then start it with an empty data directory", id)
}
