// Package kvtest provides a fake implementation of kv.Consensus for tests of the key-value store.
//
// The package must not import kv, because kv's own tests import it.
package kvtest

import (
	"context"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// SingleMember implements kv.Consensus for member 1, without raft: Propose applies a command to the engine at once. A
// new SingleMember is the leader of term 2. Tests can change the leader, make calls fail, and run a function before a
// call.
type SingleMember struct {
	engine *mvcc.Engine

	applying sync.Mutex // held while a command is applied

	mu              sync.Mutex
	leader, term    uint64
	changed         chan struct{}
	learner         bool
	err             error
	beforePropose   func()
	beforeReadIndex func()
}

// NewSingleMember returns a SingleMember that applies commands to an engine.
func NewSingleMember(engine *mvcc.Engine) *SingleMember {
	return &SingleMember{engine: engine, leader: 1, term: 2, changed: make(chan struct{})}
}

// SetLeader sets the leader and the term that Leader and Status return; member 0 means that no leader is known.
func (s *SingleMember) SetLeader(member, term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leader, s.term = member, term
	s.notify()
}

// SetLearner sets whether Status lists the member as a learner.
func (s *SingleMember) SetLearner(learner bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.learner = learner
	s.notify()
}

// notify closes the channel that Changed returns, and replaces it. The caller must hold s.mu.
func (s *SingleMember) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// SetError makes later calls of Propose and ReadIndex return err; nil makes them succeed again.
func (s *SingleMember) SetError(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// BeforeNextPropose makes the next call of Propose run f before it applies its command.
func (s *SingleMember) BeforeNextPropose(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beforePropose = f
}

// BeforeNextReadIndex makes the next call of ReadIndex run f before it returns.
func (s *SingleMember) BeforeNextReadIndex(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beforeReadIndex = f
}

// start runs at the beginning of Propose and ReadIndex. It returns the error of SetError, or noLeader if no leader is
// known. Otherwise it sets *hook to nil and calls the function that *hook held, if any.
func (s *SingleMember) start(hook *func(), noLeader error) error {
	s.mu.Lock()
	err, f := s.err, *hook
	if err == nil && s.leader == 0 {
		err = noLeader
	}
	if err == nil {
		*hook = nil
	}
	s.mu.Unlock()
	if err == nil && f != nil {
		f()
	}
	return err
}

// Propose implements kv.Consensus. It fails with a NotLeaderError if no leader is known.
func (s *SingleMember) Propose(_ context.Context, data []byte, _ bool) (command.Result, error) {
	if err := s.start(&s.beforePropose, &consensus.NotLeaderError{}); err != nil {
		return command.Result{}, err
	}
	return s.Apply(data)
}

// Apply applies a command to the engine, as if another member had proposed it.
func (s *SingleMember) Apply(data []byte) (command.Result, error) {
	s.applying.Lock()
	defer s.applying.Unlock()
	results, err := s.engine.Apply([]command.Command{{Index: s.engine.Applied().Index + 1, Term: 2, Data: data, WantSteps: true}})
	if err != nil {
		return command.Result{}, err
	}
	return results[0], nil
}

// ReadIndex implements kv.Consensus. It fails with ErrNoLeader if no leader is known.
func (s *SingleMember) ReadIndex(context.Context) error {
	return s.start(&s.beforeReadIndex, consensus.ErrNoLeader)
}

// Status implements kv.Consensus.
func (s *SingleMember) Status(context.Context) (consensus.GroupStatus, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.engine.Applied().Index
	status := consensus.GroupStatus{Leader: s.leader, Term: s.term, Commit: at, Applied: at, Voters: []uint64{1}}
	if s.learner {
		status.Learners = []uint64{1}
	}
	return status, nil
}

// Self implements kv.Consensus.
func (s *SingleMember) Self() uint64 { return 1 }

// Leader implements kv.Consensus.
func (s *SingleMember) Leader() (member, term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leader, s.term
}

// Changed implements kv.Consensus.
func (s *SingleMember) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}
