package consensus

import (
	"encoding/binary"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// Proposals without an id that come in the same tick and wait together become one entry, a pack: what an entry costs
// beside its data, in raft, in the log and on the wire, is paid once for all of them. The members that a pack is for see
// its proposals one by one, in their order, with one index. A pack is decided, lost, sent and found again as a whole, by
// an id that the group makes for it. What is like other things in it is written once: a pack is compressed, quickly, if
// that makes it much smaller.

// addToBatch makes a proposal part of the last pack that waits, or of a new one.
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

func (g *Group) newBatch(deadline uint64, room int) *proposal {
	g.batches++
	p := &proposal{deadline: deadline}
	binary.LittleEndian.PutUint64(p.id[:], g.host.nonce)
	binary.LittleEndian.PutUint64(p.id[8:], g.batches)
	p.data = message.NewBatch(p.id, room)
	return p
}

// closeBatch ends a pack: no more proposals come to it.
func (p *proposal) closeBatch() {
	if p.parts == nil || p.closed {
		return
	}
	p.closed = true
	p.data = message.CloseBatch(p.data)
}

// decodeEntries appends the proposals of a raft entry, as the state machine shall see them.
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
