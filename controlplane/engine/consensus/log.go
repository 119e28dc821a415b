package consensus

import (
	"encoding/binary"
	"errors"
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

// position is the place of an entry: terms never shrink along a log, so index and term name one entry of the group.
type position struct{ index, term uint64 }

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

// scan calls f with the entries [lo, hi) in order until it says false. A gap is an error; entries missing at the end
// are not.
func (l *groupLog) scan(lo, hi uint64, f func(*raftpb.Entry) (bool, error)) error {
	return l.walk(lo, hi, func(h entryHead, data []byte) (bool, error) { return f(h.entry(data)) })
}

// walk is scan with data that is only lent.
func (l *groupLog) walk(lo, hi uint64, f func(h entryHead, data []byte) (bool, error)) error {
	it, err := l.e.db.NewIter(&pebble.IterOptions{LowerBound: entryKey(l.group, lo), UpperBound: entryKey(l.group, hi)})
	if err != nil {
		return fmt.Errorf("read the log of group %d: %w", l.group, err)
	}
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		index := binary.BigEndian.Uint64(it.Key()[10:])
		if index != lo {
			return fmt.Errorf("read the log of group %d: entry %d is missing before %d", l.group, lo, index)
		}
		lo++
		v, err := it.ValueAndErr()
		if err != nil {
			return fmt.Errorf("read entry %d of group %d: %w", index, l.group, err)
		}
		h, data, err := decodeEntry(index, v)
		if err != nil {
			return fmt.Errorf("read entry %d of group %d: %w", index, l.group, err)
		}
		if more, err := f(h, data); err != nil || !more {
			return err
		}
	}
	if err := it.Error(); err != nil {
		return fmt.Errorf("read the log of group %d: %w", l.group, err)
	}
	return nil
}

// entryHead is an entry without its data.
type entryHead struct {
	index, term uint64
	kind        raftpb.EntryType
}

// decodeEntry takes a stored entry apart. The data aliases v.
func decodeEntry(index uint64, v []byte) (h entryHead, data []byte, err error) {
	if len(v) < 2 {
		return entryHead{}, nil, errors.New("too short")
	}
	term, n := binary.Uvarint(v[1:])
	if n <= 0 {
		return entryHead{}, nil, errors.New("broken term")
	}
	return entryHead{index, term, raftpb.EntryType(v[0])}, v[1+n:], nil
}

// entry is the one with a copy of data.
func (h entryHead) entry(data []byte) *raftpb.Entry {
	ent := &raftpb.Entry{Type: h.kind.Enum(), Index: &h.index, Term: &h.term}
	if len(data) > 0 {
		ent.Data = slices.Clone(data)
	}
	return ent
}

// InitialState implements raft.Storage.
func (l *groupLog) InitialState() (*raftpb.HardState, *raftpb.ConfState, error) {
	return l.hard, l.members.conf, nil
}

// FirstIndex implements raft.Storage.
func (l *groupLog) FirstIndex() (uint64, error) { return l.begin.index + 1, nil }

// LastIndex implements raft.Storage.
func (l *groupLog) LastIndex() (uint64, error) { return l.last.index, nil }

// Term implements raft.Storage.
func (l *groupLog) Term(i uint64) (uint64, error) {
	switch {
	case i < l.begin.index:
		return 0, raft.ErrCompacted
	case i == l.begin.index:
		return l.begin.term, nil
	case i > l.last.index:
		return 0, raft.ErrUnavailable
	case i == l.last.index:
		return l.last.term, nil
	}
	if ent := l.cache.entry(i); ent != nil {
		return ent.GetTerm(), nil
	}
	term, err := l.termOf(i)
	if err != nil {
		return 0, &storageError{fmt.Errorf("read entry %d of group %d: %w", i, l.group, err)}
	}
	return term, nil
}

// termOf reads an entry's term only.
func (l *groupLog) termOf(i uint64) (uint64, error) {
	v, closer, err := l.e.db.Get(entryKey(l.group, i))
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, errors.New("it is missing")
	}
	if err != nil {
		return 0, err
	}
	h, _, err := decodeEntry(i, v)
	return h.term, errors.Join(err, closer.Close())
}

// Entries implements raft.Storage.
func (l *groupLog) Entries(lo, hi, maxSize uint64) ([]*raftpb.Entry, error) {
	if lo <= l.begin.index {
		return nil, raft.ErrCompacted
	}
	if hi > l.last.index+1 {
		return nil, raft.ErrUnavailable
	}
	var out []*raftpb.Entry
	size := uint64(0)
	fits := func(ent *raftpb.Entry) bool {
		size += uint64(len(ent.Data)) + entryOverhead
		return size <= maxSize || len(out) == 0
	}
	if first := l.cache.first(); lo < first {
		err := l.scan(lo, min(hi, first), func(ent *raftpb.Entry) (bool, error) {
			if !fits(ent) {
				return false, nil
			}
			out = append(out, ent)
			return size < maxSize, nil
		})
		if err != nil {
			return nil, &storageError{err}
		}
		lo += uint64(len(out))
		if lo < min(hi, first) {
			if size < maxSize {
				return nil, &storageError{fmt.Errorf("read entry %d of group %d: it is missing", lo, l.group)}
			}
			return out, nil
		}
	}
	for ; lo < hi; lo++ {
		ent := l.cache.entry(lo)
		if !fits(ent) {
			break
		}
		out = append(out, ent)
	}
	return out, nil
}

// Snapshot implements raft.Storage: only where a snapshot would be. The state itself is asked of the state machine
// when raft's message is about to be sent.
func (l *groupLog) Snapshot() (*raftpb.Snapshot, error) {
	term, err := l.Term(l.applied)
	if err != nil {
		return nil, &storageError{fmt.Errorf("place a snapshot of group %d at %d: %w", l.group, l.applied, err)}
	}
	return &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: new(l.applied), Term: new(term), ConfState: l.members.conf,
	}}, nil
}
