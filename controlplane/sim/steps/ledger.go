package steps

import (
	"errors"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
)

// second is the ID of the second raft group. The two groups are independent, except that their logs are written to disk
// together.
const second = 2

// ledger is the state machine of the second group. It stores nothing on disk, so that each process applies the whole
// log from its beginning. It passes each entry to check.noted.
type ledger struct {
	m    *member
	at   place
	term uint64
}

// place identifies a note, that is, a proposal of the second group. It consists of the index of the log entry and the
// position of the note in the entry.
type place struct {
	index uint64
	n     int
}

// Apply implements consensus.StateMachine. The result of an entry is its data.
func (l *ledger) Apply(entries []consensus.Entry) ([]any, error) {
	answers := make([]any, len(entries))
	for i, e := range entries {
		if i > 0 && e.Index == l.at.index {
			l.at.n++
		} else {
			l.at = place{index: e.Index}
		}
		l.term = e.Term
		answers[i] = string(e.Data)
		if !l.m.dying() {
			l.m.w.check.noted(l.m, l.at, e)
		}
	}
	return answers, nil
}

// Applied implements consensus.StateMachine.
func (l *ledger) Applied() (index, term uint64) { return l.at.index, l.term }

// Flush implements consensus.StateMachine.
func (l *ledger) Flush() (uint64, error) { return 0, nil }

// Checkpoint implements consensus.StateMachine. The log is never truncated, so no member needs a snapshot.
func (l *ledger) Checkpoint(string) (index, term uint64, err error) {
	return 0, 0, errors.New("a ledger has no checkpoint")
}

// Restore implements consensus.StateMachine.
func (l *ledger) Restore(string) error { return errors.New("a ledger has no checkpoint") }

// note is the text of a proposal of the second group, with the term of its log entry.
type note struct {
	term uint64
	text string
}

// noted is called when the member m applies the entry e at a place. It checks that every member has the same note at
// this place, and that no note is applied at two places.
func (c *check) noted(m *member, at place, e consensus.Entry) {
	now := note{e.Term, string(e.Data)}
	before, known := c.notes[at]
	if known && before != now {
		c.w.fail("entry %+v of the second group is %+v on member %d, but %+v was committed", at, now, m.id, before)
	}
	if !known {
		c.w.trace.Add("%d notes %d.%d/%d %s", m.id, at.index, at.n, e.Term, e.Data)
		if first, again := c.noteAt[now.text]; again {
			c.w.fail("note %s is entry %+v and entry %+v: nobody has proposed it twice", e.Data, first, at)
		}
		c.noteAt[now.text] = at
		if at.n > 0 {
			c.w.count("notes that share an entry")
		}
	}
	c.notes[at] = now
}

// proposeNotes proposes one to three notes at the same time, and checks that each acknowledged note was applied at the
// index that its result names.
func (c *client) proposeNotes() error {
	if !c.w.faults.second {
		return nil
	}
	m, err := c.reachable()
	if err != nil {
		return err
	}
	var last *call
	for range 1 + c.rng.IntN(3) {
		last = c.note(m)
	}
	_, err = c.await(last)
	return err
}

func (c *client) note(m *member) *call {
	c.made++
	text := fmt.Sprintf("%d.%d", c.id, c.made)
	ask := &call{}
	m.calls = append(m.calls, ask)
	life := m.life
	var id [16]byte // proposal ID; zero: the note may share an entry with others
	if c.made%4 == 0 {
		copy(id[:], text)
	}
	m.host.Group(second).Propose(id, []byte(text), func(r consensus.Result, err error) {
		if m.life != life || m.dying() {
			return
		}
		if err == nil {
			c.w.count("notes acknowledged")
			at, noted := c.w.check.noteAt[text]
			if !noted || at.index != r.Index || c.w.check.notes[at].term != r.Term || r.Answer != text {
				c.w.fail("note %s was acknowledged at %d/%d as %v, but is at %+v", text, r.Index, r.Term, r.Answer, at)
			}
		}
		ask.finish(r.Answer, err)
	})
	return ask
}
