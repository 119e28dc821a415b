package kv

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
)

// Raft implements Consensus with one raft group of a consensus.Runner. For each command, the group's state machine must
// return a command.Result. Followers forward proposals to the leader.
type Raft struct {
	runner  *consensus.Runner
	group   uint64
	self    uint64
	changes leader.Leadership

	// idPrefix and idCounter form the ID of an exclusive proposal; other proposals have no ID. The prefix is random and
	// is chosen at each start of the process.
	idPrefix  [8]byte
	idCounter atomic.Uint64
}

var _ Consensus = (*Raft)(nil)

// NewRaft creates a Raft for the member self. The parameter changes reports new leaders; *store.Group implements it.
func NewRaft(runner *consensus.Runner, group, self uint64, changes leader.Leadership) *Raft {
	r := &Raft{runner: runner, group: group, self: self, changes: changes}
	rand.Read(r.idPrefix[:]) // never fails
	return r
}

// Propose implements Consensus. It proposes the command only once. If the engine refuses the command, the caller may
// call Propose again; the new proposal then gets a new ID.
func (r *Raft) Propose(ctx context.Context, data []byte, exclusive bool) (command.Result, error) {
	var id [16]byte
	if exclusive {
		copy(id[:], r.idPrefix[:])
		binary.LittleEndian.PutUint64(id[8:], r.idCounter.Add(1))
	}
	applied, err := r.runner.Propose(ctx, r.group, id, data)
	if err != nil {
		return command.Result{}, err
	}
	result, ok := applied.(command.Result)
	if !ok {
		return command.Result{}, fmt.Errorf("the state machine returned a %T, not a command.Result", applied)
	}
	return result, nil
}

// ReadIndex implements Consensus.
func (r *Raft) ReadIndex(ctx context.Context) error { return r.runner.ReadIndex(ctx, r.group) }

// Status implements Consensus.
func (r *Raft) Status(ctx context.Context) (consensus.GroupStatus, error) {
	s, err := r.runner.Status(ctx)
	if err != nil {
		return consensus.GroupStatus{}, err
	}
	for _, g := range s.Groups {
		if g.ID == r.group {
			return g, nil
		}
	}
	return consensus.GroupStatus{}, consensus.ErrNoGroup
}

// Self implements Consensus.
func (r *Raft) Self() uint64 { return r.self }

// Leader implements leader.Leadership. It reads the runner's current state, because the notification of a new leader
// may arrive later than the result of a ReadIndex that the new leader has served.
func (r *Raft) Leader() (member, term uint64) {
	l := r.runner.Leader(r.group)
	return l.Leader, l.Term
}

// Changed implements leader.Leadership.
func (r *Raft) Changed() <-chan struct{} { return r.changes.Changed() }
