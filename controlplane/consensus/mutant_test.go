//go:build mutant

package consensus

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants shows for each safety rule that the opposite of what the other tests expect happens when it is broken.
func TestMutants(t *testing.T) {
	for name, story := range map[string]func(*testing.T){
		mutant.SkipLogSync: func(t *testing.T) {
			c := startCluster(t, 3, 1)
			c.put(c.leader(), "a=1")
			for _, m := range c.members {
				m.crash()
			}
			for _, id := range c.ids {
				c.members[id].start()
			}
			c.put(c.elect(), "a=2")
			require.Equal(t, []string{"a=2"}, c.leader().machine.Log, "an acknowledged write is lost")
		},
		mutant.ForgetBirths: func(t *testing.T) {
			c := startCluster(t, 3, 1)
			c.put(c.leader(), "a=1")
			c.members[2].wipe()
			c.members[2].start()
			c.tick(30)
			require.True(t, c.members[2].host.Status().Vouched, "a wiped member takes part")
		},
		mutant.AckBeforeCommit: func(t *testing.T) {
			c := startCluster(t, 3, 1)
			l := c.leader()
			c.isolate(l)
			a := l.propose("a=1")[0]
			c.settle()
			require.Equal(t, 1, a.n)
			require.NoError(t, a.err, "nobody else has it")
			c.tick(60)
			require.Equal(t, 1, a.n)
		},
		mutant.StaleRead: func(t *testing.T) {
			c := startCluster(t, 3, 1)
			old := c.leader()
			c.isolate(old)
			c.put(c.elect(c.others(old)...), "a=1")
			_, a := old.read()
			require.NoError(t, a.err)
			require.Equal(t, 1, a.n, "a member that was left behind answers")
			require.Empty(t, old.machine.Values["a"])
		},
	} {
		t.Run(name, func(t *testing.T) {
			mutant.Set(name)
			defer mutant.Set("")
			story(t)
		})
	}
}
