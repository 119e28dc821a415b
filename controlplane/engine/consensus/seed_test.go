package consensus

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// seed creates a data directory in which the test group begins with a given state. known is SeedGroup.Known.
func (m *member) seed(members []uint64, state testMachineState, known uint64) error {
	machine, err := openTestMachine(m.fs, "/state")
	require.NoError(m.c.t, err)
	machine.testMachineState = state
	require.NoError(m.c.t, machine.write("/state"))
	return Seed(Options{ID: m.id, Members: members, Dir: "/consensus", FS: m.fs, QuietLog: true},
		[]SeedGroup{{ID: testGroup, Index: state.Index, Term: state.Term, Known: known}})
}

// TestSeed seeds three members with the same state, as after a restore. They must elect a leader, continue from the
// state, and accept a new member.
func TestSeed(t *testing.T) {
	for _, state := range []testMachineState{
		{Index: 40, Term: 6, Log: []string{"a=1", "a=2"}, Values: map[string]string{"a": "2"}},
		{Values: map[string]string{}}, // the state of a group without entries
	} {
		c := newCluster(t, 3, 1)
		for _, id := range c.ids {
			m := c.members[id]
			require.NoError(t, m.seed(c.ids, state, 0))
			require.ErrorContains(t, m.seed(c.ids, state, 0), "is there already")
			m.start()
		}
		l := c.elect()
		require.Greater(t, l.group.term, state.Term)
		c.put(l, "b=1")
		c.converge(append(state.Log, "b=1")...)
		for _, id := range c.ids {
			c.members[id].crash()
			c.members[id].start()
		}
		c.put(c.elect(), "b=2")
		c.grow(c.elect(), c.addNewMember(4))
		c.converge(append(state.Log, "b=1", "b=2")...)
	}
}

// TestSalvage loses two of three members. The log of the remaining one contains at least what was acknowledged. Salvage
// must apply all of it, and a new cluster must begin with this state and without the old members.
func TestSalvage(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	left := c.others(l)[0]
	c.put(l, "a=1")
	c.mustChange(l, Change{Kind: AddLearner, Member: 9, DirID: 99})
	c.put(l, "a=2")
	_, err := left.machine.Flush()
	require.NoError(t, err)
	// The other members do not learn that this member has stored the entry.
	c.drop = func(e message.Envelope) bool { return e.From == left.id }
	late := l.propose("a=3")[0]
	c.settle()
	c.heal()
	require.NoError(t, late.err)
	term := left.group.term
	for _, m := range c.members {
		m.crash()
	}
	machine, err := openTestMachine(left.fs, "/state")
	require.NoError(t, err)
	o := Options{ID: left.id, Members: []uint64{left.id}, Dir: "/consensus", FS: left.fs, QuietLog: true}
	known, err := Salvage(o, testGroup, machine)
	require.NoError(t, err)
	require.Equal(t, term, known)
	require.Equal(t, []string{"a=1", "a=2", "a=3"}, machine.Log)
	again, err := Salvage(o, testGroup, machine)
	require.NoError(t, err)
	require.Equal(t, known, again)
	require.Len(t, machine.Log, 3, "a repeated Salvage applies each proposal once")
	_, err = Salvage(o, 99, machine)
	require.ErrorContains(t, err, "there is no log for it")

	fresh := &member{c: c, id: left.id, fs: vfs.NewCrashableMem()}
	c.members[left.id], c.first = fresh, []uint64{left.id}
	require.NoError(t, fresh.seed(c.first, machine.testMachineState, known))
	fresh.start()
	l = c.elect(fresh)
	require.Greater(t, l.group.term, term)
	c.put(l, "b=1")
	require.Equal(t, []string{"a=1", "a=2", "a=3", "b=1"}, l.machine.Log)
	require.Empty(t, l.group.Status().Learners)
}
