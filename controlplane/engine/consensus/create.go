package consensus

import (
	"errors"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3/raftpb"
)

// seedLog adds to the batch a log without entries for a state machine that is at state, with voters as the members. The
// log begins at the state, or after firstEntry if the state machine is empty. Later terms are above term.
func seedLog(e *engine, b *pebble.Batch, group uint64, state position, term uint64, voters []uint64) error {
	l := &groupLog{e: e, group: group, floor: state, members: membership{conf: &raftpb.ConfState{Voters: voters}}}
	if l.begin = l.floor; l.begin.index < firstEntry.index {
		l.begin = firstEntry
	}
	l.past = history{{l.begin.index, l.members}}
	l.hard = &raftpb.HardState{Term: new(max(l.begin.term, term)), Vote: new(uint64(0)), Commit: new(l.begin.index)}
	return errors.Join(l.putHard(b), l.putBegin(b))
}

// openExisting opens a log that was written before, to read it. missing reports that there is none; no log is made then.
// A log in which the installation of a snapshot was not finished is an error.
func openExisting(e *engine, group uint64) (l *groupLog, missing bool, err error) {
	v, err := e.get(groupKey(group, kindTrunc))
	if err != nil || v == nil {
		return nil, true, err
	}
	if v, err = e.get(groupKey(group, kindMarker)); err != nil || v != nil {
		return nil, false, errors.Join(err, errors.New("a snapshot was being installed: start the member once as it was, so that it finishes"))
	}
	return openLog(e, group, nil, 0)
}

// hideFirst cuts entry 1 from a log that was made when logs began with it: a member that joins must not begin there.
// It is raft's own, at the begin of the first term.
func (l *groupLog) hideFirst(applied position) (position, error) {
	if l.begin.index != 0 || l.hard.GetCommit() == 0 || len(l.members.conf.GetVoters()) == 0 {
		return applied, nil
	}
	term, err := l.Term(1)
	if err != nil {
		return applied, err
	}
	b := l.e.newBatch()
	defer b.Close()
	first := position{1, term}
	if err := l.truncate(b, first); err != nil {
		return applied, err
	}
	if applied.index == 0 {
		l.floor, applied = position{}, first
		if err := l.putBegin(b); err != nil {
			return applied, err
		}
	}
	return applied, l.e.commit(b)
}
