package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// All work for a group's state machine is a list of jobs, which run one after another. Under a Runner, one goroutine
// per group runs the jobs, so that raft continues meanwhile. Without a Runner, Process runs the jobs itself.

// job is one piece of work for a state machine: apply entries, flush, write or install a snapshot, or remove the files
// of a snapshot.
type job struct {
	// run does the work. It is called on the state machine's goroutine, so it must not access the Group.
	run func() error
	// then handles the result of run. It is called on the Host's goroutine, in the order of the jobs. After an error of
	// run or then, the function then of later jobs is not called.
	then func() error

	// The following fields are set only if the job applies entries.
	entries *entries
	last    raftconf.Position
	reply   func(callback, Result, error) // set before run
}

// entries holds the raft entries that one job applies, and the proposals of this member that wait for them.
type entries struct {
	raw       []*raftpb.Entry
	claimed   []*proposal       // the proposal of each element of raw; nil if it was not made on this member
	changes   []*raftpb.Entry   // entries that are membership changes, which the state machine does not get
	responses []*raftpb.Message // raft's responses, delivered after the job

	// list has the decoded entries for one call of StateMachine.Apply. asks has one callback per element of list, which
	// is nil if no caller on this member waits for that entry.
	list []Entry
	asks []callback
}

// enqueue adds j at the end of the list of jobs for the group's state machine.
func (g *Group) enqueue(j *job) { g.jobs = append(g.jobs, j) }

// apply makes the state machine apply the committed entries of m. If the last queued job applies entries, it adds the
// entries of m to that job. Otherwise it queues a new job.
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

// apply passes the entries to the state machine and calls the callbacks of their proposals. One call of
// StateMachine.Apply gets raft entries until their data, uncompressed, has at least limit bytes. It gets at least one
// raft entry.
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

// open decodes the raft entries in e.raw, beginning with element first, and appends the result to e.list and e.asks. It
// stops when the decoded data has at least limit bytes. last is the index of the first element that was not decoded.
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

// abandon calls the callbacks of the job's proposals with err. It is called for a job that has failed, and for a job
// that will not run because the host stops.
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

// maxSpare limits the memory that is kept for reuse. finishApply keeps the slices of a job for the next job only if
// their capacity is at most maxSpare elements.
const maxSpare = 16 << 10

// work runs the group's jobs on the goroutine that calls Process. It is used only without a Runner.
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
