package consensus

import (
	"cmp"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// completion is one callback that is due.
type completion struct {
	proposal callback
	read     *Read
	other    func()
	result   Result
	err      error
}

// schedule makes the next Process look at the group.
func (h *Host) schedule(g *Group) {
	if !g.queued {
		g.queued = true
		h.work = append(h.work, g)
	}
}

// complete tells all who wait for a proposal the same.
func (h *Host) complete(p *proposal, result Result, err error) {
	p.reply(h.reply, result, err)
}

func (h *Host) reply(ask callback, result Result, err error) {
	h.completions = append(h.completions, completion{proposal: ask, result: result, err: err})
}

// callBack runs what is due. A callback may cause more.
func (h *Host) callBack() {
	for len(h.completions) > 0 {
		due := h.completions
		h.completions = h.spare[:0]
		for i := range due {
			switch c := &due[i]; {
			case c.proposal != nil:
				c.proposal(c.result, c.err)
			case c.read != nil:
				if c.read.done != nil {
					c.read.done(c.result.Index, c.err)
				}
			case c.other != nil:
				c.other()
			}
		}
		clear(due)
		h.spare = due[:0]
	}
}

// Idle says that Process would do nothing.
func (h *Host) Idle() bool { return h.err != nil || len(h.work) == 0 }

// Process does all the work that waited when it was called, of all groups, in rounds: raft's messages leave, what it
// wants to keep goes to the log in one batch with one fsync, acknowledgements leave, committed entries are applied and
// callbacks are called. What callbacks queue is for the next call; Idle says whether one is needed. An error is final:
// the host has stopped, everything that waited was answered.
//
// Driven by a Runner it waits for neither the log nor the state machines: it begins what they have to do, and is called
// again when they have done it.
//
// Of what raft says acknowledgements, votes and requests for votes wait for the fsync. A leader's appends and heartbeats
// promise nothing about the sender's disk, for its term was synced with its vote, and so the followers' disks work at the
// same time as ours.
func (h *Host) Process() (err error) {
	if h.err != nil {
		return h.err
	}
	defer h.guard(&err)
	slices.SortFunc(h.work, func(a, b *Group) int { return cmp.Compare(a.id, b.id) })
	for _, g := range h.work {
		g.propose()
		g.reads.ask(g)
	}
	for {
		again := false
		for _, g := range h.work {
			if g.node.HasReady() {
				again = true
				rd := g.node.Ready()
				if err := h.take(g, &rd); err != nil {
					return h.fail(err)
				}
			}
		}
		h.sendHeartbeats()
		moved, err := h.advance()
		if err != nil {
			return h.fail(err)
		}
		h.callBack()
		if !again && !moved {
			break
		}
	}
	return h.rest()
}

// envelope begins one of the group to another member.
func (g *Group) envelope(to uint64, kind message.Kind) message.Envelope {
	return message.Envelope{From: g.host.opts.ID, To: to, FromDirID: g.host.dirIDs.own, ToDirID: g.dirIDOf(to), Kind: kind, Group: g.id}
}

// send hands a raft message to the transport.
func (h *Host) send(g *Group, m *raftpb.Message) {
	if message.IsHeartbeat(m) {
		g.addHeartbeat(m)
		return
	}
	e := g.envelope(m.GetTo(), message.KindRaft)
	e.Raft = m
	if m.GetType() == raftpb.MsgSnap {
		g.sendSnapshot(e)
		return
	}
	h.opts.Transport.Send(e)
}

// observe takes note of what raft has changed.
func (g *Group) observe(rd *raft.Ready) {
	if rd.SoftState != nil {
		g.role = rd.SoftState.RaftState
	}
	leader, term := g.leader, g.term
	if rd.SoftState != nil {
		leader = rd.SoftState.Lead
	}
	if !raft.IsEmptyHardState(rd.HardState) {
		term, g.commit = rd.HardState.GetTerm(), rd.HardState.GetCommit()
	}
	if leader != g.leader || term != g.term {
		g.leader, g.term = leader, term
		g.reads.resend = 0 // the question may have gone to the last one
		g.hold = 0
		if g.role == raft.StateLeader {
			g.arrived = arrivals{term: term}
		}
		g.lose()
		g.host.leads(Leadership{Group: g.id, Leader: leader, Term: term})
	}
	g.reads.hear(g, rd.ReadStates)
	g.reads.release(g)
	g.checkTransfer(g.host.now)
	g.checkChange(g.host.now)
}

// rest ends Process: cuts logs that have grown, drops what nobody took, keeps the groups that have more to do.
func (h *Host) rest() error {
	for _, g := range h.work {
		g.trim()
		g.dropIncoming()
	}
	if _, err := h.advance(); err != nil {
		return h.fail(err)
	}
	more := h.work[:0]
	for _, g := range h.work {
		if g.queued = g.proposing() || g.reads.due(g) || g.node.HasReady(); g.queued {
			more = append(more, g)
		}
	}
	clear(h.work[len(more):])
	h.work = more
	return nil
}

// trim lets the log be cut when it is a quarter longer than the tail that is kept for followers.
func (g *Group) trim() {
	limits, l := &g.host.opts.Limits, g.storage
	count, bytes := l.Last().Index-l.Begin().Index, l.Bytes()
	if count <= limits.TailEntries+limits.TailEntries/4 && bytes <= limits.TailBytes+limits.TailBytes/4 ||
		l.Truncating() || l.Last().Index < g.flushAfter && bytes < g.flushBytes || g.flushing || g.installing != nil {
		return
	}
	g.flushing = true
	var flushed uint64
	g.enqueue(&job{
		run: func() (err error) {
			if flushed, err = g.machine.Flush(); err != nil {
				err = fmt.Errorf("flush the state: %w", err)
			}
			return err
		},
		then: func() error {
			g.flushing = false
			return g.cut(flushed)
		},
	})
}

// cut lets the next write cut the log below what the state machine has flushed.
func (g *Group) cut(flushed uint64) error {
	limits, l := &g.host.opts.Limits, g.storage
	to := l.Tail(limits.TailBytes)
	if count := l.Last().Index - l.Begin().Index; count > limits.TailEntries {
		to = max(to, l.Last().Index-limits.TailEntries)
	}
	to = min(to, flushed, g.applied.Index)
	to = g.keepFor(to)
	g.flushAfter, g.flushBytes = l.Last().Index+limits.TailEntries/8+1, l.Bytes()+limits.TailBytes/8+1
	if to <= l.Begin().Index || g.installing != nil {
		return nil
	}
	term, err := l.Term(to)
	if err != nil {
		return err
	}
	l.TruncateLater(raftconf.Position{Index: to, Term: term})
	g.flushAfter, g.flushBytes = 0, 0
	return nil
}

// keepFor is how far a leader may cut its log without keeping others from going on with it, as long as what is kept has
// bounds: a member that was away for a moment needs no state, and one that is being sent the state goes on from there.
func (g *Group) keepFor(to uint64) uint64 {
	limits, l := &g.host.opts.Limits, g.storage
	count, bytes := l.Last().Index-l.Begin().Index, l.Bytes()
	if bytes < 16*limits.TailBytes {
		for _, out := range g.outgoing {
			to = min(to, out.at.Index)
		}
	}
	if count < 2*limits.TailEntries && bytes < 4*limits.TailBytes && g.role == raft.StateLeader {
		g.node.WithProgress(func(_ uint64, _ raft.ProgressType, p tracker.Progress) {
			if p.Match >= l.Begin().Index {
				to = min(to, p.Match)
			}
		})
	}
	return to
}
