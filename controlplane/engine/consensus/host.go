package consensus

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// Transport sends envelopes to other members. It may drop, reorder and repeat envelopes. The goroutine that drives the
// host calls its methods. A method must not block, and must not call the host on that goroutine.
type Transport interface {
	Send(message.Envelope)
	// SendSnapshot delivers the envelope together with the files in dir. When the transport no longer needs dir, after
	// success or failure, it must call ReportSnapshot once. The transport must abort a transfer that makes no progress.
	SendSnapshot(e message.Envelope, dir string)
}

// Leadership is the current leader of a group and its term, as far as this member knows. Leader is 0 if no leader is
// known.
type Leadership struct {
	Group, Leader, Term uint64
}

// Host runs all groups of one member. It is not safe for concurrent use; use a Runner for that.
type Host struct {
	opts   Options
	engine *raftlog.Engine
	dirIDs dirIDs
	groups []*Group // ordered by id
	err    error    // the error that stopped the host; nil while it runs

	removed bool // this member was removed from all groups

	now       uint64            // number of ticks since the start
	heard     map[uint64]uint64 // the tick of the last message from each member
	lost      map[uint64]bool   // members that ReportUnreachable named and that sent nothing since
	nonce     uint64            // random number of this run; part of the IDs of reads, batches and forwarded envelopes
	questions uint64            // number of read requests
	snapshots uint64            // number of directories made for outgoing snapshots
	onLeader  func(Leadership)

	work          []*Group
	next          *write
	heartbeats    []heartbeats
	threads       *threads // set by a Runner; nil if the caller of Process does all work
	stallReported bool     // a stall of the disk was logged
	completions   []completion
	spare         []completion
}

// Open opens the data directory of a member. It creates the directory if it does not exist. The caller must add all
// groups before it calls Tick, Step or Process.
func Open(opts Options) (*Host, error) {
	if err := opts.ensureDefaults(); err != nil {
		return nil, fmt.Errorf("open consensus: %w", err)
	}
	opts.Log = opts.Log.With("member", opts.ID)
	h := &Host{opts: opts, heard: map[uint64]uint64{}, lost: map[uint64]bool{}, onLeader: func(Leadership) {}, next: &write{}}
	if err := h.open(); err != nil {
		return nil, fmt.Errorf("open consensus in %s: %w", opts.Dir, err)
	}
	return h, nil
}

func (h *Host) open() (err error) {
	fs := h.opts.FS
	if h.engine, err = raftlog.OpenEngine(raftlog.Preallocate(fs), fs.PathJoin(h.opts.Dir, "log"), h.opts.QuietLog, h.opts.Log); err != nil {
		return err
	}
	h.engine.OnSync = h.opts.OnLogSync
	defer func() {
		if err != nil {
			err = errors.Join(err, h.engine.Close())
		}
	}()
	if h.nonce, err = random(h.opts.Rand); err != nil {
		return err
	}
	if err := h.openDirIDs(); err != nil {
		return err
	}
	// Remove the files of snapshots that an earlier run was sending or receiving. They are useless, because their
	// transfers have ended.
	if err := fs.RemoveAll(h.SnapshotDir()); err != nil {
		return fmt.Errorf("clear old snapshots: %w", err)
	}
	if err := fs.MkdirAll(h.SnapshotDir(), 0o700); err != nil {
		return fmt.Errorf("make the directory of snapshots: %w", err)
	}
	return nil
}

// random reads a random number from r. The number is never 0.
func random(r io.Reader) (uint64, error) {
	var b [8]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return 0, fmt.Errorf("draw a random number: %w", err)
	}
	return max(binary.LittleEndian.Uint64(b[:]), 1), nil
}

// AddGroup opens a group. If the group is new on this host, its first members are Options.Members. AddGroup returns an
// error if the log and the state machine do not fit together, for example because only one of them was restored from a
// backup.
func (h *Host) AddGroup(o GroupOptions) (g *Group, err error) {
	if h.err != nil {
		return nil, h.err
	}
	if o.ID == 0 || o.Machine == nil {
		return nil, errors.New("add a group: it needs an id above 0 and a state machine")
	}
	at, found := slices.BinarySearchFunc(h.groups, o.ID, func(g *Group, id uint64) int { return cmp.Compare(g.id, id) })
	if found {
		return nil, fmt.Errorf("add group %d: it was added already", o.ID)
	}
	defer func() {
		if err != nil {
			g, err = nil, fmt.Errorf("add group %d (%s): %w", o.ID, o.Name, err)
		}
	}()
	defer h.guard(&err)
	g = &Group{
		host: h, id: o.ID, machine: o.Machine, forward: o.Forward, log: h.opts.Log.With("group", o.Name),
		outgoing: map[uint64]outgoingSnapshot{},
	}
	if err := g.open(); err != nil {
		return nil, err
	}
	h.groups = slices.Insert(h.groups, at, g)
	if h.dirIDs.vouched {
		g.start()
	}
	return g, nil
}

// Group returns the group with the given ID. It returns nil if the group was not added.
func (h *Host) Group(id uint64) *Group {
	for _, g := range h.groups {
		if g.id == id {
			return g
		}
	}
	return nil
}

// Tick advances the host's time by one tick. All timeouts are measured in ticks: those of elections, heartbeats,
// proposals and reads.
func (h *Host) Tick() (err error) {
	if h.err != nil {
		return h.err
	}
	defer h.guard(&err)
	h.now++
	if h.now == 1 {
		h.checkRemoved()
	}
	if h.removed {
		return h.fail(&RemovedError{h.opts.ID})
	}
	if !h.dirIDs.vouched {
		h.requestDirIDs()
	}
	for _, g := range h.groups {
		if h.dirIDs.vouched {
			g.node.Tick()
			if g.node.HasReady() {
				h.schedule(g)
			}
		}
		g.expire(h.now)
	}
	h.transferOnStall()
	h.callBack()
	return nil
}

// Step processes an envelope from another member. It drops a malformed envelope and one from an unknown member. If it
// returns an error, this host has stopped.
func (h *Host) Step(e message.Envelope) (err error) {
	if h.err != nil {
		return h.err
	}
	defer h.guard(&err)
	if e.To != h.opts.ID || e.From == h.opts.ID || e.From == 0 {
		h.opts.Log.Debug("dropped an envelope that is not for this member", "from", e.From, "to", e.To)
		return nil
	}
	switch e.Kind {
	case message.KindDirIDRequest, message.KindDirIDResponse:
		switch {
		case !slices.Contains(h.opts.Members, e.From):
		case e.Kind == message.KindDirIDRequest:
			return h.answerDirIDRequest(e)
		default:
			return h.handleDirIDResponse(e)
		}
	case message.KindRaft:
		if g, err := h.admit(e); g == nil || err != nil {
			return err
		} else if e.Raft.Snapshot != nil {
			h.opts.Log.Warn("dropped a snapshot without its files", "from", e.From)
		} else {
			g.step(e)
		}
	case message.KindHeartbeats:
		return h.stepHeartbeats(e)
	case message.KindRemoved:
		if g := h.Group(e.Group); g != nil {
			g.handleRemoved(e)
		}
	case message.KindForward, message.KindRefuse:
		if g, err := h.admit(e); g == nil || err != nil {
			return err
		} else if e.Kind == message.KindForward {
			g.handleForward(e)
		} else {
			g.handleRefusal(e)
		}
	}
	return nil
}

// admit checks the sender and the content of an envelope, and returns the group that the envelope is for. If the
// envelope must be dropped, admit returns nil.
func (h *Host) admit(e message.Envelope) (*Group, error) {
	g := h.Group(e.Group)
	if g == nil {
		h.opts.Log.Debug("dropped a message for a group that is not here", "from", e.From, "id", e.Group)
		return nil, nil
	}
	if ok, err := g.accepts(e); !ok || err != nil {
		return nil, err
	}
	if err := e.Check(h.opts.Limits.ProposalBytes); err != nil {
		h.opts.Log.Warn("dropped a malformed message", "from", e.From, "err", err)
		return nil, nil
	}
	h.heard[e.From] = h.now
	delete(h.lost, e.From)
	return g, nil
}

// reportLeadership calls Options.OnLeader, and the Runner's callback if there is one, because the leader or the term of
// a group has changed.
func (h *Host) reportLeadership(l Leadership) {
	h.opts.OnLeader(l)
	h.onLeader(l)
}

// queueCallback makes the next callBack call f.
func (h *Host) queueCallback(f func()) { h.completions = append(h.completions, completion{other: f}) }

// guard recovers a panic of raft that was caused by a failed read of the log or by a violated invariant. It then stops
// the host and sets *err. Other panics continue. guard must be called by a defer statement.
func (h *Host) guard(err *error) {
	switch r := recover().(type) {
	case nil:
	case *raftPanic:
		*err = h.fail(r)
	case *raftlog.ReadError:
		*err = h.fail(r)
	default:
		panic(r)
	}
}

// fail stops the host for good because of err. The callbacks of all pending proposals and reads are called with an
// error.
func (h *Host) fail(err error) error {
	if h.err == nil {
		h.err = err
		if !errors.Is(err, ErrStopped) {
			h.opts.Log.Error("consensus has stopped", "err", err)
		}
		for _, g := range h.groups {
			g.fail(h.err)
		}
		h.callBack()
	}
	return h.err
}

// Err returns the error that stopped the host, nil while the host runs.
func (h *Host) Err() error { return h.err }

// Close stops the host. Pending proposals and reads fail with ErrStopped, and the log is closed. The caller must close
// the state machines afterwards.
func (h *Host) Close() error {
	if h.engine == nil {
		return nil
	}
	h.fail(ErrStopped)
	err := h.engine.Close()
	h.engine = nil
	return err
}
