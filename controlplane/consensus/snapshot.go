package consensus

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// Snapshots bring a member up whose next entry the leader's log does not have any more. raft only says whom to send one
// and from where on; what travels is a checkpoint of the state machine, made when the message is about to leave, and the
// message is rewritten to where that checkpoint is. It is made inline: a state machine on Pebble links files.
//
// On the way in, a marker in the log is synced before the state machine takes the files, and removed by the batch that
// makes the log begin after them. So a crash in between is seen on Open and finished.

// outgoingSnapshot is one on its way to a member.
type outgoingSnapshot struct {
	at  position
	dir string
}

// incomingSnapshot has arrived and was offered to raft.
type incomingSnapshot struct {
	at  position
	dir string
}

// SnapshotDir is where the transport makes directories for what it receives: on the host's file system, emptied by Open.
func (h *Host) SnapshotDir() string { return h.opts.FS.PathJoin(h.opts.Dir, "snap") }

func (h *Host) removeDir(dir string) {
	if err := h.opts.FS.RemoveAll(dir); err != nil {
		h.opts.Log.Warn("remove the files of a snapshot", "dir", dir, "err", err)
	}
}

// sendSnapshot makes the checkpoint that raft's message asks for and gives both to the transport. What goes wrong is
// told to raft, which tries again.
func (g *Group) sendSnapshot(e Envelope) {
	h := g.host
	if _, under := g.outgoing[e.To]; under {
		g.node.ReportSnapshot(e.To, raft.SnapshotFailure)
		return
	}
	h.snapshots++
	dir := h.opts.FS.PathJoin(h.SnapshotDir(), fmt.Sprintf("out-%d-%d-%d", g.id, e.To, h.snapshots))
	at, err := g.checkpoint(dir)
	if err != nil {
		g.log.Warn("make a snapshot", "to", e.To, "err", err)
		h.removeDir(dir)
		g.node.ReportSnapshot(e.To, raft.SnapshotFailure)
		return
	}
	e.Raft.Snapshot = &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: &at.index, Term: &at.term, ConfState: g.storage.conf,
	}}
	g.outgoing[e.To] = outgoingSnapshot{at, dir}
	h.opts.Transport.SendSnapshot(e, dir)
}

func (g *Group) checkpoint(dir string) (position, error) {
	if err := g.host.opts.FS.MkdirAll(dir, 0o700); err != nil {
		return position{}, err
	}
	index, term, err := g.machine.Checkpoint(dir)
	if err == nil && index < g.storage.begin.index {
		err = fmt.Errorf("the checkpoint is at entry %d, the log begins after %d", index, g.storage.begin.index)
	}
	return position{index, term}, err
}

// ReportSnapshot says how a Transport.SendSnapshot to a member ended; its directory is removed.
func (h *Host) ReportSnapshot(group, to uint64, delivered bool) (err error) {
	if h.err != nil {
		return h.err
	}
	defer h.guard(&err)
	g := h.Group(group)
	if g == nil {
		return nil
	}
	out, ok := g.outgoing[to]
	if !ok {
		return nil
	}
	delete(g.outgoing, to)
	h.removeDir(out.dir)
	status := raft.SnapshotFinish
	if !delivered {
		status = raft.SnapshotFailure
	}
	g.node.ReportSnapshot(to, status)
	h.schedule(g)
	return nil
}

// StepSnapshot takes an envelope that came with the files of a snapshot, now in dir, which is the host's from here on.
func (h *Host) StepSnapshot(e Envelope, dir string) (err error) {
	if h.err != nil {
		return h.err
	}
	defer h.guard(&err)
	g, err := h.admit(e)
	if g == nil || err != nil {
		h.removeDir(dir)
		return err
	}
	if e.Raft.GetType() != raftpb.MsgSnap {
		h.opts.Log.Warn("dropped the files of a message that is not a snapshot", "from", e.From)
		h.removeDir(dir)
		return nil
	}
	m := e.Raft.GetSnapshot().GetMetadata()
	g.incoming = append(g.incoming, incomingSnapshot{position{m.GetIndex(), m.GetTerm()}, dir})
	g.step(e)
	return nil
}

// install makes the state machine take the snapshot that raft accepted and puts the log behind it into the batch.
func (g *Group) install(b *pebble.Batch, m *raftpb.SnapshotMetadata) error {
	at := position{m.GetIndex(), m.GetTerm()}
	dir := ""
	for _, in := range g.incoming {
		if in.at == at {
			dir = in.dir
		}
	}
	if dir == "" {
		return fmt.Errorf("install a snapshot at entry %d: its files are missing", at.index)
	}
	if err := g.mark(at, m.GetConfState()); err != nil {
		return err
	}
	if err := g.machine.Restore(dir); err != nil {
		return fmt.Errorf("install a snapshot at entry %d: %w", at.index, err)
	}
	if index, term := g.machine.Applied(); (position{index, term}) != at {
		return fmt.Errorf("install a snapshot at entry %d of term %d: the state is at %d of %d", at.index, at.term, index, term)
	}
	g.log.Info("installed a snapshot", "index", at.index)
	g.applied = at
	for len(g.inflight) > 0 && g.inflight[0].at.index <= at.index {
		g.host.complete(g.takeInflight(), Result{}, ErrUncertain)
	}
	return g.storage.reset(b, at, m.GetConfState())
}

// mark notes, synced, that the state machine is about to hold a snapshot.
func (g *Group) mark(at position, conf *raftpb.ConfState) error {
	b := g.host.engine.db.NewBatch()
	defer b.Close()
	if err := putBegin(b, groupKey(g.id, kindMarker), at, conf); err != nil {
		return err
	}
	return g.host.engine.commit(b)
}

// dropIncoming removes the files that raft had no use for.
func (g *Group) dropIncoming() {
	for _, in := range g.incoming {
		g.host.removeDir(in.dir)
	}
	g.incoming = g.incoming[:0]
}

// reconcile compares the log with the state machine at the start, finishes the installation of a snapshot, and moves
// the commit index up to what is applied.
func (g *Group) reconcile(fresh bool) error {
	l := g.storage
	index, term := g.machine.Applied()
	if fresh && index != 0 {
		return fmt.Errorf("the state is at entry %d, but there is no log of it", index)
	}
	if err := g.finishInstall(position{index, term}); err != nil {
		return err
	}
	switch {
	case index < l.begin.index:
		return fmt.Errorf("the state is at entry %d, but the log begins after %d: the state has lost what it had flushed", index, l.begin.index)
	case index > l.last.index || l.hard.GetCommit() > l.last.index:
		return fmt.Errorf("the state is at entry %d, but the log ends at %d: the log has lost what it had acknowledged", index, l.last.index)
	}
	logTerm, err := l.Term(index)
	if err != nil {
		return err
	}
	if logTerm != term {
		return fmt.Errorf("entry %d is of term %d in the state, but of term %d in the log", index, term, logTerm)
	}
	if index > l.hard.GetCommit() {
		l.hard = &raftpb.HardState{Term: new(l.hard.GetTerm()), Vote: new(l.hard.GetVote()), Commit: new(index)}
	}
	g.applied = position{index, term}
	l.applied = index
	return nil
}

func (g *Group) finishInstall(applied position) error {
	l, key := g.storage, groupKey(g.id, kindMarker)
	v, err := l.e.get(key)
	if v == nil || err != nil {
		return err
	}
	at, conf, err := decodeBegin(v)
	if err != nil {
		return fmt.Errorf("read the marker of a snapshot: %w", err)
	}
	b := l.e.db.NewBatch()
	defer b.Close()
	switch {
	case applied == at:
		g.log.Info("finished the installation of a snapshot", "index", at.index)
		err = l.reset(b, at, conf)
	case applied.index < at.index:
		err = b.Delete(key, nil) // the state machine did not get to it
	default:
		err = fmt.Errorf("the state is at entry %d, beyond the snapshot at %d that was being installed", applied.index, at.index)
	}
	if err != nil {
		return err
	}
	return l.e.commit(b)
}
