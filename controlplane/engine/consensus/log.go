package consensus

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// entryOverhead is what an entry is taken to cost beyond its data, on disk, on the wire and in memory.
const entryOverhead = 32

// groupLog is the log of one group inside the engine, and raft's Storage. Writes go into a batch of the caller and are
// visible to raft at once: the caller commits the batch before it lets raft advance, or stops the host.
//
// The commit index is not worth a write of its own: it is stored with the next entries or vote, and found again after a
// restart from the state machine, which never is ahead of it.
type groupLog struct {
	e     *engine
	group uint64

	begin   position          // the entry before the first one
	floor   position          // where the state machine at least is; before begin if nothing after it was for the machine
	last    position          // the last entry, or begin
	members membership        // as of applied
	past    history           // up to applied
	changes []*raftpb.Entry   // the changes of members that openLog found
	hard    *raftpb.HardState // as raft knows it; nil before the first term
	stored  *raftpb.HardState // as the engine has it
	applied uint64            // for Snapshot

	cache entryCache
	sizes sizeMarks
	cut   position // where the next batch shall cut the log; index 0 is nowhere
}

// firstEntry is the last entry that no log holds: whoever has less needs a snapshot, and with it the list of members.
var firstEntry = position{1, 1}

// openLog reads the group's log, whole, and so proves that it has no gap. A group that was never here begins with the
// given voters after firstEntry, or empty if there are none. The membership is that of the begin until changesTo.
func openLog(e *engine, group uint64, voters []uint64, cacheBytes int) (l *groupLog, fresh bool, err error) {
	l = &groupLog{e: e, group: group, cache: entryCache{limit: cacheBytes}}
	v, err := e.get(groupKey(group, kindTrunc))
	if err != nil {
		return nil, false, err
	}
	if v == nil {
		b := e.db.NewBatch()
		defer b.Close()
		l.members = membership{conf: &raftpb.ConfState{Voters: slices.Clone(voters)}}
		if len(voters) > 0 {
			l.begin, l.last = firstEntry, firstEntry
			l.hard = &raftpb.HardState{Term: new(firstEntry.term), Vote: new(uint64(0)), Commit: new(firstEntry.index)}
			if err := l.putHard(b); err != nil {
				return nil, false, err
			}
		}
		l.past = history{{l.begin.index, l.members}}
		if err := l.putBegin(b); err != nil {
			return nil, false, err
		}
		return l, true, e.commit(b)
	}
	begin, err := decodeBegin(v)
	if err != nil {
		return nil, false, fmt.Errorf("read where the log of group %d begins: %w", group, err)
	}
	l.begin, l.floor, l.last, l.members = begin.at, begin.floor, begin.at, begin.members
	l.past = history{{l.begin.index, l.members}}
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
	err = l.walk(l.begin.index+1, ^uint64(0), func(h entryHead, data []byte) (bool, error) {
		l.last = position{h.index, h.term}
		l.sizes.add(h.index, len(data)+entryOverhead)
		if h.kind != raftpb.EntryNormal {
			l.changes = append(l.changes, h.entry(data))
		}
		return true, nil
	})
	return l, false, err
}

// changesTo brings the membership to an entry that the state machine has reached. heard are the directories by whom was
// heard first.
func (l *groupLog) changesTo(index uint64, heard map[uint64]uint64) error {
	for _, ent := range l.changes {
		if ent.GetIndex() > index {
			break
		}
		cc, _, births, err := parseChange(ent)
		if err != nil {
			return fmt.Errorf("entry %d of group %d changes the members: %w", ent.GetIndex(), l.group, err)
		}
		next, err := l.members.after(cc)
		if err != nil {
			return fmt.Errorf("entry %d of group %d changes the members: %w", ent.GetIndex(), l.group, err)
		}
		next.bind(births, heard, l.members)
		l.changeMembers(ent.GetIndex(), next)
	}
	l.changes = nil
	return nil
}

// changeMembers notes the membership after an entry that was applied.
func (l *groupLog) changeMembers(index uint64, m membership) {
	l.members = m
	l.past = append(l.past, membersAt{index, m})
}

// write puts entries and, where it must be durable or costs nothing extra, the HardState into the batch.
func (l *groupLog) write(b *pebble.Batch, hard *raftpb.HardState, entries []*raftpb.Entry) error {
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
	if l.cut.index > l.begin.index && !b.Empty() {
		return l.truncate(b, l.cut)
	}
	return nil
}

func (l *groupLog) putHard(b *pebble.Batch) error {
	v, err := proto.Marshal(l.hard)
	if err != nil {
		return fmt.Errorf("encode the hard state: %w", err)
	}
	l.stored = l.hard
	return b.Set(groupKey(l.group, kindHard), v, nil)
}

// append adds entries; those that it replaces, and all after them, were never committed.
func (l *groupLog) append(b *pebble.Batch, entries []*raftpb.Entry) error {
	if len(entries) == 0 {
		return nil
	}
	first := entries[0].GetIndex()
	if first <= l.begin.index || first > l.last.index+1 {
		return fmt.Errorf("append entry %d of group %d: the log holds %d to %d", first, l.group, l.begin.index+1, l.last.index)
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
	if last.GetIndex() < l.last.index {
		if err := b.DeleteRange(entryKey(l.group, last.GetIndex()+1), entryKey(l.group, l.last.index+1), nil); err != nil {
			return err
		}
	}
	l.sizes.truncateFrom(first)
	for _, ent := range entries {
		l.cache.append(ent)
		l.sizes.add(ent.GetIndex(), cost(ent))
	}
	l.last = position{last.GetIndex(), last.GetTerm()}
	return nil
}

// truncate forgets the entries up to p. The state machine must have flushed those among them that were for it.
func (l *groupLog) truncate(b *pebble.Batch, p position) error {
	if err := b.DeleteRange(entryKey(l.group, l.begin.index+1), entryKey(l.group, p.index+1), nil); err != nil {
		return err
	}
	l.begin, l.floor, l.cut = p, p, position{}
	l.past = l.past.cut(p.index)
	l.cache.truncateTo(p.index)
	l.sizes.truncateTo(p.index)
	return l.putBegin(b)
}

// reset makes the log empty and begin after a snapshot at p that the state machine holds durably, being at floor.
func (l *groupLog) reset(b *pebble.Batch, p, floor position, members membership) error {
	if err := b.DeleteRange(entryKey(l.group, 0), entryKey(l.group, ^uint64(0)), nil); err != nil {
		return err
	}
	if err := b.Delete(groupKey(l.group, kindMarker), nil); err != nil {
		return err
	}
	l.begin, l.floor, l.last, l.cut, l.applied = p, floor, p, position{}, p.index
	l.members, l.past, l.changes = members, history{{p.index, members}}, nil
	l.cache.clear()
	l.sizes = sizeMarks{}
	term, vote := l.hard.GetTerm(), l.hard.GetVote()
	if term < p.term {
		term, vote = p.term, 0
	}
	l.hard = &raftpb.HardState{Term: &term, Vote: &vote, Commit: new(max(l.hard.GetCommit(), p.index))}
	if err := l.putHard(b); err != nil {
		return err
	}
	return l.putBegin(b)
}

func putBegin(b *pebble.Batch, key []byte, p begin) error {
	v, err := p.appendTo(nil)
	if err != nil {
		return err
	}
	return b.Set(key, v, nil)
}

func (l *groupLog) putBegin(b *pebble.Batch) error {
	return putBegin(b, groupKey(l.group, kindTrunc), begin{l.begin, l.floor, l.past[0].membership})
}

// snapshotMarker returns where the log begins after the snapshot whose installation was not finished; ok is false if
// there is none.
func (l *groupLog) snapshotMarker() (p begin, ok bool, err error) {
	v, err := l.e.get(groupKey(l.group, kindMarker))
	if v == nil || err != nil {
		return p, false, err
	}
	if p, err = decodeBegin(v); err != nil {
		return p, false, fmt.Errorf("read the marker of a snapshot: %w", err)
	}
	return p, true, nil
}

// putSnapshotMarker adds to the batch that the installation of a snapshot begins.
func (l *groupLog) putSnapshotMarker(b *pebble.Batch, p begin) error {
	return putBegin(b, groupKey(l.group, kindMarker), p)
}

// deleteSnapshotMarker durably removes the marker of a snapshot that the state machine did not take.
func (l *groupLog) deleteSnapshotMarker() error {
	b := l.e.newBatch()
	defer b.Close()
	if err := b.Delete(groupKey(l.group, kindMarker), nil); err != nil {
		return err
	}
	return l.e.commit(b)
}

// finishSnapshot durably makes the log begin after the snapshot of the marker, and removes the marker.
func (l *groupLog) finishSnapshot(p begin) error {
	b := l.e.newBatch()
	defer b.Close()
	if err := l.reset(b, p.at, p.floor, p.members); err != nil {
		return err
	}
	return l.e.commit(b)
}

// raiseCommit sets the commit index to index unless it is higher. The change is in memory only: see putCommit.
func (l *groupLog) raiseCommit(index uint64) {
	if l.hard.GetCommit() < index {
		l.hard = &raftpb.HardState{Term: new(l.hard.GetTerm()), Vote: new(l.hard.GetVote()), Commit: &index}
	}
}

// putCommit adds to the batch that index is committed, unless that is stored already.
func (l *groupLog) putCommit(b *pebble.Batch, index uint64) error {
	if l.stored.GetCommit() >= index {
		return nil
	}
	l.raiseCommit(index)
	return l.putHard(b)
}

// setApplied notes up to which entry the state machine is, which is where Snapshot is placed.
func (l *groupLog) setApplied(index uint64) { l.applied = index }

// truncateLater makes the next batch with a write of this log truncate it up to p, as truncate does.
func (l *groupLog) truncateLater(p position) { l.cut = p }

// truncating reports whether a call of truncateLater waits for the next batch.
func (l *groupLog) truncating() bool { return l.cut.index > 0 }

// bytes returns the size of the entries in the log, to within 64 KiB.
func (l *groupLog) bytes() uint64 { return l.sizes.bytes() }

// tail returns an index after which at most about size bytes of the log follow, 0 when the whole log is smaller.
func (l *groupLog) tail(size uint64) uint64 { return l.sizes.tail(size) }

// membersAt returns the membership as of an entry that is not before the begin of the log.
func (l *groupLog) membersAt(index uint64) membership { return l.past.at(index) }
