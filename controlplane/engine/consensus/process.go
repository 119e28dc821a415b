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

// completion is a queued callback with its arguments. One of proposal, read and other is set.
type completion struct {
	proposal callback
	read     *Read
	other    func()
	result   Result
	err      error
}

// schedule adds the group to h.work, the groups that the next Process handles.
func (h *Host) schedule(g *Group) {
	if !g.queued {
		g.queued = true
		h.work = append(h.work, g)
	}
}

// complete queues all callbacks of a proposal, or of a batch, with the same result.
func (h *Host) complete(p *proposal, result Result, err error) {
	p.reply(h.reply, result, err)
}

func (h *Host) reply(ask callback, result Result, err error) {
	h.completions = append(h.completions, completion{proposal: ask, result: result, err: err})
}

// callBack calls the queued callbacks, and those that the callbacks queue meanwhile.
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

// Idle reports whether Process has nothing to do.
func (h *Host) Idle() bool { return h.err != nil || len(h.work) == 0 }

// Process does the queued work of all groups, in rounds. Each round sends raft's messages, writes entries and votes to
// the log in one batch with one fsync, sends the acknowledgements, applies committed entries and calls callbacks. Work
// that callbacks queue is left for the next call; Idle reports whether a call is needed. An error is final: the host
// has stopped, and all pending calls have failed.
//
// Under a Runner, Process waits for neither the log nor the state machines. It starts their work, and the Runner calls
// it again when that work is finished.
//
// Acknowledgements, votes and vote requests are sent after the fsync. A leader's appends and heartbeats are sent before
// it, because they promise nothing about the leader's disk: its term was synced together with its vote. So the disks of
// leader and followers work at the same time.
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
	return h.endProcess()
}

// envelope returns an envelope from the group to another member, with sender, receiver and group set.
func (g *Group) envelope(to uint64, kind message.Kind) message.Envelope {
	return message.Envelope{From: g.host.opts.ID, To: to, FromDirID: g.host.dirIDs.own, ToDirID: g.dirIDOf(to), Kind: kind, Group: g.id}
}

// send passes a raft message to the transport. Heartbeats are collected until sendHeartbeats, and snapshots are sent
// later, when their files exist.
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

// observe updates the group's copies of raft's role, leader, term and commit index. It reports a new leader or term and
// acts on the changes.
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
		g.reads.resend = 0 // the request may have gone to the previous leader
		g.hold = 0
		if g.role == raft.StateLeader {
			g.arrived = arrivals{term: term}
		}
		g.failUncertain()
		g.host.reportLeadership(Leadership{Group: g.id, Leader: leader, Term: term})
	}
	g.reads.handleResponses(g, rd.ReadStates)
	g.reads.release(g)
	g.checkTransfer(g.host.now)
	g.checkChange(g.host.now)
}

// endProcess completes Process: it truncates long logs, removes the files of refused snapshots, and leaves in h.work
// the groups that have more work.
func (h *Host) endProcess() error {
	for _, g := range h.work {
		g.trim()
		g.dropIncoming()
	}
	if _, err := h.advance(); err != nil {
		return h.fail(err)
	}
	more := h.work[:0]
	for _, g := range h.work {
		if g.queued = g.canPropose() || g.reads.due(g) || g.node.HasReady(); g.queued {
			more = append(more, g)
		}
	}
	clear(h.work[len(more):])
	h.work = more
	return nil
}

// trim asks the state machine to flush, so that the log can be truncated, when the log is a quarter longer than the
// tail that is kept for followers (Limits.TailEntries, Limits.TailBytes).
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
			return g.scheduleTruncation(flushed)
		},
	})
}

// scheduleTruncation lets the next write truncate the log, at most up to the index that the state machine has flushed
// and with at least the tail (Limits.TailEntries, Limits.TailBytes) left.
func (g *Group) scheduleTruncation(flushed uint64) error {
	limits, l := &g.host.opts.Limits, g.storage
	to := l.Tail(limits.TailBytes)
	if count := l.Last().Index - l.Begin().Index; count > limits.TailEntries {
		to = max(to, l.Last().Index-limits.TailEntries)
	}
	to = min(to, flushed, g.applied.Index)
	to = g.truncationLimit(to)
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

// truncationLimit returns the index up to which the log may be truncated: its argument, or less so that other members
// can continue with the log. A leader does not truncate the entries that a member behind it lacks, up to 2 ×
// Limits.TailEntries and 4 × Limits.TailBytes. The entries after a snapshot that is being sent are not truncated
// either, up to 16 × Limits.TailBytes.
func (g *Group) truncationLimit(to uint64) uint64 {
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
