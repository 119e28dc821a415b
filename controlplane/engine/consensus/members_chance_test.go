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

// TestRandomMembershipChanges is TestRandomFaults with members that are added, promoted, wiped, replaced and removed as
// an operator would do it: a member whose directory is lost is removed before another directory is added under its ID.
func TestRandomMembershipChanges(t *testing.T) {
	seeds := 40
	if testing.Short() {
		seeds = 4
	}
	total := 0
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { total += chanceMembers(t, uint64(seed), 700) })
	}
	require.Greater(t, total, 5*seeds, "members did change")
}

func chanceMembers(t *testing.T, seed uint64, steps int) (changed int) {
	c := newCluster(t, 3, byte(seed))
	c.first = []uint64{1, 2, 3}
	c.limits.TailEntries = 5
	c.limits.MessageBytes = 200
	for _, id := range c.ids {
		c.members[id].start()
	}
	c.elect()
	rng := mathrand.New(mathrand.NewPCG(seed, 7))
	acked := map[string]bool{}
	leaders := map[uint64]uint64{}
	var longest []string
	lost := map[uint64]bool{} // directories that were lost while they belonged to the group
	check := func() {
		for _, id := range c.ids {
			m := c.members[id]
			if !m.up || m.host.Err() != nil {
				continue
			}
			log := m.machine.Log
			n := min(len(log), len(longest))
			require.True(t, slices.Equal(longest[:n], log[:n]), "member %d applied something else", id)
			if len(log) > n {
				longest = slices.Clone(log)
			}
			if m.group.role == raft.StateLeader {
				if l, ok := leaders[m.group.term]; ok {
					require.Equal(t, l, id, "two leaders of term %d", m.group.term)
				}
				leaders[m.group.term] = id
			}
		}
		for p := range acked {
			require.Contains(t, longest, p)
		}
	}
	// leads is a member that has not noticed the loss of its leadership, nil if there is none.
	leads := func() *member {
		for _, id := range c.ids {
			if m := c.members[id]; m.up && m.host.Err() == nil && m.group.role == raft.StateLeader {
				return m
			}
		}
		return nil
	}
	// agreed says that all members know the same members: a leader of the past might know others.
	agreed := func(l *member) bool {
		for _, id := range l.group.storage.Members().Conf.Voters {
			m := c.members[id]
			if !lost[id] && (!m.up || m.group.applied.Index == 0 || m.group.storage.Members().Conf.Equivalent(l.group.storage.Members().Conf) != nil) {
				return false
			}
		}
		return true
	}
	removed := map[uint64]bool{} // directories whose removal was requested
	ask := func(l *member, force bool, changes ...Change) {
		for _, ch := range changes {
			if ch.Kind == Remove {
				removed[l.group.storage.Members().DirIDs[ch.Member]] = true
			}
		}
		l.group.ChangeMembers(changes, force, func(err error) {
			if err == nil {
				changed++
			}
		})
	}
	step := func(i int) {
		m := c.members[c.ids[rng.IntN(len(c.ids))]]
		l := leads()
		switch r := rng.IntN(100); {
		case r < 2 && m.up:
			m.crashTo(m.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(2) * 50, RNG: rng}))
		case r < 10 && !m.up:
			m.start()
		case r < 12:
			c.isolate(m)
		case r < 20:
			c.heal()
		case r < 22 && len(c.ids) < 6: // a newcomer
			c.addNewMember(uint64(len(c.ids) + 1))
		case r < 23 && l != nil && m != l && len(lost) == 0 && agreed(l) && len(l.group.storage.Members().Conf.Voters) > 2:
			c.addNewMember(m.id) // its disk is lost
			if l.group.storage.Members().Has(m.id) {
				lost[m.id] = true
			}
		case r < 38 && l != nil: // what an operator does about it
			switch has := l.group.storage.Members(); {
			case lost[m.id]:
				if has.Has(m.id) {
					ask(l, false, Change{Kind: Remove, Member: m.id})
					break
				}
				if agreed(l) {
					delete(lost, m.id)
				}
			case m.up && m.joins && !has.Has(m.id):
				if removed[m.host.dirIDs.own] { // a removed directory is not used again
					c.addNewMember(m.id)
					m = c.members[m.id]
				}
				ask(l, false, Change{Kind: AddLearner, Member: m.id, DirID: m.host.dirIDs.own})
			case slices.Contains(has.Conf.Learners, m.id):
				ask(l, false, Change{Kind: Promote, Member: m.id})
			case rng.IntN(4) == 0 && len(has.Conf.Voters) > 3 && m.joins:
				ask(l, false, Change{Kind: Remove, Member: m.id})
			}
		case r < 58 && m.up:
			for j := range 1 + rng.IntN(3) {
				p := fmt.Sprintf("%d.%d=%d", i, j, m.id)
				m.group.Propose([16]byte{byte(i), byte(i >> 8), byte(j)}, []byte(p), func(_ Result, err error) {
					if err == nil {
						acked[p] = true
					}
				})
			}
		case r < 66 && m.up:
			var before []string
			for p := range acked {
				before = append(before, p)
			}
			m.group.ReadIndex(func(_ uint64, err error) {
				if err == nil {
					require.Subset(t, m.machine.Log, before, "a stale read")
				}
			})
		}
		for _, id := range c.ids {
			m := c.members[id]
			if m.up && m.host.Err() != nil { // it was removed: its disk is thrown away
				var gone *RemovedError
				require.ErrorAs(t, m.host.Err(), &gone, "member %d", id)
				c.addNewMember(id)
			}
		}
		for _, id := range c.ids {
			if m := c.members[id]; m.up && rng.IntN(4) == 0 {
				_ = m.host.Tick()
			}
		}
		for range 3 {
			for _, id := range c.ids {
				if m := c.members[id]; m.up && rng.IntN(4) > 0 {
					_ = m.host.Process()
				}
			}
			c.deliverSome(rng)
		}
		check()
	}
	for i := range steps {
		step(i)
	}
	// The group works again when all remaining members are up.
	c.heal()
	c.net = slices.DeleteFunc(c.net, func(p packet) bool { return p.dir != "" })
	for _, id := range c.ids {
		m := c.members[id]
		if m.up {
			m.crash()
		}
		m.start()
	}
	var l *member
	for range 300 {
		c.tick(1)
		if l = leads(); l != nil && l.group.applied.Term == l.group.term {
			end := l.propose("end=1")[0]
			c.settle()
			if end.n == 1 && end.err == nil {
				break
			}
		}
		l = nil
	}
	require.NotNil(t, l, "nobody leads:\n%s", c.state())
	c.tick(30)
	check()
	return changed
}
