package consensus

import (
	"fmt"
	"log/slog"

	"go.etcd.io/raft/v3"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// Entry is one committed proposal.
type Entry struct {
	// Index grows from one to the next: raft's own entries take indexes, too, and are not shown. Proposals without an id
	// may share one; they are applied together.
	Index uint64
	Term  uint64
	ID    [16]byte
	// Wanted says that somebody on this member waits for the answer to this entry. It may differ from member to member,
	// and so must not change the state.
	Wanted bool
	// Data belongs to the log: it must not be changed, nor kept after Apply returned.
	Data []byte
}

// StateMachine is what a group replicates. Its methods are called by one goroutine at a time, which a Runner has for each
// group: a machine that is slow delays its own group's answers and nothing else. It need not sync what it applies:
// after a crash it may come back at any earlier index that Flush returned, or later.
type StateMachine interface {
	// Apply changes the state by the entries, in order, and returns one answer each, which counts where Entry.Wanted
	// only. The index and term of the last entry are part of the state and change with it atomically, and so do all
	// entries of one index. It depends on nothing but the state and the entries. A refusal is an answer; an error says
	// that the state cannot be written and ends the host.
	Apply([]Entry) ([]any, error)
	// Applied returns the place of the last entry in the state, zeroes if there is none.
	Applied() (index, term uint64)
	// Flush returns the index up to which the state would survive a crash. It may make that true first, but must not take
	// long: a machine with much to write does so in the background and returns what holds until then. An error ends the
	// host.
	Flush() (index uint64, err error)
	// Checkpoint writes the state to files in dir, which exists and is empty, or in directories below, and returns its
	// place. The files need not be synced. It should be quick (links), for what is to be applied waits; after an error
	// raft tries again.
	Checkpoint(dir string) (index, term uint64, err error)
	// Restore replaces the state by that of a checkpoint's files, which it may move. It is atomic and durable: after a
	// crash at any moment the machine has the old or the new state and no need of dir.
	Restore(dir string) error
}

// Result is where a proposal was applied and what the state machine answered.
type Result struct {
	Index, Term uint64
	Answer      any
}

// GroupOptions describe one group; all but Forward are required.
type GroupOptions struct {
	ID      uint64 // above 0, the same on all members
	Name    string // for logs
	Machine StateMachine
	// Forward lets members that do not lead take proposals, too: they send them to the leader, and answer when they apply
	// them themselves. The same on all members. Proposals that are under way at the same time then need different ids,
	// unless the state machine answers each id once; those without an id are told apart by place.
	Forward bool
}

// Group is one raft group of a host. Like the host it is not safe for concurrent use.
type Group struct {
	host    *Host
	id      uint64
	log     *slog.Logger
	machine StateMachine
	storage *raftlog.Log
	node    *raft.RawNode
	queued  bool // in host.work

	// As of the last Ready.
	role   raft.StateType
	leader uint64
	term   uint64
	commit uint64

	handed  raftconf.Position // the last entry given to the state machine
	applied raftconf.Position // the last one that it has applied

	forward       bool
	queue         []*proposal        // not yet given to raft, nor sent to the leader
	fresh         int                // the last ones of inflight, whose index the next Ready tells
	inflight      []*proposal        // in the log of this leader, by index
	sent          sent               // perhaps in the log of a leader
	proposalBytes uint64             // of all three
	hold          uint64             // the tick before which nothing is sent to the leader
	forwarded     uint64             // envelopes, for their numbers
	batches       uint64             // made, for their ids
	arrived       arrivals           // of other members, for the leader
	mail          []message.Envelope // the same, not yet given to raft
	waiting       uint64             // about how many bytes are in queue and mail
	reads         reads
	transfer      *transfer
	change        *memberChange
	removed       bool              // as another member says
	unlisted      map[uint64]uint64 // directory IDs of senders that are not in the group as of the last applied entry
	flushAfter    uint64            // the last index from which another Flush is worth asking,
	flushBytes    uint64            // or how large the log is then

	flushing bool
	asked    raftconf.Position // the highest number of reads that a heartbeat of the term asked to confirm

	incoming   []incomingSnapshot
	installing *installation
	outgoing   map[uint64]outgoingSnapshot

	jobs    []*job   // for the state machine, in order
	working bool     // a Runner has some of them
	spare   *entries // for the next job
}

// open reads the log, compares it with the state machine and starts raft.
func (g *Group) open() error {
	h := g.host
	var err error
	var fresh bool
	if g.storage, fresh, err = raftlog.Open(h.engine, g.id, h.opts.Members, h.opts.Limits.CacheBytes); err != nil {
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
		Applied:                   g.applied.Index,
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
		AsyncStorageWrites:        true,
		StepDownOnRemoval:         true,
	})
	if err != nil {
		return fmt.Errorf("start raft: %w", err)
	}
	g.term, g.commit, g.handed = g.storage.HardState().GetTerm(), g.storage.HardState().GetCommit(), g.applied
	h.schedule(g) // committed entries may wait to be applied again
	return nil
}

// start lets a group of one begin without waiting for an election that nobody else takes part in.
func (g *Group) start() {
	if voters := g.storage.Members().Conf.GetVoters(); len(voters) == 1 && voters[0] == g.host.opts.ID {
		if err := g.node.Campaign(); err != nil {
			g.log.Warn("campaign alone", "err", err)
		}
	}
	g.host.schedule(g)
}

// ID returns the group's id.
func (g *Group) ID() uint64 { return g.id }
