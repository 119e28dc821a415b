//go:build mutant

package consensus

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables one mutant after another, each of which breaks a safety rule, and shows the damage that the other
// tests check for.
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
		mutant.ForgetDirIDs: func(t *testing.T) {
			c := startCluster(t, 3, 1)
			c.put(c.leader(), "a=1")
			c.members[2].wipe()
			c.members[2].start()
			c.tick(30)
			require.True(t, c.members[2].host.Status().Vouched, "the wiped member is not refused")
		},
		mutant.AckBeforeSync: func(t *testing.T) {
			c := startCluster(t, 3, 1)
			l := c.leader()
			disks := map[*member]*vfs.MemFS{}
			for _, f := range c.others(l) {
				f.onSend = func(m *member, e message.Envelope) {
					if e.Kind == message.KindRaft && e.Raft.GetType() == raftpb.MsgAppResp && disks[m] == nil {
						disks[m] = m.fs.CrashClone(vfs.CrashCloneCfg{})
					}
				}
			}
			c.put(l, "a=1")
			c.isolate(l)
			for _, f := range c.others(l) {
				f.crashTo(disks[f])
				f.onSend = nil
				f.start()
			}
			c.put(c.elect(c.others(l)...), "a=2")
			require.Equal(t, []string{"a=2"}, c.others(l)[0].machine.Log, "an acknowledged write is lost")
		},
		mutant.DropVoteSync: func(t *testing.T) {
			c := newCluster(t, 3, 1)
			forgotten := 0
			for _, id := range c.ids {
				c.members[id].onSend = func(m *member, e message.Envelope) {
					if e.Kind == message.KindRaft && e.Raft.GetType() == raftpb.MsgVoteResp && !e.Raft.GetReject() {
						_, disk, _ := openTestLogAt(t, m.fs.CrashClone(vfs.CrashCloneCfg{}), "/consensus/log", testGroup)
						if disk.HardState().GetVote() != e.To {
							forgotten++
						}
					}
				}
				c.members[id].start()
			}
			c.elect()
			require.Positive(t, forgotten, "a vote is sent before it is synced")
		},
		mutant.AckBeforeCommit: func(t *testing.T) {
			c := startCluster(t, 3, 1)
			l := c.leader()
			c.isolate(l)
			a := l.propose("a=1")[0]
			c.settle()
			require.Equal(t, 1, a.n)
			require.NoError(t, a.err, "the proposal is acknowledged although no other member has it")
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
			require.Equal(t, 1, a.n, "the isolated former leader answers the read")
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

// TestMutantLearnerVotes checks that a test fails with the mutant that makes a new member a voter at once.
func TestMutantLearnerVotes(t *testing.T) {
	mutanttest.Notices(t, mutant.LearnerVotes, TestLearnerDoesNotCountForQuorum, "no leader is known")
}
