package steps

import (
	"errors"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/consensus"
)

// second is a group beside the first: it shares the log's writes with it and must share nothing else.
const second = 2

// ledger is the state machine of the second group: it keeps nothing over a crash, so every life replays all of its log,
// and the check keeps what was in it.
type ledger struct {
	m           *member
	index, term uint64
}

// Apply implements consensus.StateMachine: an entry answers with itself.
func (l *ledger) Apply(entries []consensus.Entry) ([]any, error) {
	answers := make([]any, len(entries))
	for i, e := range entries {
		l.index, l.term = e.Index, e.Term
		answers[i] = string(e.Data)
		if !l.m.dying() {
			l.m.w.check.noted(l.m, e)
		}
	}
	return answers, nil
}

// Applied implements consensus.StateMachine.
func (l *ledger) Applied() (index, term uint64) { return l.index, l.term }

// Flush implements consensus.StateMachine.
func (l *ledger) Flush() (uint64, error) { return 0, nil }

// Checkpoint implements consensus.StateMachine. The log is never cut, so nobody can need one.
func (l *ledger) Checkpoint(string) (index, term uint64, err error) {
	return 0, 0, errors.New("a ledger has no checkpoint")
}

// Restore implements consensus.StateMachine.
func (l *ledger) Restore(string) error { return errors.New("a ledger has no checkpoint") }

// note is an entry of the second group.
type note struct {
	term uint64
	text string
}

// noted compares an entry of the second group with what was at its place before.
func (c *check) noted(m *member, e consensus.Entry) {
	now := note{e.Term, string(e.Data)}
	before, known := c.notes[e.Index]
	if known && before != now {
		c.w.fail("entry %d of the second group is %+v on member %d, but %+v was committed", e.Index, now, m.id, before)
	}
	if !known {
		c.w.trace.Add("%d notes %d/%d %s", m.id, e.Index, e.Term, e.Data)
		if at, again := c.noteAt[now.text]; again {
			c.w.fail("note %s is entry %d and entry %d: nobody has proposed it twice", e.Data, at, e.Index)
		}
		c.noteAt[now.text] = e.Index
	}
	c.notes[e.Index] = now
}

// jot adds a note and expects it where the answer says.
func (c *client) jot() error {
	if !c.w.weather.second {
		return nil
	}
	m, err := c.reachable()
	if err != nil {
		return err
	}
	c.made++
	text := fmt.Sprintf("%d.%d", c.id, c.made)
	ask := &call{}
	m.calls = append(m.calls, ask)
	life := m.life
	var id [16]byte
	copy(id[:], text)
	m.host.Group(second).Propose(id, []byte(text), func(r consensus.Result, err error) {
		if m.life != life || m.dying() {
			return
		}
		if err == nil {
			c.w.count("notes acknowledged")
			if n := c.w.check.notes[r.Index]; n.text != text || n.term != r.Term || r.Answer != text {
				c.w.fail("note %s was acknowledged at %d/%d as %v, where %+v is", text, r.Index, r.Term, r.Answer, n)
			}
		}
		ask.finish(r.Answer, err)
	})
	_, err = c.await(ask)
	return err
}
