package consensus

import (
	"fmt"
	"log/slog"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Entry is one committed proposal.
type Entry struct {
	// Index grows by at least one from entry to entry: raft's own entries take indexes, too, and are not shown.
	Index uint64
	Term  uint64
	ID    [16]byte
	// Data belongs to the log: it must not be changed, nor kept after Apply returned.
	Data []byte
}

// StateMachine is what a group replicates. Its methods are called by one goroutine at a time. It need not sync what it
// applies: after a crash it may come back at any earlier index that Flush returned, or later.
type StateMachine interface {
	// Apply changes the state by the entries, in order, and returns one result each. The index and term of the last entry
	// are part of the state and change with it atomically. It depends on nothing but the state and the entries. A refusal
	// is a result; an error says that the state cannot be written and ends the host.
	Apply([]Entry) ([][]byte, error)
	// Applied returns the place of the last entry in the state, zeroes if there is none.
	Applied() (index, term uint64)
	// Flush returns the index up to which the state would survive a crash. It may make that true first, but must not take
	// long: a machine with much to write does so in the background and returns what holds until then. An error ends the host.
	Flush() (index uint64, err error)
	// Checkpoint writes the state to files in dir, which exists and is empty, or in directories below, and returns its
	// place. The files need not be synced. It should be quick (links), for the group waits; after an error raft tries again.
	Checkpoint(dir string) (index, term uint64, err error)
	// Restore replaces the state by that of a checkpoint's files, which it may move. It is atomic and durable: after a
	// crash at any moment the machine has the old or the new state and no need of dir.
	Restore(dir string) error
}

// Result is where a proposal was applied and what the state machine answered.
type Result struct {
	Index, Term uint64
	Data        []byte
}

// GroupOptions describe one group; all are required.
type GroupOptions struct {
	ID      uint64 // above 0, the same on all members
	Name    string // for logs
	Machine StateMachine
}

// Group is one raft group of a host. Like the host it is not safe for concurrent use.
type Group struct {
	host    *Host
	id      uint64
	log     *slog.Logger
	machine StateMachine
	storage *groupLog
	node    *raft.RawNode
	queued  bool // in host.work

	// As of the last Ready.
	role    raft.StateType
	leader  uint64
	term    uint64
	applied position

	queue         []*proposal // not yet given to raft
	fresh         int         // the last ones of inflight, whose index the next Ready tells
	inflight      []*proposal // in raft's log, by index
	proposalBytes uint64      // of both
	reads         reads
	transfer      *transfer
	flushAfter    uint64 // the last index from which another Flush is worth asking

	incoming []incomingSnapshot
	outgoing map[uint64]outgoingSnapshot
	entries  []Entry // reused by apply
}

// proposal waits for its entry to be applied. A nil done was answered.
type proposal struct {
	data     []byte // as in the log, until raft has it
	size     uint64
	at       position
	deadline uint64 // in ticks
	done     func(Result, error)
}

// Data of an entry: version, id, payload.
const (
	payloadVersion = 1
	payloadHeader  = 1 + 16
)

// open reads the log, compares it with the state machine and starts raft.
func (g *Group) open() error {
	h := g.host
	var err error
	var fresh bool
	if g.storage, fresh, err = openLog(h.engine, g.id, h.opts.Members, h.opts.Limits.CacheBytes); err != nil {
		return err
	}
	if err := g.reconcile(fresh); err != nil {
		return err
	}
	limits := h.opts.Limits
	g.node, err = raft.NewRawNode(&raft.Config{
		ID:                        h.opts.ID,
		ElectionTick:              h.opts.ElectionTicks,
		HeartbeatTick:             h.opts.HeartbeatTicks,
		Storage:                   g.storage,
		Applied:                   g.applied.index,
		MaxSizePerMsg:             limits.MessageBytes,
		MaxCommittedSizePerReady:  limits.ApplyBytes,
		MaxUncommittedEntriesSize: 2 * limits.UncommittedBytes, // Propose is stricter
		MaxInflightMsgs:           limits.InflightMessages,
		MaxInflightBytes:          limits.InflightBytes,
		CheckQuorum:               true,
		PreVote:                   true,
		ReadOnlyOption:            raft.ReadOnlySafe,
		Logger:                    raftLogger{g.log},
		DisableProposalForwarding: true,
		StepDownOnRemoval:         true,
	})
	if err != nil {
		return fmt.Errorf("start raft: %w", err)
	}
	g.term = g.storage.hard.GetTerm()
	h.schedule(g) // committed entries may wait to be applied again
	return nil
}

// start lets a group of one begin without waiting for an election that nobody else takes part in.
func (g *Group) start() {
	if voters := g.storage.conf.GetVoters(); len(voters) == 1 && voters[0] == g.host.opts.ID {
		if err := g.node.Campaign(); err != nil {
			g.log.Warn("campaign alone", "err", err)
		}
	}
	g.host.schedule(g)
}

// ID returns the group's id.
func (g *Group) ID() uint64 { return g.id }

// Propose asks for data to be applied under id, which a retry repeats. done is called exactly once, when the entry is
// committed and applied or when that can no longer be promised: a *NotLeaderError, ErrOverloaded, ErrTooLarge or
// ErrStopped (nothing was done), or ErrUncertain. It may be called before Propose returns, and otherwise is during
// Process or Tick; it may propose and read, but not step or process the host. data is copied.
func (g *Group) Propose(id [16]byte, data []byte, done func(Result, error)) {
	limits := &g.host.opts.Limits
	switch {
	case g.host.err != nil:
		done(Result{}, g.host.err)
		return
	case g.role != raft.StateLeader:
		done(Result{}, &NotLeaderError{g.leader})
		return
	case len(data) > limits.ProposalBytes:
		done(Result{}, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(data), limits.ProposalBytes))
		return
	}
	size := uint64(payloadHeader + len(data))
	if g.proposalBytes > 0 && g.proposalBytes+size > limits.UncommittedBytes {
		done(Result{}, fmt.Errorf("%w: %d bytes of proposals are not committed yet", ErrOverloaded, g.proposalBytes))
		return
	}
	if mutant.On(mutant.AckBeforeCommit) {
		done(Result{}, nil)
		done = func(Result, error) {}
	}
	buf := make([]byte, payloadHeader, size)
	buf[0] = payloadVersion
	copy(buf[1:], id[:])
	g.queue = append(g.queue, &proposal{data: append(buf, data...), size: size, done: done, deadline: g.host.now + limits.ProposalTicks})
	g.proposalBytes += size
	g.host.schedule(g)
}

// propose gives raft what is queued, in as few messages as their size allows.
func (g *Group) propose() {
	if len(g.queue) == 0 {
		return
	}
	status := g.node.BasicStatus()
	queue := g.queue
	g.queue = nil
	if status.RaftState != raft.StateLeader || status.LeadTransferee != 0 {
		leader := status.Lead
		if status.LeadTransferee != 0 {
			leader = status.LeadTransferee
		}
		g.answer(queue, &NotLeaderError{leader})
		return
	}
	for len(queue) > 0 {
		n, size := 0, uint64(0)
		for n < len(queue) && (n == 0 || size+queue[n].size <= g.host.opts.Limits.MessageBytes) {
			size += queue[n].size
			n++
		}
		entries := make([]*raftpb.Entry, n)
		for i, p := range queue[:n] {
			entries[i] = &raftpb.Entry{Data: p.data} // raft copies
			p.data, p.at.term = nil, status.GetTerm()
		}
		err := g.node.Step(&raftpb.Message{Type: raftpb.MsgProp.Enum(), From: &g.host.opts.ID, Entries: entries})
		if err != nil {
			g.answer(queue[:n], ErrOverloaded)
		} else {
			g.inflight = append(g.inflight, queue[:n]...)
			g.fresh += n
		}
		queue = queue[n:]
	}
}

// number tells the proposals just given to raft their index: raft appended them last.
func (g *Group) number(entries []*raftpb.Entry) {
	for i := range g.fresh {
		g.inflight[len(g.inflight)-1-i].at.index = entries[len(entries)-1-i].GetIndex()
	}
	g.fresh = 0
}

// apply gives committed entries to the state machine and answers the proposals among them.
func (g *Group) apply(committed []*raftpb.Entry) error {
	if len(committed) == 0 {
		return nil
	}
	g.entries = g.entries[:0]
	for _, ent := range committed {
		if ent.GetType() != raftpb.EntryNormal {
			return fmt.Errorf("entry %d changes the members, which this version cannot do: start the version that wrote it", ent.GetIndex())
		}
		if len(ent.Data) == 0 {
			continue // raft's own, at the begin of a term
		}
		if len(ent.Data) < payloadHeader {
			return fmt.Errorf("entry %d is broken: %d bytes", ent.GetIndex(), len(ent.Data))
		}
		if v := ent.Data[0]; v != payloadVersion {
			return fmt.Errorf("entry %d has version %d, this program knows %d only: start the version that wrote it", ent.GetIndex(), v, payloadVersion)
		}
		e := Entry{Index: ent.GetIndex(), Term: ent.GetTerm(), Data: ent.Data[payloadHeader:]}
		copy(e.ID[:], ent.Data[1:])
		g.entries = append(g.entries, e)
	}
	var results [][]byte
	if len(g.entries) > 0 {
		var err error
		if results, err = g.machine.Apply(g.entries); err != nil {
			return fmt.Errorf("apply entries %d to %d: %w", g.entries[0].Index, g.entries[len(g.entries)-1].Index, err)
		}
		if len(results) != len(g.entries) {
			return fmt.Errorf("apply %d entries: the state machine returned %d results", len(g.entries), len(results))
		}
	}
	for _, ent := range committed {
		at := position{ent.GetIndex(), ent.GetTerm()}
		if len(ent.Data) == 0 {
			g.settle(at, nil)
			continue
		}
		g.settle(at, results[0])
		results = results[1:]
	}
	clear(g.entries) // do not keep the data
	last := committed[len(committed)-1]
	g.applied = position{last.GetIndex(), last.GetTerm()}
	g.storage.applied = g.applied.index
	return nil
}

// settle answers the proposal of the applied entry, or the one whose place it took.
func (g *Group) settle(at position, result []byte) {
	for len(g.inflight) > 0 && g.inflight[0].at.index <= at.index {
		p := g.takeInflight()
		switch {
		case p.at == at:
			g.host.complete(p, Result{at.index, at.term, result}, nil)
		case p.at.index == at.index:
			g.host.complete(p, Result{}, &NotLeaderError{g.leader})
		default:
			g.host.complete(p, Result{}, ErrUncertain)
		}
	}
}

func (g *Group) takeInflight() *proposal {
	p := g.inflight[0]
	g.inflight[0] = nil
	g.inflight = g.inflight[1:]
	g.proposalBytes -= p.size
	return p
}

// lose gives up on proposals of terms in which this member does not lead any more, but for those known to be decided.
func (g *Group) lose() {
	commit := g.storage.hard.GetCommit()
	keep := g.inflight[:0]
	for _, p := range g.inflight {
		if p.at.index <= commit || g.role == raft.StateLeader && p.at.term == g.term {
			keep = append(keep, p)
			continue
		}
		g.proposalBytes -= p.size
		g.host.complete(p, Result{}, ErrUncertain)
	}
	clear(g.inflight[len(keep):])
	g.inflight = keep
}

// answer answers proposals that are in neither list any more.
func (g *Group) answer(ps []*proposal, err error) {
	for _, p := range ps {
		g.proposalBytes -= p.size
		g.host.complete(p, Result{}, err)
	}
}

// expire answers what waited too long.
func (g *Group) expire(now uint64) {
	for len(g.inflight) > 0 && g.inflight[0].deadline <= now {
		g.host.complete(g.takeInflight(), Result{}, ErrUncertain)
	}
	g.reads.expire(g, now)
	g.checkTransfer(now)
}

// fail answers everything with err, for the host is at its end.
func (g *Group) fail(err error) {
	g.answer(g.queue, err)
	g.queue = nil
	for len(g.inflight) > 0 {
		g.host.complete(g.takeInflight(), Result{}, fmt.Errorf("%w: %w", ErrUncertain, err))
	}
	g.reads.fail(g, err)
	g.endTransfer(err)
}
