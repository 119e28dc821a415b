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

// entryOverhead is an estimate of the bytes that an entry needs in addition to its data, be it on disk, on the wire or
// in memory.
const entryOverhead = 32

// Log is the log of one group in an Engine. It implements raft.Storage. Each method that writes adds the write to a
// batch of the engine; reads from the Log see the write at once. If the batch then cannot be made durable, the Log must
// not be used any more. A Log is not safe for concurrent use, but another goroutine may commit the batch.
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

// firstEntry is the position at which the log of a new group begins; its first real entry is entry 2. Since no log
// contains entry 1, a member with an empty log needs a snapshot, and so gets the membership.
var firstEntry = raftconf.Position{Index: 1, Term: 1}

// Open opens the log of a group and reads it completely. It returns an error if an entry is missing. If the engine has
// no log of the group, Open durably creates one, and fresh is true. A log created with voters begins after firstEntry.
// A log created without voters begins before entry 1 and has no members. At most about cacheBytes bytes of the newest
// entries are cached. Until ApplyChanges is called, the membership is the one where the log begins.
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
	// Keep only the membership changes in memory, because a log may be much larger than the memory for its cache.
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

// ApplyChanges updates the membership by the membership changes in the log, up to and including the entry at index,
// which is the last one that the state machine has applied. It is called once after Open. peerDirIDs has the
// data-directory IDs of members of the first configuration; see Membership.RecordDirIDs.
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

// SetMembers sets the membership that is valid from the entry at index on. That entry must be a membership change that
// was applied.
func (l *Log) SetMembers(index uint64, m raftconf.Membership) {
	l.members = m
	l.past = append(l.past, raftconf.MembershipAt{Index: index, Membership: m})
}

// Write adds the entries to the batch. It also adds the HardState if the term or the vote has changed. If only the
// commit index has changed, it adds the HardState only together with entries. An empty hard means that the HardState
// has not changed. If TruncateLater was called, Write also adds the truncation, unless the batch is empty.
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

// putHard adds the current HardState of the log to the batch.
func (l *Log) putHard(b *pebble.Batch) error {
	v, err := proto.Marshal(l.hard)
	if err != nil {
		return fmt.Errorf("encode the hard state: %w", err)
	}
	l.stored = l.hard
	return b.Set(groupKey(l.group, kindHard), v, nil)
}

// append adds the entries to the batch. Existing entries whose index is at least that of the first new entry are
// replaced or removed. raft never does that to committed entries.
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

// truncate adds to the batch the removal of the entries up to position p. The state machine must already have flushed
// the effects of these entries, because a crash would lose them otherwise.
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

// Reset adds to the batch the removal of all entries and of the snapshot marker. The log then begins at p, the position
// of a snapshot that the state machine has durably installed. state is the position of the state machine, and members
// the membership as of p.
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

// putBegin adds p to the batch, encoded, as the value of the given key.
func putBegin(b *pebble.Batch, key []byte, p raftconf.LogStart) error {
	v, err := p.AppendTo(nil)
	if err != nil {
		return err
	}
	return b.Set(key, v, nil)
}

// putBegin adds to the batch where the log begins: the position, the position of the state machine, and the membership.
func (l *Log) putBegin(b *pebble.Batch) error {
	return putBegin(b, groupKey(l.group, kindTrunc), raftconf.LogStart{At: l.begin, State: l.state, Members: l.past[0].Membership})
}

// SnapshotMarker returns the LogStart that PutSnapshotMarker has stored. ok is true if there is one, which means that a
// crash interrupted the installation of a snapshot.
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

// PutSnapshotMarker adds p to the batch as the snapshot marker. The marker means that the state machine is about to
// install a snapshot, after which the log will begin at p. Reset removes the marker. A marker that exists when the
// member starts shows that a crash interrupted the installation.
func (l *Log) PutSnapshotMarker(b *pebble.Batch, p raftconf.LogStart) error {
	return putBegin(b, groupKey(l.group, kindMarker), p)
}

// DeleteSnapshotMarker durably removes the snapshot marker. It is called at the start if the state machine has not
// installed the snapshot.
func (l *Log) DeleteSnapshotMarker() error {
	b := l.e.NewBatch()
	defer b.Close()
	if err := b.Delete(groupKey(l.group, kindMarker), nil); err != nil {
		return err
	}
	return l.e.Commit(b)
}

// FinishSnapshot durably completes the installation of a snapshot. It lets the log begin at p, which is the content of
// the snapshot marker, and removes the marker.
func (l *Log) FinishSnapshot(p raftconf.LogStart) error {
	b := l.e.NewBatch()
	defer b.Close()
	if err := l.Reset(b, p.At, p.State, p.Members); err != nil {
		return err
	}
	return l.e.Commit(b)
}

// RaiseCommit raises the commit index to index, in memory only. It does nothing if the commit index is already higher.
// PutCommit stores it.
func (l *Log) RaiseCommit(index uint64) {
	if l.hard.GetCommit() < index {
		l.hard = &raftpb.HardState{Term: new(l.hard.GetTerm()), Vote: new(l.hard.GetVote()), Commit: &index}
	}
}

// PutCommit raises the commit index to index and adds the HardState to the batch. It does nothing if the stored commit
// index is already at least as high.
func (l *Log) PutCommit(b *pebble.Batch, index uint64) error {
	if l.stored.GetCommit() >= index {
		return nil
	}
	l.RaiseCommit(index)
	return l.putHard(b)
}

// SetApplied sets the index of the last applied entry, which becomes the index of the next Snapshot.
func (l *Log) SetApplied(index uint64) { l.applied = index }

// TruncateLater makes the next Write with a batch that is not empty also remove the entries up to position p. The state
// machine must already have flushed the effects of these entries.
func (l *Log) TruncateLater(p raftconf.Position) { l.cut = p }

// Truncating reports whether TruncateLater was called and no Write has added the truncation to a batch since.
func (l *Log) Truncating() bool { return l.cut.Index > 0 }

// Bytes returns the size of the log's entries in bytes, with an error of at most 64 KiB.
func (l *Log) Bytes() uint64 { return l.sizes.bytes() }

// Tail returns an index after which the log has at most about size bytes. It returns 0 if the entire log is not larger
// than that.
func (l *Log) Tail(size uint64) uint64 { return l.sizes.tail(size) }

// MembersAt returns the membership as of the entry at index. index must not be lower than the index of Begin, and not
// higher than that of the last applied entry.
func (l *Log) MembersAt(index uint64) raftconf.Membership { return l.past.At(index) }

// Begin returns the position before the first entry of the log.
func (l *Log) Begin() raftconf.Position { return l.begin }

// Last returns the position of the last entry, or Begin if the log is empty.
func (l *Log) Last() raftconf.Position { return l.last }

// State returns a position that the state machine has certainly reached. It equals Begin, or is before Begin if all
// entries between the two are membership changes or raft's own entries, which are not passed to the state machine.
func (l *Log) State() raftconf.Position { return l.state }

// Members returns the membership as of the last applied entry.
func (l *Log) Members() raftconf.Membership { return l.members }

// HardState returns raft's current term, vote and commit index; nil before the first term. The values may not be
// durable yet.
func (l *Log) HardState() *raftpb.HardState { return l.hard }
