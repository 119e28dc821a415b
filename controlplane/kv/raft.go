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

// Raft is an Agreement by a group of a Runner, whose machine answers with mvcc.Results and whose members forward what
// they cannot append themselves.
type Raft struct {
	runner  *consensus.Runner
	group   uint64
	self    uint64
	changes leader.Leadership

	// Of ids, which only proposals that are alone have: random for each start, and counted.
	begin   [8]byte
	counted atomic.Uint64
}

var _ Agreement = (*Raft)(nil)

// NewRaft makes one for the member self. changes tells of new leaders; *store.Group.
func NewRaft(runner *consensus.Runner, group, self uint64, changes leader.Leadership) *Raft {
	r := &Raft{runner: runner, group: group, self: self, changes: changes}
	rand.Read(r.begin[:]) // never fails
	return r
}

// Propose implements Agreement. It is proposed once: what the engine refuses is proposed anew, under another id.
func (r *Raft) Propose(ctx context.Context, data []byte, alone bool) (command.Result, error) {
	var id [16]byte
	if alone {
		copy(id[:], r.begin[:])
		binary.LittleEndian.PutUint64(id[8:], r.counted.Add(1))
	}
	answer, err := r.runner.Propose(ctx, r.group, id, data)
	if err != nil {
		return command.Result{}, err
	}
	result, ok := answer.(command.Result)
	if !ok {
		return command.Result{}, fmt.Errorf("the state machine answered a %T", answer)
	}
	return result, nil
}

// ReadIndex implements Agreement.
func (r *Raft) ReadIndex(ctx context.Context) error { return r.runner.ReadIndex(ctx, r.group) }

// Status implements Agreement.
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

// Self implements Agreement.
func (r *Raft) Self() uint64 { return r.self }

// Leader implements leader.Leadership, as the runner has it this moment: a read index that another leader answered is not
// before the news of that.
func (r *Raft) Leader() (member, term uint64) {
	l := r.runner.Leader(r.group)
	return l.Leader, l.Term
}

// Changed implements leader.Leadership.
func (r *Raft) Changed() <-chan struct{} { return r.changes.Changed() }
