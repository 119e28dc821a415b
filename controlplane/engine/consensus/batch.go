package consensus

import (
	"encoding/binary"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// A batch is one raft entry that contains several proposals. In a group with GroupOptions.Forward, proposals without an
// ID that are queued in the same tick form a batch. The cost of an entry in raft, in the log and on the wire is then
// paid only once for all of them.
//
// All proposals of a batch are committed, lost, forwarded and retried together, under an ID that the group generates.
// The state machine gets the proposals one by one, in order, all with the index of the entry. Package message defines
// the format.

// addToBatch adds a proposal to the newest batch in the queue. If that batch is closed, is full, or has another
// deadline, or if the newest queued proposal is not a batch, it begins a new batch.
func (g *Group) addToBatch(data []byte, done func(Result, error)) {
	deadline := g.host.now + g.host.opts.Limits.ProposalTicks
	var p *proposal
	if n := len(g.queue); n > 0 {
		p = g.queue[n-1]
	}
	if p == nil || p.parts == nil || p.closed || p.deadline != deadline || len(p.data)+len(data) > message.MaxBatchBytes {
		p = g.newBatch(deadline, len(data))
		g.queue = append(g.queue, p)
	}
	before := len(p.data)
	p.data = message.AppendToBatch(p.data, data)
	p.parts = append(p.parts, done)
	size := uint64(len(p.data) - before)
	p.size += size
	g.proposalBytes += size
	g.waiting += size
	g.host.schedule(g)
}

// newBatch returns an empty batch with a new unique ID. It has capacity for a first proposal of room bytes.
func (g *Group) newBatch(deadline uint64, room int) *proposal {
	g.batches++
	p := &proposal{deadline: deadline}
	binary.LittleEndian.PutUint64(p.id[:], g.host.nonce)
	binary.LittleEndian.PutUint64(p.id[8:], g.batches)
	p.data = message.NewBatch(p.id, room)
	return p
}

// closeBatch closes a batch: no proposal can be added to it any more, and its data is compressed if that saves space.
// If p is not a batch, closeBatch does nothing.
func (p *proposal) closeBatch() {
	if p.parts == nil || p.closed {
		return
	}
	p.closed = true
	p.data = message.CloseBatch(p.data)
}

// decodeEntries decodes a raft entry into one Entry per proposal, as the state machine gets them, and appends these to
// list.
func decodeEntries(list []Entry, ent *raftpb.Entry) ([]Entry, error) {
	first := len(list)
	err := message.DecodeEntry(ent.Data, message.MaxBytes, func(b []byte) {
		list = append(list, Entry{Index: ent.GetIndex(), Term: ent.GetTerm(), Data: b})
	})
	if err != nil {
		return list, fmt.Errorf("entry %d: %w", ent.GetIndex(), err)
	}
	if id, single := message.SingleID(ent.Data); single {
		list[first].ID = id
	}
	return list, nil
}
