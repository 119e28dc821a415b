package raftlog

import (
	"errors"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// Seed adds to the batch b a new log without entries, whose membership has the given voters. state is the position of
// the state machine, and the log begins there. If the state machine is empty, the log begins at firstEntry. The entries
// that are later appended have higher terms than the parameter term.
func Seed(e *Engine, b *pebble.Batch, group uint64, state raftconf.Position, term uint64, voters []uint64) error {
	l := &Log{e: e, group: group, state: state, members: raftconf.Membership{Conf: &raftpb.ConfState{Voters: voters}}}
	if l.begin = l.state; l.begin.Index < firstEntry.Index {
		l.begin = firstEntry
	}
	l.past = raftconf.History{{Index: l.begin.Index, Membership: l.members}}
	l.hard = &raftpb.HardState{Term: new(max(l.begin.Term, term)), Vote: new(uint64(0)), Commit: new(l.begin.Index)}
	return errors.Join(l.putHard(b), l.putBegin(b))
}

// OpenExisting opens the log of a group for reading. It does not create a log: missing is true if the engine has no log
// of the group. It returns an error if a crash interrupted the installation of a snapshot.
func OpenExisting(e *Engine, group uint64) (l *Log, missing bool, err error) {
	v, err := e.get(groupKey(group, kindTrunc))
	if err != nil || v == nil {
		return nil, true, err
	}
	if v, err = e.get(groupKey(group, kindMarker)); err != nil || v != nil {
		return nil, false, errors.Join(err, errors.New("a snapshot was being installed: start the member once as it was, so that it finishes"))
	}
	return Open(e, group, nil, 0)
}

// HideFirstEntry converts a log that was created in layout 1 and still has entry 1, by truncating that entry. In layout
// 2 no log has entry 1, so that a joining member with an empty log needs a snapshot. applied is the position of the
// state machine. The result is the position from which raft continues: applied, or entry 1 if the state machine is
// empty.
func (l *Log) HideFirstEntry(applied raftconf.Position) (raftconf.Position, error) {
	if l.begin.Index != 0 || l.hard.GetCommit() == 0 || len(l.members.Conf.GetVoters()) == 0 {
		return applied, nil
	}
	term, err := l.Term(1)
	if err != nil {
		return applied, err
	}
	b := l.e.NewBatch()
	defer b.Close()
	first := raftconf.Position{Index: 1, Term: term}
	if err := l.truncate(b, first); err != nil {
		return applied, err
	}
	if applied.Index == 0 {
		l.state, applied = raftconf.Position{}, first
		if err := l.putBegin(b); err != nil {
			return applied, err
		}
	}
	return applied, l.e.Commit(b)
}
