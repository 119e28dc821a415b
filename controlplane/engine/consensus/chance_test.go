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

// TestRandomFaults drops, repeats and reorders packets, and crashes, pauses and isolates members. After every step it
// checks that no acknowledged proposal is lost, that reads see all of them, that a term has one leader, and that all
// members apply the same entries.
func TestRandomFaults(t *testing.T) {
	seeds := 30
	if testing.Short() {
		seeds = 3
	}
	done := 0
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { done += chance(t, uint64(seed), 400) })
	}
	require.Greater(t, done, 10*seeds, "they got somewhere")
}

// chance returns how many proposals and reads were answered.
func chance(t *testing.T, seed uint64, steps int) int {
	c := newCluster(t, 3, byte(seed))
	// Every third seed forwards proposals, and every third forwards them in batches.
	batches := seed%3 == 2
	c.forward = seed%3 > 0
	c.limits.TailEntries = 5
	c.limits.MessageBytes = 100
	c.limits.CacheBytes = 300
	for _, id := range c.ids {
		c.members[id].start()
	}
	rng := mathrand.New(mathrand.NewPCG(seed, 1))
	acked := map[string]bool{}
	leaders := map[uint64]uint64{}
	var longest []string
	proposals, answers, reads := 0, 0, 0
	check := func() {
		for _, id := range c.ids {
			m := c.members[id]
			if !m.up {
				continue
			}
			require.NoError(t, m.host.Err())
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
		twice := slices.Sorted(slices.Values(longest))
		require.Len(t, slices.Compact(twice), len(longest), "nothing is applied twice")
	}
	step := func(i int) {
		m := c.members[c.ids[rng.IntN(3)]]
		switch r := rng.IntN(100); {
		case r < 2:
			if m.up {
				// Unsynced data may or may not survive.
				m.crashTo(m.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(2) * 50, RNG: rng}))
			}
		case r < 10:
			if !m.up {
				m.start()
			}
		case r < 12:
			c.isolate(m)
		case r < 20:
			c.heal()
		case r < 45 && m.up:
			for j := range 1 + rng.IntN(4) {
				p := fmt.Sprintf("%d.%d=%d", i, j, m.id)
				proposals++
				id := [16]byte{byte(i), byte(i >> 8), byte(j), byte(m.id)}
				if batches {
					id = [16]byte{}
				}
				m.group.Propose(id, []byte(p), func(_ Result, err error) {
					answers++
					if err == nil {
						acked[p] = true
					}
				})
			}
		case r < 60 && m.up:
			var before []string
			for p := range acked {
				before = append(before, p)
			}
			m.group.ReadIndex(func(_ uint64, err error) {
				if err == nil {
					reads++
					require.Subset(t, m.machine.Log, before, "a stale read")
				}
			})
		case r < 75 && m.up:
			require.NoError(t, m.host.Tick()) // its clock runs fast
		}
		for _, id := range c.ids {
			if m := c.members[id]; m.up && rng.IntN(4) == 0 {
				require.NoError(t, m.host.Tick())
			}
		}
		for _, id := range c.ids {
			if m := c.members[id]; m.up && rng.IntN(3) > 0 {
				require.NoError(t, m.host.Process())
			}
		}
		for range 3 {
			c.deliverSome(rng)
			for _, id := range c.ids {
				if m := c.members[id]; m.up && rng.IntN(4) > 0 {
					require.NoError(t, m.host.Process())
				}
			}
		}
		check()
	}
	for i := range steps {
		step(i)
	}
	c.heal()
	c.net = slices.DeleteFunc(c.net, func(p packet) bool { return p.dir != "" })
	for _, id := range c.ids {
		m := c.members[id]
		if m.up {
			m.crash()
		}
		m.start()
	}
	c.put(c.elect(), "end=1")
	c.tick(60)
	check()
	for _, id := range c.ids {
		require.Equal(t, longest, c.members[id].machine.Log)
	}
	require.Equal(t, proposals, answers, "every proposal is answered once")
	t.Logf("%d of %d proposals acknowledged, %d reads, %d terms", len(acked), proposals, reads, len(leaders))
	return len(acked) + reads
}

// deliverSome delivers some packets in random order, repeats some and drops some.
func (c *cluster) deliverSome(rng *mathrand.Rand) {
	rng.Shuffle(len(c.net), func(i, j int) { c.net[i], c.net[j] = c.net[j], c.net[i] })
	now := c.net[:len(c.net)-len(c.net)*rng.IntN(4)/4]
	c.net = slices.Clone(c.net[len(now):])
	for _, p := range now {
		switch {
		case p.dir != "":
			if p.from.up { // else its files are gone
				c.deliverOne(p)
			}
		case rng.IntN(50) == 0:
		case rng.IntN(50) == 0:
			c.net = append(c.net, p)
			fallthrough
		default:
			c.deliverOne(p)
		}
	}
}
