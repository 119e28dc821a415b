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
	// Index is the index in the raft log. It never decreases from one Entry to the next. There are gaps, because raft's
	// own entries have indexes, too. Proposals without an id may share an index; they are applied together.
	Index uint64
	Term  uint64
	ID    [16]byte
	// Wanted reports whether a caller on this member waits for the result of this entry. It differs between members, so
	// the state must not depend on it.
	Wanted bool
	// Data is part of the log's memory. StateMachine.Apply must neither change it nor refer to it after returning.
	Data []byte
}

// StateMachine is the replicated state machine of a group. Its methods are called by one goroutine at a time. A Runner
// has one goroutine per group for them, so a slow state machine delays only its own group. A state machine need not
// sync what it applies: after a crash it may be at any index from the last one that Flush returned.
type StateMachine interface {
	// Apply applies the entries to the state, in order, and returns one result per entry, which is used only where
	// Entry.Wanted is set. The state contains the index and term of the last entry and changes atomically with them;
	// all entries of one index are applied atomically. Apply must depend only on the state and the entries. A refusal
	// is a result; an error means that the state cannot be written, and stops the host.
	Apply([]Entry) ([]any, error)
	// Applied returns the index and term of the last applied entry, zeros if no entry was applied.
	Applied() (index, term uint64)
	// Flush returns the index up to which the state survives a crash. It may sync first, but must not take long: a
	// state machine with much to write flushes in the background and returns the index of the last finished flush. An
	// error stops the host.
	Flush() (index uint64, err error)
	// Checkpoint writes the state to files in or below dir, which exists and is empty, and returns the index and term
	// of the state. The files need not be synced. Checkpoint should be quick (hard links), because no entry is applied
	// meanwhile. After an error raft tries again.
	Checkpoint(dir string) (index, term uint64, err error)
	// Restore replaces the state by that of a checkpoint's files in dir, which it may move. Restore is atomic and
	// durable: after a crash at any moment the state machine has the old or the new state and does not need dir.
	Restore(dir string) error
}

// Result holds the index and term at which a proposal was applied, and the value that StateMachine.Apply returned for
// it.
type Result struct {
	Index, Term uint64
	Answer      any
}

// GroupOptions has the arguments of Host.AddGroup. All fields except Forward are required.
type GroupOptions struct {
	ID      uint64 // above 0, the same on all members
	Name    string // for logs
	Machine StateMachine
	// Forward makes members that do not lead forward proposals to the leader and complete them when they apply the
	// entry themselves. It must be the same on all members. Concurrent proposals with the same id are allowed only if
	// the state machine applies each id once; proposals without an id are exempt.
	Forward bool
}

// Group is one raft group of a host. It is not safe for concurrent use.
type Group struct {
	host    *Host
	id      uint64
	log     *slog.Logger
	machine StateMachine
	storage *raftlog.Log
	node    *raft.RawNode
	queued  bool // whether the group is in host.work

	// role, leader, term and commit are raft's values as of the last Ready.
	role   raft.StateType
	leader uint64
	term   uint64
	commit uint64

	handed  raftconf.Position // the last entry queued for the state machine
	applied raftconf.Position // the last entry that the state machine has applied

	forward       bool
	queue         []*proposal        // proposals not yet passed to raft or forwarded
	fresh         int                // this many of the last proposals of inflight get their index with the next Ready
	inflight      []*proposal        // proposals in the log of this leader, ordered by index
	sent          sentProposals      // proposals forwarded to a leader, which may be in its log
	proposalBytes uint64             // bytes of the proposals in queue, inflight and sent
	hold          uint64             // the tick before which nothing is forwarded
	forwarded     uint64             // number of the last forwarded envelope; 0: none
	batches       uint64             // number of batches made; part of the batches' IDs
	arrived       arrivals           // envelopes that other members forwarded to this leader, to recognize repetitions
	forwardQueue  []message.Envelope // envelopes of proposals that other members forwarded, not yet passed to raft
	waiting       uint64             // approximate bytes of queue and forwardQueue
	reads         reads
	transfer      *transfer
	change        *memberChange
	removed       bool              // another member reported that this member was removed
	unlisted      map[uint64]uint64 // directory IDs of senders that are not in the group as of the last applied entry
	flushAfter    uint64            // trim calls Flush again when the log's last index has reached flushAfter
	flushBytes    uint64            // or when the log's size in bytes has reached flushBytes

	flushing bool
	asked    raftconf.Position // term of the last heartbeat sent, and the highest read-request number in it

	incoming   []incomingSnapshot
	installing *installation
	outgoing   map[uint64]outgoingSnapshot

	jobs    []*job   // for the state machine, in the order in which they run
	working bool     // a Runner's goroutine is running jobs of the group
	spare   *entries // a finished job's entries, reused for the next job
}

// open opens the group's log, checks it against the state machine and starts raft.
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
		MaxUncommittedEntriesSize: 2 * limits.UncommittedBytes, // Propose enforces half of this
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
	h.schedule(g) // there may be committed entries to apply again
	return nil
}

// start makes the only voter of a group a candidate at once, without waiting for an election timeout.
func (g *Group) start() {
	if voters := g.storage.Members().Conf.GetVoters(); len(voters) == 1 && voters[0] == g.host.opts.ID {
		if err := g.node.Campaign(); err != nil {
			g.log.Warn("campaign alone", "err", err)
		}
	}
	g.host.schedule(g)
}

// ID returns the number that identifies the group on all members (GroupOptions.ID).
func (g *Group) ID() uint64 { return g.id }
