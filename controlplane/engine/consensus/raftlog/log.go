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

// entryOverhead estimates the bytes that an entry needs beyond its data, on disk, on the wire and in memory.
const entryOverhead = 32

// Log is the log of one group in an Engine. It implements raft.Storage. Methods that write take a batch of the engine and
// change what the Log returns at once; if the batch cannot be made durable, the Log must not be used any more. A Log is
// not safe for concurrent use, but the batch may be written by another goroutine.
type Log struct {
	e     *Engine
	group uint64

	begin   raftconf.Position   // the position before the first entry
	state   raftconf.Position   // the position that the state machine has reached at least; see State
	last    raftconf.Position   // the position of the last entry, or begin
	members raftconf.Membership // the membership as of the last applied entry
	past    raftconf.History    // the memberships from begin to the last applied entry
	changes []*raftpb.Entry     // membership changes that Open found; nil after ApplyChanges
	hard    *raftpb.HardState   // raft's current HardState; nil before the first term
	stored  *raftpb.HardState   // the HardState in the last batch
	applied uint64              // index of the last applied entry, for Snapshot

	cache entryCache
	sizes sizeMarks
	cut   raftconf.Position // the position to which the next Write truncates; index 0: none
}

// firstEntry is the position where the log of a new group begins. No log contains entry 1, so a member with an empty
// log needs a snapshot, and gets the membership with it.
var firstEntry = raftconf.Position{Index: 1, Term: 1}

// Open opens the log of a group and reads all of it; a missing entry is an error. If the engine has no log of the
// group, Open durably creates one and sets fresh. A log that is created with voters begins after firstEntry; without
// voters it is empty and has no members. The log caches up to about cacheBytes of the newest entries. The membership is
// that of the log's begin until ApplyChanges is called.
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
			l.begin, l.last = firstEntry, firstEntry
			l.hard = &raftpb.HardState{Term: new(firstEntry.Term), Vote: new(uint64(0)), Commit: new(firstEntry.Index)}
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
	// Only membership changes are kept in memory, because a log may be much larger than the cache.
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

// ApplyChanges applies the membership changes that Open found, up to and including entry index, the last one that the
// state machine has applied. peerDirIDs has the directory IDs of members of the first configuration: see
// Membership.RecordDirIDs.
func (l *Log) ApplyChanges(index uint64, peerDirIDs map[uint64]uint64) error {
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
		next.RecordDirIDs(dirIDs, peerDirIDs, l.members)
		l.SetMembers(ent.GetIndex(), next)
	}
	l.changes = nil
	return nil
}

// SetMembers sets the membership as of entry index, which must be a membership change that was applied.
func (l *Log) SetMembers(index uint64, m raftconf.Membership) {
	l.members = m
	l.past = append(l.past, raftconf.MembershipAt{Index: index, Membership: m})
}

// Write adds entries to the batch. It adds the HardState if the term or vote changed or if entries are added and the
// commit index changed. An empty hard leaves the HardState unchanged. Write also truncates the log if TruncateLater was
// called.
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

// putHard adds the current HardState to the batch.
func (l *Log) putHard(b *pebble.Batch) error {
	v, err := proto.Marshal(l.hard)
	if err != nil {
		return fmt.Errorf("encode the hard state: %w", err)
	}
	l.stored = l.hard
	return b.Set(groupKey(l.group, kindHard), v, nil)
}

// append adds entries to the batch. They replace all existing entries from the first new index on; raft never replaces
// committed ones.
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

// truncate adds the removal of the entries up to p to the batch. The state machine must have flushed their effects, or
// a crash would lose them.
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

// Reset removes all entries and the snapshot marker, and makes the log begin at p, the position of a snapshot that the
// state machine has durably installed. state is the state machine's own position, members the membership as of p.
func (l *Log) Reset(b *pebble.Batch, p, state raftconf.Position, members raftconf.Membership) error {
	if err := b.DeleteRange(entryKey(l.group, 0), entryKey(l.group, ^uint64(0)), nil); err != nil {
		return err
	}
	if err := b.Delete(groupKey(l.group, kindMarker), nil); err != nil {
		return err
	}
	l.begin, l.state, l.last, l.cut, l.applied = p, state, p, raftconf.Position{}, p.Index
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

// putBegin adds the encoding of p to the batch, as the value of key.
func putBegin(b *pebble.Batch, key []byte, p raftconf.LogStart) error {
	v, err := p.AppendTo(nil)
	if err != nil {
		return err
	}
	return b.Set(key, v, nil)
}

// putBegin adds the position where the log begins, with the membership there, to the batch.
func (l *Log) putBegin(b *pebble.Batch) error {
	return putBegin(b, groupKey(l.group, kindTrunc), raftconf.LogStart{At: l.begin, State: l.state, Members: l.past[0].Membership})
}

// SnapshotMarker returns the LogStart that PutSnapshotMarker stored. ok is false if no installation of a snapshot was
// interrupted.
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

// PutSnapshotMarker adds p to the batch as a marker that the state machine will now install a snapshot, after which the
// log will begin at p. Reset removes the marker. A marker that is found at the start shows that a crash interrupted the
// installation.
func (l *Log) PutSnapshotMarker(b *pebble.Batch, p raftconf.LogStart) error {
	return putBegin(b, groupKey(l.group, kindMarker), p)
}

// DeleteSnapshotMarker durably removes the marker of a snapshot that the state machine did not install.
func (l *Log) DeleteSnapshotMarker() error {
	b := l.e.NewBatch()
	defer b.Close()
	if err := b.Delete(groupKey(l.group, kindMarker), nil); err != nil {
		return err
	}
	return l.e.Commit(b)
}

// FinishSnapshot durably makes the log begin at p, the stored marker, and removes the marker.
func (l *Log) FinishSnapshot(p raftconf.LogStart) error {
	b := l.e.NewBatch()
	defer b.Close()
	if err := l.Reset(b, p.At, p.State, p.Members); err != nil {
		return err
	}
	return l.e.Commit(b)
}

// RaiseCommit raises the commit index to index unless it is higher already. The change is in memory only; PutCommit
// stores it.
func (l *Log) RaiseCommit(index uint64) {
	if l.hard.GetCommit() < index {
		l.hard = &raftpb.HardState{Term: new(l.hard.GetTerm()), Vote: new(l.hard.GetVote()), Commit: &index}
	}
}

// PutCommit raises the commit index to index and adds it to the batch. It does nothing if a commit index at least as
// high is stored already.
func (l *Log) PutCommit(b *pebble.Batch, index uint64) error {
	if l.stored.GetCommit() >= index {
		return nil
	}
	l.RaiseCommit(index)
	return l.putHard(b)
}

// SetApplied sets the index of the last applied entry, which Snapshot returns.
func (l *Log) SetApplied(index uint64) { l.applied = index }

// TruncateLater requests that the next Write that adds something to a batch also remove the entries up to p. The state
// machine must have flushed their effects.
func (l *Log) TruncateLater(p raftconf.Position) { l.cut = p }

// Truncating reports whether a truncation that TruncateLater requested has not been added to a batch yet.
func (l *Log) Truncating() bool { return l.cut.Index > 0 }

// Bytes returns the size of the entries in the log, to within 64 KiB.
func (l *Log) Bytes() uint64 { return l.sizes.bytes() }

// Tail returns an index after which at most about size bytes of the log follow; 0 if the entire log is not larger.
func (l *Log) Tail(size uint64) uint64 { return l.sizes.tail(size) }

// MembersAt returns the membership as of entry index, which must not be before Begin nor after the last applied entry.
func (l *Log) MembersAt(index uint64) raftconf.Membership { return l.past.At(index) }

// Begin returns the position before the first entry of the log.
func (l *Log) Begin() raftconf.Position { return l.begin }

// Last returns the position of the last entry, or Begin if the log is empty.
func (l *Log) Last() raftconf.Position { return l.last }

// State returns the position that the state machine has reached at least. It equals Begin, or is before Begin if all
// entries between the two were raft's own entries and membership changes, which the state machine does not get.
func (l *Log) State() raftconf.Position { return l.state }

// Members returns the membership as of the last applied entry.
func (l *Log) Members() raftconf.Membership { return l.members }

// HardState returns raft's current term, vote and commit index, nil before the first term. They may not be durable yet.
func (l *Log) HardState() *raftpb.HardState { return l.hard }
