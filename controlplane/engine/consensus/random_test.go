package consensus

import (
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3"
)

// TestRandomFaults drops, repeats and reorders packets, and crashes, pauses and isolates members. After every step it checks
// that nothing acknowledged is lost, that reads are not stale, that no term has two leaders and that all members apply the
// same proposals, each once.
func TestRandomFaults(t *testing.T) {
	seeds, done := runSeeds(t, 30, runRandomFaults)
	require.Greater(t, done, 10*seeds, "proposals and reads were answered")
}

// runRandomFaults runs TestRandomFaults with one seed. It returns how many proposals and reads succeeded.
func runRandomFaults(t *testing.T, seed uint64) int {
	c := newRandomRun(t, seed, []event{
		{2, crash}, {8, restart}, {2, isolate}, {8, heal}, {25, propose}, {15, read}, {15, hurry},
	})
	// Of three seeds, one forwards no proposals, one forwards proposals with IDs, and one forwards proposals without
	// IDs, in batches.
	c.forward, c.withoutIDs = seed%3 > 0, seed%3 == 2
	c.limits = Limits{TailEntries: 5, MessageBytes: 100, CacheBytes: 300}
	c.startAll()
	c.steps(400)
	c.recover()
	for _, id := range c.ids {
		require.Equal(t, c.applied, c.members[id].machine.Log)
	}
	require.Equal(t, c.proposals, c.answers, "every proposal is answered once")
	t.Logf("%d of %d proposals acknowledged, %d reads, %d terms", len(c.acked), c.proposals, c.reads, len(c.leaders))
	return len(c.acked) + c.reads
}

// TestRandomMembershipChanges does the same as TestRandomFaults, while members are added, promoted, wiped, replaced and
// removed.
func TestRandomMembershipChanges(t *testing.T) {
	seeds, changed := runSeeds(t, 40, runRandomMembershipChanges)
	require.Greater(t, changed, 5*seeds, "members changed")
}

// runRandomMembershipChanges runs TestRandomMembershipChanges with one seed. It returns how many membership changes
// succeeded.
func runRandomMembershipChanges(t *testing.T, seed uint64) int {
	o := &operator{lost: map[uint64]bool{}, removed: map[uint64]bool{}}
	c := newRandomRun(t, seed, []event{
		{2, crash}, {8, restart}, {2, isolate}, {8, heal}, {2, o.prepareMember}, {1, o.loseDisk}, {15, o.repair}, {20, propose}, {8, read},
	})
	c.operator, c.first = o, []uint64{1, 2, 3}
	c.limits = Limits{TailEntries: 5, MessageBytes: 200}
	c.startAll()
	c.elect()
	c.steps(700)
	c.recover()
	return o.changed
}

// runSeeds calls run in a subtest for each seed below seeds, or below a tenth of seeds with -short. It returns the number
// of seeds, and the sum of what run returned.
func runSeeds(t *testing.T, seeds int, run func(t *testing.T, seed uint64) int) (number, sum int) {
	if testing.Short() {
		seeds /= 10
	}
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { sum += run(t, seed) })
	}
	return seeds, sum
}

// randomRun applies random events to a cluster. After each step it checks the guarantees of package consensus.
type randomRun struct {
	*cluster
	rng        *mathrand.Rand
	events     []event
	withoutIDs bool      // whether proposals have no IDs
	operator   *operator // changes the members; nil: the members stay the same

	step      int               // number of the current step
	proposals int               // number of proposals that were made
	answers   int               // number of proposals whose callback was called, with or without success
	reads     int               // number of reads that succeeded
	acked     map[string]bool   // proposals that succeeded
	leaders   map[uint64]uint64 // the leader of each term
	applied   []string          // the longest list of proposals that a member has applied, in order
}

// event is a fault or a call that happens to a random member, in the given percentage of the steps.
type event struct {
	percent int
	happens func(c *randomRun, m *member)
}

func newRandomRun(t *testing.T, seed uint64, events []event) *randomRun {
	return &randomRun{
		cluster: newCluster(t, 3, byte(seed)), rng: mathrand.New(mathrand.NewPCG(seed, 1)), events: events,
		acked: map[string]bool{}, leaders: map[uint64]uint64{},
	}
}

func (c *randomRun) startAll() {
	for _, id := range c.ids {
		c.members[id].start()
	}
}

func (c *randomRun) steps(n int) {
	for c.step = range n {
		m := c.members[c.ids[c.rng.IntN(len(c.ids))]]
		at := c.rng.IntN(100)
		for _, e := range c.events {
			if at < e.percent {
				e.happens(c, m)
				break
			}
			at -= e.percent
		}
		if c.operator != nil {
			c.operator.replaceRemoved(c)
		}
		c.work()
		c.check()
	}
}

// work calls Tick and Process on some members and delivers some packets.
func (c *randomRun) work() {
	c.some(1, 4, func(m *member) { _ = m.host.Tick() }) // check handles the error of a host
	c.some(2, 3, func(m *member) { _ = m.host.Process() })
	for range 3 {
		c.deliverSome()
		c.some(3, 4, func(m *member) { _ = m.host.Process() })
	}
}

// some calls do for each running member, with a probability of n/of.
func (c *randomRun) some(n, of int, do func(m *member)) {
	for _, id := range c.ids {
		if m := c.members[id]; m.up && c.rng.IntN(of) < n {
			do(m)
		}
	}
}

// deliverSome delivers some of the packets in random order. It repeats a few of them and drops a few.
func (c *randomRun) deliverSome() {
	c.rng.Shuffle(len(c.net), func(i, j int) { c.net[i], c.net[j] = c.net[j], c.net[i] })
	now := c.net[:len(c.net)-len(c.net)*c.rng.IntN(4)/4]
	c.net = slices.Clone(c.net[len(now):])
	for _, p := range now {
		switch {
		case p.dir != "":
			if p.from.up { // otherwise the snapshot's files do not exist any more
				c.deliverOne(p)
			}
		case c.rng.IntN(50) == 0:
		case c.rng.IntN(50) == 0:
			c.net = append(c.net, p)
			fallthrough
		default:
			c.deliverOne(p)
		}
	}
}

// check compares the proposals that the running members have applied, and the leaders of the terms, with those of
// earlier steps.
func (c *randomRun) check() {
	for _, id := range c.ids {
		m := c.members[id]
		if !m.up {
			continue
		}
		if err := m.host.Err(); err != nil {
			var removed *RemovedError
			require.ErrorAs(c.t, err, &removed, "member %d", id)
			require.NotNil(c.t, c.operator, "nobody removed member %d", id)
			continue
		}
		log := m.machine.Log
		n := min(len(log), len(c.applied))
		require.True(c.t, slices.Equal(c.applied[:n], log[:n]), "member %d applied something else", id)
		if len(log) > n {
			c.applied = slices.Clone(log)
		}
		if m.group.role == raft.StateLeader {
			if l, ok := c.leaders[m.group.term]; ok {
				require.Equal(c.t, l, id, "two leaders of term %d", m.group.term)
			}
			c.leaders[m.group.term] = id
		}
	}
	for p := range c.acked {
		require.Contains(c.t, c.applied, p, "an acknowledged proposal is lost")
	}
	sorted := slices.Sorted(slices.Values(c.applied))
	require.Len(c.t, slices.Compact(sorted), len(c.applied), "a proposal is applied twice")
}

// recover restarts all members, waits until a leader commits a proposal, and gives the others time to apply it.
func (c *randomRun) recover() {
	c.heal()
	c.net = slices.DeleteFunc(c.net, func(p packet) bool { return p.dir != "" })
	for _, id := range c.ids {
		if m := c.members[id]; m.up {
			m.crash()
		}
	}
	c.startAll()
	committed := false
	for i := 0; i < 300 && !committed; i++ {
		c.tick(1)
		if l := c.anyLeader(); l != nil && l.group.applied.Term == l.group.term {
			end := l.propose(fmt.Sprintf("end=%d", i))[0]
			c.settle()
			committed = end.n == 1 && end.err == nil
		}
	}
	require.True(c.t, committed, "no leader commits a proposal:\n%s", c.state())
	c.tick(60)
	c.check()
}

// anyLeader returns a running member in the role of leader, nil if there is none. There may be other leaders, of other
// terms.
func (c *randomRun) anyLeader() *member {
	for _, id := range c.ids {
		if m := c.members[id]; m.up && m.host.Err() == nil && m.group.role == raft.StateLeader {
			return m
		}
	}
	return nil
}

// crash ends a member. Its disk then has the synced data and, at random, some of the unsynced data.
func crash(c *randomRun, m *member) {
	if m.up {
		m.crashTo(m.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: c.rng.IntN(2) * 50, RNG: c.rng}))
	}
}

func restart(_ *randomRun, m *member) {
	if !m.up {
		m.start()
	}
}

func isolate(c *randomRun, m *member) { c.isolate(m) }

func heal(c *randomRun, _ *member) { c.heal() }

// hurry calls Tick once on one member, so that its clock is ahead of the others'.
func hurry(_ *randomRun, m *member) {
	if m.up {
		_ = m.host.Tick() // check handles the error of a host
	}
}

// propose makes one to four proposals on a member.
func propose(c *randomRun, m *member) {
	if !m.up {
		return
	}
	for i := range 1 + c.rng.IntN(4) {
		p := fmt.Sprintf("%d.%d=%d", c.step, i, m.id)
		id := [16]byte{byte(c.step), byte(c.step >> 8), byte(i), byte(m.id)}
		if c.withoutIDs {
			id = [16]byte{}
		}
		c.proposals++
		m.group.Propose(id, []byte(p), func(_ Result, err error) {
			c.answers++
			if err == nil {
				c.acked[p] = true
			}
		})
	}
}

// read starts a linearizable read on a member. When it succeeds, the member must have applied all proposals that were
// acknowledged before the read started.
func read(c *randomRun, m *member) {
	if !m.up {
		return
	}
	var before []string
	for p := range c.acked {
		before = append(before, p)
	}
	m.group.ReadIndex(func(_ uint64, err error) {
		if err == nil {
			c.reads++
			require.Subset(c.t, m.machine.Log, before, "a stale read")
		}
	})
}
