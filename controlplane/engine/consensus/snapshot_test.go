package consensus

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// shortLogs returns a running cluster of three members that truncate their logs to four entries.
func shortLogs(t *testing.T) *cluster {
	c := newCluster(t, 3, 1)
	c.limits.TailEntries = 4
	for _, id := range c.ids {
		c.members[id].start()
	}
	c.elect()
	return c
}

// putMany makes n proposals one by one, with numbers that begin at from. It returns all proposals with the numbers from
// 0 to the last.
func (c *cluster) putMany(m *member, from, n int) (all []string) {
	for i := range from + n {
		all = append(all, fmt.Sprintf("k%d=%d", i%5, i))
		if i >= from {
			c.put(m, all[i])
		}
	}
	return all
}

func (m *member) snapshotDirs() []string {
	names, err := m.fs.List(m.host.SnapshotDir())
	require.NoError(m.c.t, err)
	return names
}

func TestSlowMemberGetsSnapshots(t *testing.T) {
	c := shortLogs(t)
	l := c.leader()
	slow := c.others(l)[0]
	n := 0
	for round := range 2 { // two snapshots in a row
		c.isolate(slow)
		all := c.putMany(l, n, 20)
		n += 20
		require.Greater(t, l.group.Status().First, slow.group.Status().Last+1, "the leader's log no longer has the entries that the member lacks")
		c.heal()
		c.converge(all...)
		require.Equal(t, round+1, slow.arrived)
		require.Greater(t, slow.group.Status().First, uint64(10))
		for _, m := range c.members {
			require.Empty(t, m.snapshotDirs(), "member %d keeps no snapshot directory", m.id)
		}
	}
	slow.crash()
	slow.start()
	c.converge(c.putMany(c.elect(), n, 5)...)
}

// TestSnapshotIsReplacedByANewerOne checks that a leader sends another snapshot after the first one was lost.
func TestSnapshotIsReplacedByANewerOne(t *testing.T) {
	c := shortLogs(t)
	l := c.leader()
	slow := c.others(l)[0]
	c.isolate(slow)
	all := c.putMany(l, 0, 20)
	c.heal()
	held := 0
	c.drop = func(e message.Envelope) bool {
		if e.Raft.GetType() == raftpb.MsgSnap && held == 0 {
			held++
			return true
		}
		return false
	}
	c.tick(2)
	require.Equal(t, 1, held, "one snapshot is lost")
	require.Empty(t, l.group.outgoing)
	c.converge(all...)
}

// TestLogIsKeptDuringSnapshotTransfer checks that a leader does not truncate the entries after a snapshot while it
// sends the snapshot, so that the receiver can continue with the log.
func TestLogIsKeptDuringSnapshotTransfer(t *testing.T) {
	c := shortLogs(t)
	l := c.leader()
	slow := c.others(l)[0]
	c.isolate(slow)
	c.putMany(l, 0, 20)
	c.heal()
	var snap []packet
	c.drop = func(e message.Envelope) bool { return false }
	c.frozen = true
	for range 5 {
		require.NoError(t, l.host.Tick())
		c.settle()
		net := c.net
		c.net = nil
		for _, p := range net {
			if p.dir != "" {
				snap = append(snap, p)
			} else {
				c.deliverOne(p)
			}
		}
		c.settle()
	}
	c.frozen = false
	require.Len(t, snap, 1)
	all := c.putMany(l, 20, 40)
	require.LessOrEqual(t, l.group.Status().First, l.group.outgoing[slow.id].at.Index+1)
	c.net = append(c.net, snap...)
	c.converge(all...)
	require.Equal(t, 1, slow.arrived, "one snapshot is sent")
	c.converge(c.putMany(l, 60, 20)...)
	require.Greater(t, l.group.Status().First, uint64(60), "the leader truncates its log again after the snapshot")
}

// TestCrashDuringInstallation crashes a member after its state machine has installed a snapshot. The installation must
// be finished at the next start, with a log that ends before the snapshot or has uncommitted entries beyond it.
func TestCrashDuringInstallation(t *testing.T) {
	for _, diverged := range []bool{false, true} {
		t.Run(fmt.Sprint("diverged ", diverged), func(t *testing.T) {
			c := shortLogs(t)
			slow := c.leader()
			c.isolate(slow)
			if diverged {
				var lost []string
				for i := range 40 {
					lost = append(lost, fmt.Sprintf("lost=%d", i))
				}
				slow.propose(lost...)
				c.settle()
				require.Greater(t, slow.group.Status().Last, uint64(40))
			}
			l := c.elect(c.others(slow)...)
			all := c.putMany(l, 0, 20)
			var disk *vfs.MemFS
			slow.machine.restored = func() { disk = slow.fs.CrashClone(vfs.CrashCloneCfg{}) }
			c.heal()
			c.tick(3)
			require.NotNil(t, disk)
			slow.crashTo(disk)
			slow.start()
			require.Equal(t, slow.group.Status().Last, slow.group.Status().Applied, "the log begins after the installed state")
			require.Equal(t, 1, countLines(slow.logged.String(), "finished the installation"))
			c.elect()
			c.converge(all...)
		})
	}
}

func TestCrashBeforeInstallation(t *testing.T) {
	c := shortLogs(t)
	l := c.leader()
	slow := c.others(l)[0]
	c.put(l, "a=1")
	c.tick(1)
	c.isolate(slow)
	c.putMany(l, 0, 20)
	slow.machine.restoreErr = errors.New("no space left")
	c.heal()
	c.tick(3)
	require.ErrorContains(t, slow.host.Err(), "no space left")
	slow.crash()
	slow.start()
	require.Equal(t, uint64(3), slow.group.Status().Last, "the member continues with its earlier log")
	_, found, err := slow.group.storage.SnapshotMarker()
	require.NoError(t, err)
	require.False(t, found)
	c.tick(5)
	require.Equal(t, l.machine.Log, slow.machine.Log)
}

// TestUnrequestedSnapshotFilesAreRemoved checks that the files of a snapshot that raft does not accept are removed.
func TestUnrequestedSnapshotFilesAreRemoved(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	f := c.others(l)[0]
	c.put(l, "a=1")
	c.tick(1)
	e := message.Envelope{From: l.id, To: f.id, FromDirID: l.host.dirIDs.own, Kind: message.KindRaft, Group: testGroup}
	conf := &raftpb.ConfState{Voters: c.ids}
	for name, m := range map[string]*raftpb.Message{
		"old":         {Type: raftpb.MsgSnap.Enum(), Snapshot: &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{Index: new(uint64(1)), Term: new(uint64(1)), ConfState: conf}}},
		"no metadata": {Type: raftpb.MsgSnap.Enum(), Snapshot: &raftpb.Snapshot{}},
		"heartbeat":   {Type: raftpb.MsgHeartbeat.Enum()},
	} {
		m.From, m.To, m.Term = &l.id, &f.id, &l.group.term
		e.Raft = m
		dir := f.fs.PathJoin(f.host.SnapshotDir(), name)
		require.NoError(t, f.fs.MkdirAll(dir, 0o700))
		require.NoError(t, f.host.StepSnapshot(e, dir))
		c.settle()
		require.Empty(t, f.snapshotDirs(), name)
	}
	require.NoError(t, f.host.Step(message.Envelope{From: l.id, To: f.id, FromDirID: l.host.dirIDs.own, Kind: message.KindRaft, Group: testGroup, Raft: &raftpb.Message{
		Type: raftpb.MsgSnap.Enum(), From: &l.id, To: &f.id, Term: &l.group.term,
		Snapshot: &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{Index: new(uint64(99)), Term: new(uint64(1)), ConfState: conf}},
	}}), "a snapshot message without files is ignored")
	c.converge("a=1")
}

func TestOldDirectoriesAreRemoved(t *testing.T) {
	c := startCluster(t, 1, 1)
	m := c.members[1]
	require.NoError(t, makeDir(m.fs, m.fs.PathJoin(m.host.SnapshotDir(), "out-1-2-3")))
	m.crash()
	m.start()
	require.Empty(t, m.snapshotDirs())
}

// TestLogAndStateMustMatch checks that AddGroup refuses a log and a state machine whose positions do not fit together.
func TestLogAndStateMustMatch(t *testing.T) {
	prepare := func(t *testing.T) (*cluster, *member) {
		c := newCluster(t, 1, 1)
		c.limits.TailEntries = 4
		m := c.members[1]
		m.start()
		c.settle()
		c.putMany(m, 0, 20)
		_, err := m.machine.Flush()
		require.NoError(t, err)
		m.stop()
		return c, m
	}
	change := func(m *member, f func(*testMachineState)) error {
		machine, err := openTestMachine(m.fs, "/state")
		require.NoError(t, err)
		f(&machine.testMachineState)
		require.NoError(t, machine.write("/state"))
		return m.tryStart()
	}
	t.Run("state is older than the log", func(t *testing.T) {
		_, m := prepare(t)
		require.ErrorContains(t, change(m, func(s *testMachineState) { *s = testMachineState{} }), "the state has lost what it had flushed")
	})
	t.Run("log is older than the state", func(t *testing.T) {
		_, m := prepare(t)
		require.ErrorContains(t, change(m, func(s *testMachineState) { s.Index += 3 }), "the log has lost what it had acknowledged")
	})
	t.Run("log and state have different terms", func(t *testing.T) {
		_, m := prepare(t)
		require.ErrorContains(t, change(m, func(s *testMachineState) { s.Term++ }), "is of term 3 in the state, but of term 2 in the log")
	})
	t.Run("log is missing", func(t *testing.T) {
		_, m := prepare(t)
		require.NoError(t, m.fs.RemoveAll("/consensus"))
		require.ErrorContains(t, m.tryStart(), "there is no log for it")
	})
}

// TestCheckpointFails checks that a leader whose checkpoint fails tries again, and commits proposals meanwhile.
func TestCheckpointFails(t *testing.T) {
	c := shortLogs(t)
	l := c.leader()
	slow := c.others(l)[0]
	c.isolate(slow)
	all := c.putMany(l, 0, 20)
	l.machine.checkpointErr = errors.New("no space left")
	c.heal()
	c.tick(10)
	require.Contains(t, l.logged.String(), "no space left")
	require.Empty(t, l.snapshotDirs())
	require.Zero(t, slow.arrived)
	c.put(l, "a=1")
	l.machine.checkpointErr = nil
	c.converge(append(all, "a=1")...)
}

// TestLeaderKeepsLogForSlowMember checks that a leader does not truncate the entries that a briefly isolated member
// lacks, and truncates them if no member lacks them.
func TestLeaderKeepsLogForSlowMember(t *testing.T) {
	for _, away := range []bool{true, false} {
		c := newCluster(t, 3, 1)
		c.limits.TailEntries = 8
		for _, id := range c.ids {
			c.members[id].start()
		}
		l := c.elect()
		f := c.others(l)[0]
		if away {
			c.isolate(f)
		}
		lacks := f.group.Status().Last + 1
		for i := range 14 {
			c.put(l, fmt.Sprintf("a=%d", i))
		}
		c.tick(2)
		c.heal()
		c.tick(10)
		require.Zero(t, f.arrived, "no snapshot is sent")
		require.Equal(t, away, l.group.Status().First <= lacks, "the log begins at %d, member %d lacked %d", l.group.Status().First, f.id, lacks)
		require.Equal(t, l.machine.Log, f.machine.Log)
	}
}
