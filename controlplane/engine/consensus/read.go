package consensus

import (
	"encoding/binary"
	"fmt"

	"go.etcd.io/raft/v3"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Read is a wait for linearizability; see Group.ReadIndex.
type Read struct {
	done     func(index uint64, err error)
	deadline uint64 // in ticks
	index    uint64
}

// Cancel drops the wait; its callback will not be called.
func (r *Read) Cancel() { r.done = nil }

// reads are the reads of one group. One question is under way to the leader at any time; those that arrive meanwhile
// are answered by the next one. A question may be asked again with the same name: whenever the leader answers, it read
// its commit index after the question was first asked.
type reads struct {
	count   int     // in the three lists, cancelled ones too
	queued  []*Read // for the next question
	asked   []*Read // by the question under way
	waiting []*Read // answered, for the state machine to get there
	name    [16]byte
	resend  uint64 // the tick at which to ask again
}

// ReadIndex calls done once everything that was committed in the group before the call is applied here, with an index
// that says so; reads of the state machine after that are linearizable. It works on every member. Errors: ErrNoLeader
// when no leader answered within Limits.ReadTicks, ErrOverloaded, ErrStopped. done may be called before ReadIndex
// returns, and otherwise is during Process or Tick; it may propose and read, but not step or process the host.
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

// due says whether ask would do something.
func (rs *reads) due(g *Group) bool {
	if len(rs.asked) == 0 && len(rs.queued) == 0 || g.leader == 0 {
		return false
	}
	// A leader knows what is committed once it has committed something itself.
	if g.role == raft.StateLeader && g.applied.Term != g.term {
		return false
	}
	return len(rs.asked) == 0 || rs.resend <= g.host.now
}

// ask puts a question to the leader, or the last one again.
func (rs *reads) ask(g *Group) {
	if !rs.due(g) {
		return
	}
	if len(rs.asked) == 0 {
		rs.asked, rs.queued = rs.queued, rs.asked[:0]
		g.host.questions++
		// Unique over restarts too: an answer to an earlier life of this member must not be taken for one to this.
		binary.LittleEndian.PutUint64(rs.name[:], g.host.nonce)
		binary.LittleEndian.PutUint64(rs.name[8:], g.host.questions)
	}
	rs.resend = g.host.now + g.host.opts.readRetryTicks()
	name := rs.name
	g.node.ReadIndex(name[:])
}

// hear takes the leader's answers.
func (rs *reads) hear(g *Group, states []raft.ReadState) {
	for _, s := range states {
		if len(rs.asked) == 0 || string(s.RequestCtx) != string(rs.name[:]) {
			continue // a second answer
		}
		for _, r := range rs.asked {
			r.index = s.Index
		}
		rs.waiting = append(rs.waiting, rs.asked...)
		clear(rs.asked)
		rs.asked = rs.asked[:0]
	}
}

// release answers the reads that the state machine has reached.
func (rs *reads) release(g *Group) {
	if len(rs.waiting) > 0 {
		reached := func(r *Read) bool { return r.index <= g.applied.Index }
		rs.waiting = rs.answer(g, rs.waiting, reached, nil)
	}
}

// expire answers the reads that waited too long, and asks again when the leader is silent.
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

// answer takes the reads that match out of the list.
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
