package steps

import (
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"strings"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// check compares the members with each other. It stores each log entry when the first member applies it, and each
// revision when the first watcher receives it. Whenever another member applies the entry or another watcher receives
// the revision, also after a restart, they must be equal to the stored ones.
type check struct {
	w *world

	entries map[uint64]entry          // committed entries, by index
	answers map[[16]byte]string       // encoded result of each applied proposal, by proposal ID
	digests map[uint64]uint32         // checksum of the whole state, by applied index
	leaders map[[2]uint64]uint64      // leader, by group and term
	votes   map[[3]uint64]uint64      // candidate that was voted for, by group, term and voter
	times   map[uint64]command.Result // result of each entry, by index
	noteAt  map[string]place          // place of each note, by text; each must be applied once only
	newest  uint64                    // highest applied index
	notes   map[place]note            // notes of the second group, by place

	history history
	// frontier is the newest revision that was returned to a client. Calls that begin later must not return an older
	// revision.
	frontier int64
	// never has the operations that failed and must not be applied. It maps the name of each to the text of its error.
	never map[string]string
}

// entry is a committed log entry, with the checksum of its data and its encoded result.
type entry struct {
	term   uint64
	id     [16]byte
	sum    uint32
	answer string
}

func newCheck(w *world) *check {
	return &check{
		w: w, entries: map[uint64]entry{}, answers: map[[16]byte]string{}, digests: map[uint64]uint32{},
		leaders: map[[2]uint64]uint64{}, votes: map[[3]uint64]uint64{}, times: map[uint64]command.Result{}, notes: map[place]note{}, noteAt: map[string]place{},
		history: newHistory(w), frontier: 1, never: map[string]string{},
	}
}

// sent checks an envelope that the member m sends. No member may vote for two candidates in a term, even after a
// restart. A member with an empty disk may send only requests and responses about data-directory IDs.
func (c *check) sent(m *member, e *message.Envelope) {
	switch e.Kind {
	case message.KindDirIDRequest, message.KindDirIDResponse:
		return
	}
	if m.aside != nil {
		c.w.fail("member %d takes part with an empty disk: it sends an envelope of kind %d, %s", m.id, e.Kind, e.Raft.GetType())
		return
	}
	var candidate uint64
	switch {
	case e.Kind != message.KindRaft:
		return
	case e.Raft.GetType() == raftpb.MsgVoteResp && !e.Raft.GetReject():
		candidate = e.To
	case e.Raft.GetType() == raftpb.MsgVote:
		candidate = m.id
	default:
		return
	}
	key := [3]uint64{e.Group, e.Raft.GetTerm(), m.id}
	if before, voted := c.votes[key]; voted && before != candidate {
		c.w.fail("member %d votes for %d in term %d of group %d, in which it has voted for %d", m.id, candidate, key[1], e.Group, before)
	}
	c.votes[key] = candidate
}

// leads checks that no term of a group has two leaders. The leader and term in l were reported by the member m.
func (c *check) leads(m *member, l consensus.Leadership) {
	if m.dying() {
		return
	}
	c.w.trace.Add("%d: leader of group %d is %d, term %d", m.id, l.Group, l.Leader, l.Term)
	if l.Leader == 0 {
		return
	}
	key := [2]uint64{l.Group, l.Term}
	if before, ok := c.leaders[key]; ok && before != l.Leader {
		c.w.fail("term %d of group %d has two leaders, %d and %d", l.Term, l.Group, before, l.Leader)
	} else if !ok {
		c.w.count("terms with a leader")
	}
	c.leaders[key] = l.Leader
}

// applied is called when the member m has applied entries with the results answers. It checks that they are equal to
// those of the member that applied the same entries first.
func (c *check) applied(m *member, entries []consensus.Entry, answers []any) {
	if m.dying() {
		return
	}
	for i, e := range entries {
		r, ok := answers[i].(command.Result)
		if !ok {
			c.w.fail("entry %d has the answer %v, which is no result", e.Index, answers[i])
			continue
		}
		now := entry{e.Term, e.ID, crc32.ChecksumIEEE(e.Data), string(command.EncodeResult(nil, r))}
		c.w.trace.Add("%d applies %d/%d %x %08x: %x", m.id, e.Index, e.Term, e.ID[:4], now.sum, now.answer)
		if m.aside != nil {
			c.w.fail("member %d applies with an empty disk", m.id)
		}
		before, known := c.entries[e.Index]
		if !known {
			c.entries[e.Index] = now
			c.learn(e, r)
		} else if before != now {
			c.w.fail("entry %d is %+v on member %d, but %+v was committed", e.Index, now, m.id, before)
		}
	}
	if last := entries[len(entries)-1].Index; last%16 == 0 {
		c.state(m)
	}
}

// learn stores the result r of the entry e, which no member has applied before. It checks that a repeated proposal has
// the same result, and that revision and time do not decrease.
func (c *check) learn(e consensus.Entry, r command.Result) {
	answer := string(command.EncodeResult(nil, r))
	if first, again := c.answers[e.ID]; again {
		c.w.count("proposals repeated")
		if first != answer {
			c.w.fail("proposal %x was answered %x first and %x when repeated", e.ID[:4], first, answer)
		}
		return
	}
	c.answers[e.ID] = answer
	if e.Index < c.newest {
		c.w.fail("entry %d was applied after %d and by nobody before", e.Index, c.newest)
	}
	if before := c.times[c.newest]; r.Revision < before.Revision || r.Time < before.Time {
		c.w.fail("entry %d answers %+v, the one before it %+v", e.Index, r, before)
	}
	c.newest, c.times[e.Index] = e.Index, r
	if r.Conflict {
		c.w.count("conflicts")
	}
}

// answered is called when the member m has acknowledged the proposal id with the result answer. It checks that some
// member has applied the proposal with that result.
func (c *check) answered(m *member, id [16]byte, answer any) {
	r, has := answer.(command.Result)
	if known, ok := c.answers[id]; !ok {
		c.w.fail("member %d acknowledges proposal %x, which nobody has applied", m.id, id[:4])
	} else if !has || string(command.EncodeResult(nil, r)) != known {
		c.w.fail("member %d answers %v to proposal %x, which came to %x", m.id, answer, id[:4], known)
	}
}

// state checks that the checksum of the whole state of the member m equals that of every member that was at the same
// applied index.
func (c *check) state(m *member) {
	if m.dying() || m.aside != nil {
		return
	}
	at := m.position().Index
	s := m.engine.Snapshot()
	defer s.Close()
	all, err := s.Range(mvcc.RangeOptions{Key: []byte{0}, End: []byte{0}})
	if err != nil {
		c.w.fail("member %d cannot be read: %v", m.id, err)
		return
	}
	var b strings.Builder
	fmt.Fprintln(&b, s.Revision(), s.CompactRevision(), s.Time())
	for _, kv := range all.KVs {
		fmt.Fprintln(&b, string(kv.Key), kv.CreateRevision, kv.ModRevision, kv.Version)
		b.Write(kv.Value)
	}
	sum := crc32.ChecksumIEEE([]byte(b.String()))
	if before, ok := c.digests[at]; ok && before != sum {
		c.w.fail("member %d has another state at entry %d than a member had before it", m.id, at)
	}
	c.digests[at] = sum
}

// confirm checks the revision that was returned to a client for the committed operation op. The parameter frontier is
// the value of check.frontier when the operation began.
func (c *check) confirm(op string, revision, frontier int64) {
	c.w.count("writes acknowledged")
	if revision <= frontier {
		c.w.fail("%s was acknowledged at revision %d, but %d was known when it began", op, revision, frontier)
	}
	if at, ok := c.history.ops[op]; !ok || at != revision {
		c.w.fail("%s was acknowledged at revision %d; the history has it at %d", op, revision, at)
	}
	c.frontier = max(c.frontier, revision)
}

// deny records that op failed with an error after which it must not be applied. At the end of the run, final checks
// that it was not.
func (c *check) deny(op string, err error) {
	c.never[op] = err.Error()
}

// read checks the revision of a linearizable read of a table: the revision must not be below the parameter frontier,
// which is the value of check.frontier when the read began.
func (c *check) read(what string, revision, frontier int64) {
	c.w.count("linearizable reads")
	if revision < frontier {
		c.w.fail("a read of %s saw revision %d, but %d was known when it began", what, revision, frontier)
	}
	c.frontier = max(c.frontier, revision)
}

// final is called at the end of the run. It checks that all members have the last revision of the history, and that no
// operation that deny has recorded was applied.
func (c *check) final() {
	for _, m := range c.w.trio {
		m.observer.poll()
		c.state(m)
		if m.seen != c.history.last+1 {
			c.w.fail("the watch on member %d came to revision %d, the history to %d", m.id, m.seen-1, c.history.last)
		}
		if r := m.engine.Revision(); r != c.history.last {
			c.w.fail("member %d is at revision %d in the end, the history at %d", m.id, r, c.history.last)
		}
	}
	for _, op := range slices.Sorted(maps.Keys(c.never)) {
		if at, ok := c.history.ops[op]; ok {
			c.w.fail("%s happened at revision %d, but its client was told: %s", op, at, c.never[op])
		}
	}
}
