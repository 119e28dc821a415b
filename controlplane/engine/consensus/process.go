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

// completion is a queued call of a callback, with its arguments. Exactly one of the fields proposal, read and other is
// set.
type completion struct {
	proposal callback
	read     *Read
	other    func()
	result   Result
	err      error
}

// schedule adds the group to h.work, so that the next call of Process handles it.
func (h *Host) schedule(g *Group) {
	if !g.queued {
		g.queued = true
		h.work = append(h.work, g)
	}
}

// complete queues the callbacks of p, all with the same result and error. p is a proposal or a batch.
func (h *Host) complete(p *proposal, result Result, err error) {
	p.reply(h.reply, result, err)
}

func (h *Host) reply(ask callback, result Result, err error) {
	h.completions = append(h.completions, completion{proposal: ask, result: result, err: err})
}

// callBack calls the queued callbacks. If these queue further callbacks, it calls them, too.
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

// Idle reports whether a call of Process would do nothing.
func (h *Host) Idle() bool { return h.err != nil || len(h.work) == 0 }

// Process does the queued work of all groups, in rounds. Each round sends raft's messages, writes entries and votes to
// the log in one batch with one fsync, sends the acknowledgements, applies committed entries and calls callbacks. If
// callbacks queue new work, Idle returns false afterwards and Process must be called again. An error is final: the host
// has stopped, and all pending calls have failed.
//
// Under a Runner, Process waits for neither the log nor the state machines. It starts their work, and the Runner calls
// Process again when that work is finished.
//
// Acknowledgements, votes and vote requests are sent after the fsync. A leader's appends and heartbeats are sent before
// the fsync, because they promise nothing about the leader's disk: the leader's term was synced together with its vote.
// So the disks of leader and followers work at the same time.
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

// envelope returns an envelope of the given kind from this group to another member. Only the fields that say where it
// comes from and goes to are set.
func (g *Group) envelope(to uint64, kind message.Kind) message.Envelope {
	return message.Envelope{From: g.host.opts.ID, To: to, FromDirID: g.host.dirIDs.own, ToDirID: g.dirIDOf(to), Kind: kind, Group: g.id}
}

// send sends a raft message to another member. A heartbeat is only collected; sendHeartbeats sends it. A snapshot is
// sent later, when the state machine has written its files.
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

// observe copies the role, leader, term and commit index from raft's Ready to the group. If the leader or the term is
// new, it reports that and handles pending proposals and reads accordingly.
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

// endProcess does the last part of Process: it truncates logs that are too long, removes the files of snapshots that
// raft refused, and keeps in h.work only the groups that have more work.
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

// trim starts the truncation of a log that has become too long: it makes the state machine flush, and then calls
// scheduleTruncation. A log is too long if it exceeds the part that is kept for slow followers (Limits.TailEntries and
// Limits.TailBytes) by a quarter.
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

// scheduleTruncation makes the next write truncate the log, at most up to the index flushed, which the state machine
// has flushed. The newest entries stay in the log, according to Limits.TailEntries and Limits.TailBytes.
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

// truncationLimit returns the index up to which the log may be truncated. This is the parameter to, or a lower index if
// other members still need earlier entries. A leader keeps the entries that a slow follower lacks, as long as the log
// has less than 2 × Limits.TailEntries entries and 4 × Limits.TailBytes bytes. A member that is sending a snapshot
// keeps the entries after the snapshot, as long as the log has less than 16 × Limits.TailBytes bytes.
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
