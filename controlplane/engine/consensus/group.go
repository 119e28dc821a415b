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
	// Index is the index in the raft log. It never decreases from one Entry to the next. It has gaps, because the
	// entries that raft adds itself have indexes, too. Proposals without an ID may share an index; then they are
	// applied together.
	Index uint64
	Term  uint64
	ID    [16]byte
	// Wanted reports whether a caller on this member waits for the result of this entry. Wanted differs between
	// members, so the new state must not depend on it.
	Wanted bool
	// Data is the proposal. Its memory belongs to the log: StateMachine.Apply must not change it, and must not keep a
	// reference to it after returning.
	Data []byte
}

// StateMachine is the replicated state machine of a group. Its methods are not called concurrently. Under a Runner each
// group has a goroutine that calls them, so a slow state machine delays only its own group. A state machine need not
// sync what it applies. After a crash its state may be as of any index that is not below the last one that Flush
// returned.
type StateMachine interface {
	// Apply applies the entries to the state, in order, and returns one result per entry. A result is used only if
	// Entry.Wanted is set. The state contains the index and term of the last applied entry and changes atomically with
	// them; all entries of one index are applied atomically. Apply must depend only on the state and the entries. If
	// the state machine refuses a request, that is a result. An error means that the state cannot be written, and stops
	// the host.
	Apply([]Entry) ([]any, error)
	// Applied returns the index and term of the last applied entry. Both are zero if no entry was applied.
	Applied() (index, term uint64)
	// Flush returns the index up to which the state would survive a crash now. It is called when the log has become
	// long, so that the log can be truncated. Flush may sync first, but must not take long: a state machine that has
	// much to write starts to write it in the background, and returns the index of the last completed write. An error
	// stops the host.
	Flush() (index uint64, err error)
	// Checkpoint writes the state to files in or below dir, which exists and is empty, and returns the index and term
	// of the state. The files need not be synced. Checkpoint should be quick, for example by hard links, because no
	// entry is applied meanwhile. If it fails, raft requests another one later.
	Checkpoint(dir string) (index, term uint64, err error)
	// Restore replaces the state by the checkpoint whose files are in dir. It may move the files. Restore is atomic and
	// durable: after a crash at any moment, the state machine has either the old or the new state, and does not need
	// dir.
	Restore(dir string) error
}

// Result is the result of a proposal: the index and term of its entry, and the value that StateMachine.Apply returned.
type Result struct {
	Index, Term uint64
	Answer      any
}

// GroupOptions has the arguments of Host.AddGroup. All fields except Forward are required.
type GroupOptions struct {
	ID      uint64 // above 0, the same on all members
	Name    string // for logs
	Machine StateMachine
	// Forward makes a member that does not lead forward its proposals to the leader, and complete each proposal when it
	// applies the entry itself. It must be the same on all members. Two concurrent proposals may have the same ID only
	// if the state machine applies each ID once. This does not concern proposals without an ID.
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

	// role, leader, term and commit are the values of raft's last Ready.
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

// open opens the group's log, checks that the log and the state machine fit together, and creates the raft node.
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

// start is called when this member may take part in the group. If this member is the only voter, it becomes a candidate
// at once, without waiting for an election timeout.
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
