package consensus

import (
	"encoding/binary"
	"fmt"

	"go.etcd.io/raft/v3"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Read is a pending call of Group.ReadIndex, which can be cancelled.
type Read struct {
	done     func(index uint64, err error)
	deadline uint64 // in ticks
	index    uint64
}

// Cancel cancels the call, so that its callback will not be called.
func (r *Read) Cancel() { r.done = nil }

// reads holds the pending reads of one group. At most one ReadIndex request to the leader is pending; reads that arrive
// meanwhile share the next request. A request may be sent again with the same ID: every response has a commit index
// that the leader determined after the first sending.
type reads struct {
	count   int      // number of reads in the three lists, including cancelled ones
	queued  []*Read  // reads for the next request
	asked   []*Read  // reads of the pending request
	waiting []*Read  // reads with an index that the state machine has not applied yet
	name    [16]byte // ID of the pending request
	resend  uint64   // the tick at which the request is sent again
}

// ReadIndex calls done when this member has applied all entries that were committed in the group before the call. Reads
// of the state machine after that are linearizable. index is the last applied index. ReadIndex works on every member.
// Errors: ErrNoLeader when no leader responds within Limits.ReadTicks, ErrOverloaded, ErrStopped. done is called before
// ReadIndex returns, or during Process or Tick. done may call Propose and ReadIndex, but not Step or Process.
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

// due reports whether a request for reads can be sent, or sent again, now.
func (rs *reads) due(g *Group) bool {
	if len(rs.asked) == 0 && len(rs.queued) == 0 || g.leader == 0 {
		return false
	}
	// A leader cannot determine the commit index until an entry of its own term has been committed.
	if g.role == raft.StateLeader && g.applied.Term != g.term {
		return false
	}
	return len(rs.asked) == 0 || rs.resend <= g.host.now
}

// ask sends a request for the queued reads to the leader, or repeats the pending request if it is time.
func (rs *reads) ask(g *Group) {
	if !rs.due(g) {
		return
	}
	if len(rs.asked) == 0 {
		rs.asked, rs.queued = rs.queued, rs.asked[:0]
		g.host.questions++
		// Unique across restarts: a response to an earlier run of this member must not match a request of this run.
		binary.LittleEndian.PutUint64(rs.name[:], g.host.nonce)
		binary.LittleEndian.PutUint64(rs.name[8:], g.host.questions)
	}
	rs.resend = g.host.now + g.host.opts.readRetryTicks()
	name := rs.name
	g.node.ReadIndex(name[:])
}

// handleResponses assigns the index in the leader's response to the reads of the pending request.
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

// release calls the callbacks of the reads whose index the state machine has applied.
func (rs *reads) release(g *Group) {
	if len(rs.waiting) > 0 {
		reached := func(r *Read) bool { return r.index <= g.applied.Index }
		rs.waiting = rs.answer(g, rs.waiting, reached, nil)
	}
}

// expire fails the reads that are past their deadline with ErrNoLeader, and schedules a repetition of the request if it
// is due.
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

// answer completes, with err, the reads of list for which match returns true, and returns the others.
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
