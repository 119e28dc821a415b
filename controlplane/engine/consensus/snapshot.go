package consensus

import (
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// A leader sends a snapshot to a member that needs entries which the leader has truncated. raft decides which member
// needs one. The leader's state machine first writes a checkpoint to files. The message then gets the position of the
// checkpoint and is sent together with the files.
//
// The receiver durably stores a marker in its log before the state machine installs the files. The marker says which
// snapshot is being installed. The write that makes the log begin after the snapshot also removes the marker. So if a
// crash interrupts the installation, AddGroup finds the marker and completes the installation.

// outgoingSnapshot is a snapshot for another member. The state machine is writing its files, or the transport is
// sending it.
type outgoingSnapshot struct {
	at  raftconf.Position
	dir string
}

// incomingSnapshot is a snapshot that this member has received and passed to raft, and that raft has not accepted yet.
type incomingSnapshot struct {
	at  raftconf.Position
	dir string
}

// SnapshotDir returns the path, on Options.FS, of the directory for snapshot files. For each snapshot that it receives,
// the transport creates a directory in it. Open removes all files in it.
func (h *Host) SnapshotDir() string { return h.opts.FS.PathJoin(h.opts.Dir, "snap") }

func (h *Host) removeDir(dir string) {
	if err := h.opts.FS.RemoveAll(dir); err != nil {
		h.opts.Log.Warn("remove the files of a snapshot", "dir", dir, "err", err)
	}
}

// discard removes the directory dir and its files. It does so in a job on the state machine's goroutine, because it may
// take long.
func (g *Group) discard(dir string) {
	g.enqueue(&job{run: func() error { g.host.removeDir(dir); return nil }, then: func() error { return nil }})
	g.host.schedule(g)
}

// sendSnapshot sends a snapshot for the message MsgSnap of raft, which is in e. The state machine first writes a
// checkpoint. Then the transport gets the message and the files. If that fails, raft is notified and will request a
// snapshot again.
func (g *Group) sendSnapshot(e message.Envelope) {
	h := g.host
	if _, under := g.outgoing[e.To]; under {
		g.node.ReportSnapshot(e.To, raft.SnapshotFailure)
		return
	}
	h.snapshots++
	dir := h.opts.FS.PathJoin(h.SnapshotDir(), fmt.Sprintf("out-%d-%d-%d", g.id, e.To, h.snapshots))
	g.outgoing[e.To] = outgoingSnapshot{dir: dir} // position 0 prevents truncation until the checkpoint exists
	var state raftconf.Position
	var failure error
	g.enqueue(&job{
		run: func() error {
			if failure = h.opts.FS.MkdirAll(dir, 0o700); failure == nil {
				state.Index, state.Term, failure = g.machine.Checkpoint(dir)
			}
			return nil
		},
		then: func() error {
			at := state
			if at.Index < g.applied.Index {
				at = g.applied // the entries in between were not for the state machine
			}
			if failure == nil && at.Index < g.storage.Begin().Index {
				failure = fmt.Errorf("the checkpoint is at entry %d, the log begins after %d", at.Index, g.storage.Begin().Index)
			}
			if failure != nil {
				g.log.Warn("make a snapshot", "to", e.To, "err", failure)
				delete(g.outgoing, e.To)
				g.discard(dir)
				g.node.ReportSnapshot(e.To, raft.SnapshotFailure)
				h.schedule(g)
				return nil
			}
			members := g.storage.MembersAt(at.Index)
			e.Raft.Snapshot = &raftpb.Snapshot{Data: message.AppendSnapshotData(state, members), Metadata: &raftpb.SnapshotMetadata{
				Index: &at.Index, Term: &at.Term, ConfState: members.Conf,
			}}
			g.outgoing[e.To] = outgoingSnapshot{at, dir}
			h.opts.Transport.SendSnapshot(e, dir)
			return nil
		},
	})
}

// ReportSnapshot must be called when a Transport.SendSnapshot has ended. It notifies raft whether the snapshot was
// delivered, and removes the snapshot's files on this member.
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
	g.discard(out.dir)
	status := raft.SnapshotFinish
	if !delivered {
		status = raft.SnapshotFailure
	}
	g.node.ReportSnapshot(to, status)
	h.schedule(g)
	return nil
}

// StepSnapshot processes an envelope with a snapshot whose received files are in the directory dir. The host will move
// or remove the files.
func (h *Host) StepSnapshot(e message.Envelope, dir string) (err error) {
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
	g.incoming = append(g.incoming, incomingSnapshot{raftconf.Position{Index: m.GetIndex(), Term: m.GetTerm()}, dir})
	g.step(e)
	return nil
}

// installation is a snapshot that the state machine is installing. queuedWrites has raft's later writes to the log,
// which must wait until the installation has ended.
type installation struct {
	begin        raftconf.LogStart
	queuedWrites []stored
}

// install starts to install a snapshot that raft has accepted. First the marker is written to the log. When it is
// durable, the state machine installs the files. Then finishInstallation makes the log begin after the snapshot.
func (g *Group) install(s stored) error {
	p, err := message.ParseSnapshot(s.m.Snapshot)
	if err != nil {
		return fmt.Errorf("install a snapshot: %w", err)
	}
	g.installing = &installation{begin: p}
	h := g.host
	if !mutant.On(mutant.SkipInstallMarker) {
		if err := g.storage.PutSnapshotMarker(h.batch(), p); err != nil {
			return err
		}
	}
	var state raftconf.Position
	restore := &job{
		run: func() error {
			if err := g.machine.Restore(s.dir); err != nil {
				return fmt.Errorf("install a snapshot at entry %d: %w", p.At.Index, err)
			}
			state.Index, state.Term = g.machine.Applied()
			return nil
		},
		then: func() error {
			if state != p.State {
				return fmt.Errorf("install a snapshot with the state at entry %d of term %d: it is at %d of %d", p.State.Index, p.State.Term, state.Index, state.Term)
			}
			return g.finishInstallation(s)
		},
	}
	h.next.after = append(h.next.after, after{g: g, then: func() error {
		g.enqueue(restore)
		return nil
	}})
	return nil
}

// finishInstallation is called when the state machine has installed a snapshot. It makes the log begin after the
// snapshot, and then adds the writes that waited to the next write of the log. Proposals that may be among the entries
// in the snapshot fail with ErrUncertain, because a snapshot does not show which entries it contains.
func (g *Group) finishInstallation(s stored) error {
	h, in := g.host, g.installing
	p := in.begin
	g.installing = nil
	g.log.Info("installed a snapshot", "index", p.At.Index)
	g.applied, g.handed = p.At, p.At
	for len(g.inflight) > 0 && g.inflight[0].at.Index <= p.At.Index {
		h.complete(g.takeInflight(), Result{}, ErrUncertain)
	}
	g.answer(g.sent.drain(func(*proposal) bool { return true }), ErrUncertain)
	g.discard(s.dir)
	if err := g.storage.Reset(h.batch(), p.At, p.State, p.Members); err != nil {
		return err
	}
	if err := g.storage.Write(h.batch(), hardState(s.m), s.m.Entries); err != nil {
		return err
	}
	h.next.after = append(h.next.after, after{g: g, responses: s.m.Responses})
	g.reads.release(g)
	for i, later := range in.queuedWrites {
		if g.installing != nil { // a waiting write has begun another installation
			g.installing.queuedWrites = append(g.installing.queuedWrites, in.queuedWrites[i:]...)
			break
		}
		if err := g.store(later); err != nil {
			return err
		}
	}
	return nil
}

// takeIncoming removes the received snapshot at the given position from g.incoming. It returns the directory with the
// snapshot's files, which the caller must remove. If there is no such snapshot, it returns "".
func (g *Group) takeIncoming(at raftconf.Position) string {
	for i, in := range g.incoming {
		if in.at == at {
			g.incoming = slices.Delete(g.incoming, i, i+1)
			return in.dir
		}
	}
	return ""
}

// dropIncoming removes the files of received snapshots that raft did not accept.
func (g *Group) dropIncoming() {
	for _, in := range g.incoming {
		g.discard(in.dir)
	}
	g.incoming = g.incoming[:0]
}

// reconcile is called when the group is opened. It checks that the log and the state machine fit together, and returns
// an error if they do not. If a crash interrupted the installation of a snapshot, it completes the installation. It
// raises the commit index to the index that the state machine has applied. fresh is true if the log was just created.
func (g *Group) reconcile(fresh bool) error {
	l := g.storage
	index, term := g.machine.Applied()
	if fresh && index != 0 {
		return fmt.Errorf("the state is at entry %d, but there is no log for it", index)
	}
	if err := g.finishInstall(raftconf.Position{Index: index, Term: term}); err != nil {
		return err
	}
	applied := raftconf.Position{Index: index, Term: term}
	if index < l.Begin().Index && applied == l.State() {
		applied = l.Begin() // the entries between the two positions were not for the state machine
	}
	switch {
	case applied.Index < l.Begin().Index:
		return fmt.Errorf("the state is at entry %d, but the log begins after %d: the state has lost what it had flushed", index, l.Begin().Index)
	case index > l.Last().Index || l.HardState().GetCommit() > l.Last().Index:
		return fmt.Errorf("the state is at entry %d, but the log ends at %d: the log has lost what it had acknowledged", index, l.Last().Index)
	}
	logTerm, err := l.Term(applied.Index)
	if err != nil {
		return err
	}
	if logTerm != applied.Term {
		return fmt.Errorf("entry %d is of term %d in the state, but of term %d in the log", index, term, logTerm)
	}
	l.RaiseCommit(applied.Index)
	if applied, err = l.HideFirstEntry(applied); err != nil {
		return err
	}
	g.applied = applied
	l.SetApplied(applied.Index)
	return l.ApplyChanges(applied.Index, g.host.dirIDs.known)
}

// finishInstall handles an installation of a snapshot that a crash has interrupted. applied is the position of the
// state machine. If that is the position of the snapshot, finishInstall completes the installation in the log. If it is
// before the snapshot, the state machine has not installed it, and finishInstall removes the marker.
func (g *Group) finishInstall(applied raftconf.Position) error {
	l := g.storage
	p, found, err := l.SnapshotMarker()
	if !found || err != nil {
		return err
	}
	switch {
	case applied == p.State:
		g.log.Info("finished the installation of a snapshot", "index", p.At.Index)
		return l.FinishSnapshot(p)
	case applied.Index < p.State.Index:
		return l.DeleteSnapshotMarker() // the state machine did not install it
	default:
		return fmt.Errorf("the state is at entry %d, beyond the snapshot at %d that was being installed", applied.Index, p.At.Index)
	}
}
