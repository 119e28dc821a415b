package consensus

import (
	"encoding/binary"
	"fmt"

	"go.etcd.io/raft/v3"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Read is one pending call of Group.ReadIndex. The caller can cancel it.
type Read struct {
	done     func(index uint64, err error)
	deadline uint64 // in ticks
	index    uint64
}

// Cancel ends the call. Its callback will not be called any more.
func (r *Read) Cancel() { r.done = nil }

// reads holds the pending reads of one group. At most one ReadIndex request to the leader is under way, and it is for
// several reads. Reads that arrive meanwhile wait for the next request. A request without a response is sent again with
// the same ID. That is safe, because the leader determines the commit index in each response after it has received the
// request.
type reads struct {
	count   int      // number of reads in the three lists, including cancelled ones
	queued  []*Read  // reads for the next request
	asked   []*Read  // reads of the pending request
	waiting []*Read  // reads with an index that the state machine has not applied yet
	name    [16]byte // ID of the pending request
	resend  uint64   // the tick at which the request is sent again
}

// ReadIndex calls done when this member has applied all entries that the group had committed before the call. Reads of
// the state machine from then on are linearizable. index is the index of the last applied entry. ReadIndex can be
// called on every member.
//
// Unless the Read is cancelled, done is called once: before ReadIndex returns, or during Process or Tick. Its error is
// ErrNoLeader if no leader responds within Limits.ReadTicks, ErrOverloaded if too many reads are pending, or the error
// that stopped the host. done may call Propose and ReadIndex, but not Step or Process.
func (g *Group) ReadIndex(done func(index uint64, err error)) *Read {
	r := &Read{done: done, deadline: g.host.now + g.host.opts.Limits.ReadTicks}
	switch {
	case g.host.err != nil:
		done(0, g.host.err)
	case mutant.On(mutant.StaleRead):
		done(g.applied.Index, nil)
	case g.reads.count >= g.host.opts.Limits.Reads:
		done(0, fmt.Errorf("%w: %d reads are waiting", ErrOverloaded, g.reads.count))
	default:
		g.reads.count++
		g.reads.queued = append(g.reads.queued, r)
		g.host.schedule(g)
	}
	return r
}

// due reports whether a read request can be sent now. This is the case if reads are queued and no request is under way,
// or if the request that is under way is to be sent again. A leader must be known.
func (rs *reads) due(g *Group) bool {
	if len(rs.asked) == 0 && len(rs.queued) == 0 || g.leader == 0 {
		return false
	}
	// A leader cannot determine the commit index before an entry of its own term is committed.
	if g.role == raft.StateLeader && g.applied.Term != g.term {
		return false
	}
	return len(rs.asked) == 0 || rs.resend <= g.host.now
}

// ask sends a request for the queued reads to the leader. If a request is under way already, ask sends it again when it
// is time to do so.
func (rs *reads) ask(g *Group) {
	if !rs.due(g) {
		return
	}
	if len(rs.asked) == 0 {
		rs.asked, rs.queued = rs.queued, rs.asked[:0]
		g.host.questions++
		// The ID is unique also across restarts, so that a response to a request of an earlier run of this member does
		// not match.
		binary.LittleEndian.PutUint64(rs.name[:], g.host.nonce)
		binary.LittleEndian.PutUint64(rs.name[8:], g.host.questions)
	}
	rs.resend = g.host.now + g.host.opts.readRetryTicks()
	name := rs.name
	g.node.ReadIndex(name[:])
}

// handleResponses handles the leader's responses to read requests, which raft returns in states. The reads of the
// request that is under way get the index from its response; then they wait until the state machine has applied that
// index.
func (rs *reads) handleResponses(g *Group, states []raft.ReadState) {
	for _, s := range states {
		if len(rs.asked) == 0 || string(s.RequestCtx) != string(rs.name[:]) {
			continue // a repeated response
		}
		for _, r := range rs.asked {
			r.index = s.Index
		}
		rs.waiting = append(rs.waiting, rs.asked...)
		clear(rs.asked)
		rs.asked = rs.asked[:0]
	}
}

// release completes the reads whose index the state machine has applied.
func (rs *reads) release(g *Group) {
	if len(rs.waiting) > 0 {
		reached := func(r *Read) bool { return r.index <= g.applied.Index }
		rs.waiting = rs.answer(g, rs.waiting, reached, nil)
	}
}

// expire fails the reads whose deadline has passed with ErrNoLeader. If a request is to be sent now, it schedules the
// group. now is the current tick.
func (rs *reads) expire(g *Group, now uint64) {
	late := func(r *Read) bool { return r.deadline <= now }
	rs.queued = rs.answer(g, rs.queued, late, ErrNoLeader)
	rs.asked = rs.answer(g, rs.asked, late, ErrNoLeader)
	rs.waiting = rs.answer(g, rs.waiting, late, ErrNoLeader)
	if rs.due(g) {
		g.host.schedule(g)
	}
}

func (rs *reads) fail(g *Group, err error) {
	all := func(*Read) bool { return true }
	rs.queued = rs.answer(g, rs.queued, all, err)
	rs.asked = rs.answer(g, rs.asked, all, err)
	rs.waiting = rs.answer(g, rs.waiting, all, err)
}

// answer queues the callbacks of those reads in list for which match returns true, with the error err. It returns the
// other reads.
func (rs *reads) answer(g *Group, list []*Read, match func(*Read) bool, err error) []*Read {
	keep := list[:0]
	for _, r := range list {
		if !match(r) {
			keep = append(keep, r)
			continue
		}
		rs.count--
		g.host.completions = append(g.host.completions, completion{read: r, result: Result{Index: g.applied.Index}, err: err})
	}
	clear(list[len(keep):])
	return keep
}
