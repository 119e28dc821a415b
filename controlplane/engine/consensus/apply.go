package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// The work for a group's state machine is a list of jobs, which run in order. Without a Runner, Process runs them. A
// Runner has one goroutine per group that runs them, so that raft continues meanwhile.

// job is one piece of work for a state machine: to apply entries, to flush, or to write or install a snapshot.
type job struct {
	// run does the work, on the state machine's goroutine. It must not access the Group.
	run func() error
	// then, which is called on the Host's goroutine in the order of the jobs, handles the result of run. After an error
	// of run or then, no further then is called.
	then func() error

	// The following fields are set only in a job that applies entries.
	entries *entries
	last    raftconf.Position
	reply   func(callback, Result, error) // set before run
}

// entries holds the entries that a job applies, and the proposals that wait for them.
type entries struct {
	raw       []*raftpb.Entry
	claimed   []*proposal       // the proposal of each element of raw; nil if it was not made on this member
	changes   []*raftpb.Entry   // entries that are membership changes, which the state machine does not get
	responses []*raftpb.Message // raft's responses, delivered after the job

	// list has the entries of one call of StateMachine.Apply. asks has the callback of each of them, nil if no caller
	// on this member waits for the entry.
	list []Entry
	asks []callback
}

// enqueue appends j to the jobs of the group's state machine.
func (g *Group) enqueue(j *job) { g.jobs = append(g.jobs, j) }

// apply queues a job that applies the committed entries of m, or adds them to the last queued job if that applies
// entries, too.
func (g *Group) apply(m *raftpb.Message) error {
	var j *job
	if n := len(g.jobs); n > 0 && g.jobs[n-1].entries != nil {
		j = g.jobs[n-1]
	} else {
		j = &job{entries: g.spare}
		if g.spare = nil; j.entries == nil {
			j.entries = &entries{}
		}
		limit := g.host.opts.Limits.ApplyBytes
		j.run, j.then = func() error { return j.apply(g.machine, limit) }, func() error { return g.finishApply(j) }
		g.enqueue(j)
	}
	e := j.entries
	for _, ent := range m.Entries {
		at := raftconf.Position{Index: ent.GetIndex(), Term: ent.GetTerm()}
		g.handed, j.last = at, at
		if ent.GetType() != raftpb.EntryNormal {
			g.claim(at, nil)
			e.changes = append(e.changes, ent)
			continue
		}
		if len(ent.Data) == 0 {
			g.claim(at, nil)
			continue // the empty entry that raft appends at the begin of a term
		}
		id, err := message.EntryID(ent)
		if err != nil {
			return err
		}
		e.raw, e.claimed = append(e.raw, ent), append(e.claimed, g.claim(at, id))
	}
	e.responses = append(e.responses, m.Responses...)
	return nil
}

// apply passes the entries to the state machine and calls the callbacks of their proposals. Each call of
// StateMachine.Apply gets as many raft entries as are needed to reach limit bytes (uncompressed), and at least one.
func (j *job) apply(machine StateMachine, limit uint64) error {
	e := j.entries
	for first := 0; first < len(e.raw); {
		last, err := e.open(first, limit)
		if err != nil {
			return err
		}
		answers, err := machine.Apply(e.list)
		if err == nil && len(answers) != len(e.list) {
			err = fmt.Errorf("the state machine returned %d answers", len(answers))
		}
		if err != nil {
			return fmt.Errorf("apply entries %d to %d: %w", e.list[0].Index, e.list[len(e.list)-1].Index, err)
		}
		for i, ask := range e.asks {
			if ask != nil {
				j.reply(ask, Result{e.list[i].Index, e.list[i].Term, answers[i]}, nil)
			}
		}
		clear(e.claimed[first:last])
		clear(e.list) // release the references to the data
		clear(e.asks)
		e.list, e.asks = e.list[:0], e.asks[:0]
		first = last
	}
	return nil
}

// open decodes the proposals of e.raw from element first on, and appends them to e.list and their callbacks to e.asks.
// It stops when the decoded proposals have limit bytes. It returns the index of the first element that it did not
// decode.
func (e *entries) open(first int, limit uint64) (last int, err error) {
	size := uint64(0)
	for last = first; last < len(e.raw) && (last == first || size < limit); last++ {
		began, p := len(e.list), e.claimed[last]
		if e.list, err = decodeEntries(e.list, e.raw[last]); err != nil {
			return last, err
		}
		fresh := e.list[began:]
		switch {
		case p == nil:
			e.asks = append(e.asks, make([]callback, len(fresh))...)
		case p.parts == nil:
			e.asks = append(e.asks, p.done)
		default:
			e.asks = append(e.asks, p.parts...)
		}
		if len(e.asks) != len(e.list) {
			return last, fmt.Errorf("entry %d is not what was proposed: %d proposals, %d wait", e.raw[last].GetIndex(), len(fresh), len(p.parts))
		}
		for i := range fresh {
			fresh[i].Wanted = p != nil
			size += uint64(len(fresh[i].Data))
		}
	}
	return last, nil
}

// abandon calls the callbacks of a job's proposals with err. It is used for a job that has failed or will not run.
func (j *job) abandon(reply func(callback, Result, error), err error) {
	if j.entries == nil {
		return
	}
	for i, p := range j.entries.claimed {
		if p == nil {
			continue
		}
		j.entries.claimed[i] = nil
		p.reply(reply, Result{}, err)
	}
}

func (g *Group) finishApply(j *job) error {
	e := j.entries
	for _, ent := range e.changes {
		if err := g.applyMembers(ent); err != nil {
			return err
		}
	}
	g.applied = j.last
	g.storage.SetApplied(j.last.Index)
	g.deliver(e.responses)
	g.reads.release(g)
	clear(e.raw)
	clear(e.claimed)
	clear(e.changes)
	clear(e.responses)
	e.raw, e.claimed, e.changes, e.responses = e.raw[:0], e.claimed[:0], e.changes[:0], e.responses[:0]
	if max(cap(e.raw), cap(e.list)) <= maxSpare {
		g.spare = e
	}
	return nil
}

// maxSpare limits the capacity, in entries, of the slices that finishApply saves for the next job.
const maxSpare = 16 << 10

// work runs a group's jobs on the caller's goroutine.
func (g *Group) work() error {
	for len(g.jobs) > 0 {
		j := g.jobs[0]
		j.reply = g.host.reply
		if err := j.run(); err != nil {
			return err // Host.fail calls the callbacks
		}
		g.jobs[0] = nil
		g.jobs = g.jobs[1:]
		if err := j.then(); err != nil {
			return err
		}
	}
	g.jobs = nil
	return nil
}
