package uplink

import (
	"fmt"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// networkAssembly builds updates from the messages of a SyncNetworks stream. A snapshot or a change may have several
// messages, the last of which is marked complete. It does no I/O.
type networkAssembly struct {
	node   cloud.NodeID
	stream uint64
	began  time.Time // when the stream was opened; set after begin
	// term is the highest term of all messages, also of earlier streams.
	term     uint64
	revision int64                // of the last message of this stream
	building *cloud.NetworkUpdate // the messages since the last one marked complete
	complete bool                 // the snapshot of this stream is complete
}

// begin prepares for the messages of a new stream. If the last stream ended before a complete mark, begin discards its
// messages since the last one.
func (a *networkAssembly) begin(node cloud.NodeID, term uint64) {
	*a = networkAssembly{node: node, stream: a.stream + 1, term: max(a.term, term)}
}

// add processes the next message of the stream. If the message is marked complete, add returns the update. It returns
// nil if more messages must follow. After an error the caller must end the stream; the messages since the last complete
// mark have no effect.
func (a *networkAssembly) add(m *agentv1.SyncNetworksResponse) (*cloud.NetworkUpdate, error) {
	if m.GetTerm() < a.term && !mutant.On(mutant.FollowLowerTerm) {
		return nil, fmt.Errorf("%w: term %d, seen %d", errLowerTerm, m.GetTerm(), a.term)
	}
	if m.GetRevision() < a.revision {
		return nil, errOutOfOrder
	}
	a.term, a.revision = m.GetTerm(), m.GetRevision()
	if a.building == nil {
		a.building = &cloud.NetworkUpdate{Node: a.node, Stream: a.stream, Began: a.began, Snapshot: !a.complete}
	}
	if err := convert.AddNetworkUpdate(a.building, m); err != nil {
		return nil, fmt.Errorf("the member sent a record without a valid ID, an invalid protected address, or an invalid key: %w", err)
	}
	if !m.GetComplete() && !mutant.On(mutant.DeliverIncomplete) {
		return nil, nil
	}
	out := a.building
	out.Revision = m.GetRevision()
	a.building, a.complete = nil, true
	return out, nil
}
