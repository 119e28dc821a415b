package raftlog

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// entryOverhead is what an entry is taken to cost beyond its data, on disk, on the wire and in memory.
const entryOverhead = 32

// Log is the log of one group inside the engine, and raft's Storage. Writes go into a batch of the caller and are
// visible to raft at once: the caller commits the batch before it lets raft advance, or stops the host.
//
// The commit index is not worth a write of its own: it is stored with the next entries or vote, and found again after a
// restart from the state machine, which never is ahead of it.
type Log struct {
	e     *Engine
	group uint64

	begin   raftconf.Position   // the entry before the first one
	state   raftconf.Position   // where the state machine at least is; before begin if nothing after it was for the machine
	last    raftconf.Position   // the last entry, or begin
	members raftconf.Membership // as of applied
	past    raftconf.History    // up to applied
	changes []*raftpb.Entry     // the changes of members that Open found
	hard    *raftpb.HardState   // as raft knows it; nil before the first term
	stored  *raftpb.HardState   // as the engine has it
	applied uint64              // for Snapshot

	cache entryCache
	sizes sizeMarks
	cut   raftconf.Position // where the next batch shall cut the log; index 0 is nowhere
}

// FirstEntry is the last entry that no log holds: whoever has less needs a snapshot, and with it the list of members.
var FirstEntry = raftconf.Position{Index: 1, Term: 1}

// Open reads the group's log, whole, and so proves that it has no gap. A group that was never here begins with the
// given voters after FirstEntry, or empty if there are none. The membership is that of the begin until ApplyChanges.
func Open(e *Engine, group uint64, voters []uint64, cacheBytes int) (l *Log, fresh bool, err error) {
	l = &Log{e: e, group: group, cache: entryCache{limit: cacheBytes}}
	v, err := e.get(groupKey(group, kindTrunc))
	if err != nil {
		return nil, false, err
	}
	if v == nil {
		b := e.db.NewBatch()
		defer b.Close()
		l.members = raftconf.Membership{Conf: &raftpb.ConfState{Voters: slices.Clone(voters)}}
		if len(voters) > 0 {
			l.begin, l.last = FirstEntry, FirstEntry
			l.hard = &raftpb.HardState{Term: new(FirstEntry.Term), Vote: new(uint64(0)), Commit: new(FirstEntry.Index)}
			if err := l.putHard(b); err != nil {
				return nil, false, err
			}
		}
		l.past = raftconf.History{{Index: l.begin.Index, Membership: l.members}}
		if err := l.putBegin(b); err != nil {
			return nil, false, err
		}
		return l, true, e.Commit(b)
	}
	begin, err := raftconf.ParseLogStart(v)
	if err != nil {
		return nil, false, fmt.Errorf("read where the log of group %d begins: %w", group, err)
	}
	l.begin, l.state, l.last, l.members = begin.At, begin.State, begin.At, begin.Members
	l.past = raftconf.History{{Index: l.begin.Index, Membership: l.members}}
	if v, err = e.get(groupKey(group, kindHard)); err != nil {
		return nil, false, err
	}
	if v != nil {
		l.hard = &raftpb.HardState{}
		if err := proto.Unmarshal(v, l.hard); err != nil {
			return nil, false, fmt.Errorf("read the hard state of group %d: %w", group, err)
		}
		l.stored = l.hard
	}
	// Nothing is kept but changes of the members: a log may be much longer than what is needed of it now.
	err = l.walk(l.begin.Index+1, ^uint64(0), func(h entryHead, data []byte) (bool, error) {
		l.last = raftconf.Position{Index: h.index, Term: h.term}
		l.sizes.add(h.index, len(data)+entryOverhead)
		if h.kind != raftpb.EntryNormal {
			l.changes = append(l.changes, h.entry(data))
		}
		return true, nil
	})
	return l, false, err
}

// ApplyChanges brings the membership to an entry that the state machine has reached. heard are the directories by whom was
// heard first.
func (l *Log) ApplyChanges(index uint64, heard map[uint64]uint64) error {
	for _, ent := range l.changes {
		if ent.GetIndex() > index {
			break
		}
		cc, _, dirIDs, err := raftconf.ParseChange(ent)
		if err != nil {
			return fmt.Errorf("entry %d of group %d changes the members: %w", ent.GetIndex(), l.group, err)
		}
		next, err := l.members.After(cc)
		if err != nil {
			return fmt.Errorf("entry %d of group %d changes the members: %w", ent.GetIndex(), l.group, err)
		}
		next.RecordDirIDs(dirIDs, heard, l.members)
		l.SetMembers(ent.GetIndex(), next)
	}
	l.changes = nil
	return nil
}

// SetMembers notes the membership after an entry that was applied.
func (l *Log) SetMembers(index uint64, m raftconf.Membership) {
	l.members = m
	l.past = append(l.past, raftconf.MembershipAt{Index: index, Membership: m})
}

// Write puts entries and, where it must be durable or costs nothing extra, the HardState into the batch.
func (l *Log) Write(b *pebble.Batch, hard *raftpb.HardState, entries []*raftpb.Entry) error {
	if !raft.IsEmptyHardState(hard) {
		l.hard = hard
	}
	if err := l.append(b, entries); err != nil {
		return err
	}
	vote := l.hard.GetTerm() != l.stored.GetTerm() || l.hard.GetVote() != l.stored.GetVote()
	if mutant.On(mutant.DropVoteSync) {
		vote = false
	}
	if vote || len(entries) > 0 && l.hard.GetCommit() != l.stored.GetCommit() {
		if err := l.putHard(b); err != nil {
			return err
		}
	}
	if l.cut.Index > l.begin.Index && !b.Empty() {
		return l.truncate(b, l.cut)
	}
	return nil
}

func (l *Log) putHard(b *pebble.Batch) error {
	v, err := proto.Marshal(l.hard)
	if err != nil {
		return fmt.Errorf("encode the hard state: %w", err)
	}
	l.stored = l.hard
	return b.Set(groupKey(l.group, kindHard), v, nil)
}

// append adds entries; those that it replaces, and all after them, were never committed.
func (l *Log) append(b *pebble.Batch, entries []*raftpb.Entry) error {
	if len(entries) == 0 {
		return nil
	}
	first := entries[0].GetIndex()
	if first <= l.begin.Index || first > l.last.Index+1 {
		return fmt.Errorf("append entry %d of group %d: the log holds %d to %d", first, l.group, l.begin.Index+1, l.last.Index)
	}
	for _, ent := range entries {
		var head [1 + binary.MaxVarintLen64]byte
		head[0] = byte(ent.GetType())
		n := 1 + binary.PutUvarint(head[1:], ent.GetTerm())
		op := b.SetDeferred(entryKeyLen, n+len(ent.Data))
		putEntryKey(op.Key, l.group, ent.GetIndex())
		copy(op.Value, head[:n])
		copy(op.Value[n:], ent.Data)
		if err := op.Finish(); err != nil {
			return err
		}
	}
	last := entries[len(entries)-1]
	if last.GetIndex() < l.last.Index {
		if err := b.DeleteRange(entryKey(l.group, last.GetIndex()+1), entryKey(l.group, l.last.Index+1), nil); err != nil {
			return err
		}
	}
	l.sizes.truncateFrom(first)
	for _, ent := range entries {
		l.cache.append(ent)
		l.sizes.add(ent.GetIndex(), cost(ent))
	}
	l.last = raftconf.Position{Index: last.GetIndex(), Term: last.GetTerm()}
	return nil
}

// truncate forgets the entries up to p. The state machine must have flushed those among them that were for it.
func (l *Log) truncate(b *pebble.Batch, p raftconf.Position) error {
	if err := b.DeleteRange(entryKey(l.group, l.begin.Index+1), entryKey(l.group, p.Index+1), nil); err != nil {
		return err
	}
	l.begin, l.state, l.cut = p, p, raftconf.Position{}
	l.past = l.past.TruncateTo(p.Index)
	l.cache.truncateTo(p.Index)
	l.sizes.truncateTo(p.Index)
	return l.putBegin(b)
}

// Reset makes the log empty and begin after a snapshot at p that the state machine holds durably, being at floor.
func (l *Log) Reset(b *pebble.Batch, p, floor raftconf.Position, members raftconf.Membership) error {
	if err := b.DeleteRange(entryKey(l.group, 0), entryKey(l.group, ^uint64(0)), nil); err != nil {
		return err
	}
	if err := b.Delete(groupKey(l.group, kindMarker), nil); err != nil {
		return err
	}
	l.begin, l.state, l.last, l.cut, l.applied = p, floor, p, raftconf.Position{}, p.Index
	l.members, l.past, l.changes = members, raftconf.History{{Index: p.Index, Membership: members}}, nil
	l.cache.clear()
	l.sizes = sizeMarks{}
	term, vote := l.hard.GetTerm(), l.hard.GetVote()
	if term < p.Term {
		term, vote = p.Term, 0
	}
	l.hard = &raftpb.HardState{Term: &term, Vote: &vote, Commit: new(max(l.hard.GetCommit(), p.Index))}
	if err := l.putHard(b); err != nil {
		return err
	}
	return l.putBegin(b)
}

func putBegin(b *pebble.Batch, key []byte, p raftconf.LogStart) error {
	v, err := p.AppendTo(nil)
	if err != nil {
		return err
	}
	return b.Set(key, v, nil)
}

func (l *Log) putBegin(b *pebble.Batch) error {
	return putBegin(b, groupKey(l.group, kindTrunc), raftconf.LogStart{At: l.begin, State: l.state, Members: l.past[0].Membership})
}

// SnapshotMarker returns where the log begins after the snapshot whose installation was not finished; ok is false if
// there is none.
func (l *Log) SnapshotMarker() (p raftconf.LogStart, ok bool, err error) {
	v, err := l.e.get(groupKey(l.group, kindMarker))
	if v == nil || err != nil {
		return p, false, err
	}
	if p, err = raftconf.ParseLogStart(v); err != nil {
		return p, false, fmt.Errorf("read the marker of a snapshot: %w", err)
	}
	return p, true, nil
}

// PutSnapshotMarker adds to the batch that the installation of a snapshot begins.
func (l *Log) PutSnapshotMarker(b *pebble.Batch, p raftconf.LogStart) error {
	return putBegin(b, groupKey(l.group, kindMarker), p)
}

// DeleteSnapshotMarker durably removes the marker of a snapshot that the state machine did not take.
func (l *Log) DeleteSnapshotMarker() error {
	b := l.e.NewBatch()
	defer b.Close()
	if err := b.Delete(groupKey(l.group, kindMarker), nil); err != nil {
		return err
	}
	return l.e.Commit(b)
}

// FinishSnapshot durably makes the log begin after the snapshot of the marker, and removes the marker.
func (l *Log) FinishSnapshot(p raftconf.LogStart) error {
	b := l.e.NewBatch()
	defer b.Close()
	if err := l.Reset(b, p.At, p.State, p.Members); err != nil {
		return err
	}
	return l.e.Commit(b)
}

// RaiseCommit sets the commit index to index unless it is higher. The change is in memory only: see PutCommit.
func (l *Log) RaiseCommit(index uint64) {
	if l.hard.GetCommit() < index {
		l.hard = &raftpb.HardState{Term: new(l.hard.GetTerm()), Vote: new(l.hard.GetVote()), Commit: &index}
	}
}

// PutCommit adds to the batch that index is committed, unless that is stored already.
func (l *Log) PutCommit(b *pebble.Batch, index uint64) error {
	if l.stored.GetCommit() >= index {
		return nil
	}
	l.RaiseCommit(index)
	return l.putHard(b)
}

// SetApplied notes up to which entry the state machine is, which is where Snapshot is placed.
func (l *Log) SetApplied(index uint64) { l.applied = index }

// TruncateLater makes the next batch with a write of this log truncate it up to p, as truncate does.
func (l *Log) TruncateLater(p raftconf.Position) { l.cut = p }

// Truncating reports whether a call of TruncateLater waits for the next batch.
func (l *Log) Truncating() bool { return l.cut.Index > 0 }

// Bytes returns the size of the entries in the log, to within 64 KiB.
func (l *Log) Bytes() uint64 { return l.sizes.bytes() }

// Tail returns an index after which at most about size bytes of the log follow, 0 when the whole log is smaller.
func (l *Log) Tail(size uint64) uint64 { return l.sizes.tail(size) }

// MembersAt returns the membership as of an entry that is not before the begin of the log.
func (l *Log) MembersAt(index uint64) raftconf.Membership { return l.past.At(index) }

// Begin returns the position before the first entry of the log.
func (l *Log) Begin() raftconf.Position { return l.begin }

// Last returns the position of the last entry, or Begin if the log is empty.
func (l *Log) Last() raftconf.Position { return l.last }

// State returns a position that the state machine had reached when the log was truncated. It is before Begin if no entry
// between the two was for the state machine.
func (l *Log) State() raftconf.Position { return l.state }

// Members returns the membership as of the last applied entry.
func (l *Log) Members() raftconf.Membership { return l.members }

// HardState returns raft's term, vote and commit index, nil before the first term.
func (l *Log) HardState() *raftpb.HardState { return l.hard }
