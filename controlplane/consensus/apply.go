package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// A group's state machine has a thread of its own: what it shall do is a job, and jobs are done in order. Driven by
// steps, the thread is the caller's; a Runner has a goroutine for each group, and raft's goes on meanwhile.

// job is one piece of work for a state machine.
type job struct {
	// run does it, on the state machine's thread: it may touch nothing of the group.
	run func() error
	// then takes note of it, on raft's thread, in the order of the jobs. Nothing comes after an error of either.
	then func() error

	// Of a job that applies entries.
	entries *entries
	last    position
	reply   func(asker, Result, error) // set before run
}

// entries are what a job applies, and who waits for it.
type entries struct {
	list      []Entry
	claimed   []asker           // for each of the list, nil where nobody waits
	changes   []*raftpb.Entry   // of the members
	responses []*raftpb.Message // for raft
}

// enqueue adds a job.
func (g *Group) enqueue(j *job) { g.jobs = append(g.jobs, j) }

// apply makes a job of committed entries, or lengthens the last one while it was not begun.
func (g *Group) apply(m *raftpb.Message) error {
	var j *job
	if n := len(g.jobs); n > 0 && g.jobs[n-1].entries != nil {
		j = g.jobs[n-1]
	} else {
		j = &job{entries: g.spare}
		if g.spare = nil; j.entries == nil {
			j.entries = &entries{}
		}
		j.run, j.then = func() error { return j.apply(g.machine) }, func() error { return g.finishApply(j) }
		g.enqueue(j)
	}
	e := j.entries
	for _, ent := range m.Entries {
		at := position{ent.GetIndex(), ent.GetTerm()}
		g.handed, j.last = at, at
		if ent.GetType() != raftpb.EntryNormal {
			g.claim(at, nil)
			e.changes = append(e.changes, ent)
			continue
		}
		if len(ent.Data) == 0 {
			g.claim(at, nil)
			continue // raft's own, at the begin of a term
		}
		first := len(e.list)
		var err error
		if e.list, err = entriesOf(e.list, ent); err != nil {
			return err
		}
		p := g.claim(at, (*[16]byte)(ent.Data[1:payloadHeader]))
		fresh := e.list[first:]
		switch {
		case p == nil:
			e.claimed = append(e.claimed, make([]asker, len(fresh))...)
			continue
		case p.parts == nil:
			e.claimed = append(e.claimed, p.done)
		default:
			e.claimed = append(e.claimed, p.parts...)
		}
		if len(e.claimed) != len(e.list) {
			return fmt.Errorf("entry %d is not what was proposed: %d proposals, %d wait", at.index, len(fresh), len(p.parts))
		}
		for i := range fresh {
			fresh[i].Wanted = true
		}
	}
	e.responses = append(e.responses, m.Responses...)
	return nil
}

// apply gives the entries to the state machine and answers who waits for them.
func (j *job) apply(machine StateMachine) error {
	e := j.entries
	if len(e.list) == 0 {
		return nil
	}
	answers, err := machine.Apply(e.list)
	if err == nil && len(answers) != len(e.list) {
		err = fmt.Errorf("the state machine returned %d answers", len(answers))
	}
	if err != nil {
		return fmt.Errorf("apply entries %d to %d: %w", e.list[0].Index, e.list[len(e.list)-1].Index, err)
	}
	for i, ask := range e.claimed {
		if ask != nil {
			j.reply(ask, Result{e.list[i].Index, e.list[i].Term, answers[i]}, nil)
		}
	}
	clear(e.claimed)
	return nil
}

// abandon answers who waits for a job that will not be done, or was not done to its end.
func (j *job) abandon(reply func(asker, Result, error), err error) {
	if j.entries == nil {
		return
	}
	for i, ask := range j.entries.claimed {
		if ask != nil {
			j.entries.claimed[i] = nil
			reply(ask, Result{}, err)
		}
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
	g.storage.applied = j.last.index
	g.deliver(e.responses)
	g.reads.release(g)
	clear(e.list) // do not keep the data
	clear(e.changes)
	clear(e.responses)
	e.list, e.claimed, e.changes, e.responses = e.list[:0], e.claimed[:0], e.changes[:0], e.responses[:0]
	if cap(e.list) <= maxSpare {
		g.spare = e
	}
	return nil
}

// maxSpare entries are kept room for between jobs.
const maxSpare = 16 << 10

// work does a group's jobs on the caller's thread.
func (g *Group) work() error {
	for len(g.jobs) > 0 {
		j := g.jobs[0]
		j.reply = g.host.reply
		if err := j.run(); err != nil {
			return err // fail answers who waits
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
