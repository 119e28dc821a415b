package store

import (
	"context"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Direct is a Proposer for tests. It applies each command at once to one mvcc engine, without replication.
type Direct struct {
	mu     sync.Mutex
	engine *mvcc.Engine
}

var _ Proposer = (*Direct)(nil)

// NewDirect returns a Direct that applies commands to engine.
func NewDirect(engine *mvcc.Engine) *Direct { return &Direct{engine: engine} }

// Propose implements Proposer. It applies the command at once, as the next log entry.
func (d *Direct) Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error) {
	if err := ctx.Err(); err != nil {
		return command.Result{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	at := d.engine.Applied()
	results, err := d.engine.Apply([]command.Command{{Index: at.Index + 1, Term: 1, ID: id, Data: data, WantSteps: true}})
	if err != nil {
		return command.Result{}, err
	}
	return results[0], nil
}

// ReadIndex implements Proposer. It returns at once, because every command is applied when Propose returns.
func (d *Direct) ReadIndex(ctx context.Context) error { return ctx.Err() }
