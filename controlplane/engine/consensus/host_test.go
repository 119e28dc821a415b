package consensus

import (
	"bytes"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

func TestOptionsAreChecked(t *testing.T) {
	good := Options{ID: 1, Members: []uint64{1, 2, 3}, Dir: "/d", Transport: &member{}, FS: vfs.NewMem()}
	for want, spoil := range map[string]func(*Options){
		"member id 0 cannot be used":        func(o *Options) { o.ID = 0 },
		"is not in the list of members":     func(o *Options) { o.ID = 4 },
		"needs a directory and a transport": func(o *Options) { o.Dir = "" },
		"not one of different ids above 0":  func(o *Options) { o.Members = []uint64{1, 1} },
		"needs fewer than that":             func(o *Options) { o.HeartbeatTicks = 20 },
		"do not fit into messages":          func(o *Options) { o.Limits.ProposalBytes = 1 << 30 },
	} {
		o := good
		spoil(&o)
		_, err := Open(o)
		require.ErrorContains(t, err, want)
	}
	h, err := Open(good)
	require.NoError(t, err)
	machine, err := openTestMachine(good.FS, "/state")
	require.NoError(t, err)
	_, err = h.AddGroup(GroupOptions{ID: 1})
	require.ErrorContains(t, err, "state machine")
	_, err = h.AddGroup(GroupOptions{ID: 1, Machine: machine})
	require.NoError(t, err)
	_, err = h.AddGroup(GroupOptions{ID: 1, Machine: machine})
	require.ErrorContains(t, err, "was added already")
	require.NoError(t, h.Close())
	require.NoError(t, h.Close())
	_, err = h.AddGroup(GroupOptions{ID: 2, Machine: machine})
	require.ErrorIs(t, err, ErrStopped)
}

// TestFailedSyncStopsHost checks that a host whose log cannot be synced stops and does not acknowledge the entries.
func TestFailedSyncStopsHost(t *testing.T) {
	for _, role := range []string{"Leader", "Follower"} {
		t.Run(role, func(t *testing.T) {
			c := newCluster(t, 3, 1)
			var failing atomic.Pointer[member]
			for _, id := range c.ids {
				m := c.members[id]
				m.disk = errorfs.Wrap(m.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
					if failing.Load() == m && strings.HasSuffix(op.Path, ".log") && op.Kind.ReadOrWrite() == errorfs.OpIsWrite &&
						(op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData || op.Kind == errorfs.OpFileSyncTo) {
						return errors.New("EIO")
					}
					return nil
				}))
				m.start()
			}
			l := c.elect()
			victim := l
			if role == "Follower" {
				victim = c.others(l)[0]
			}
			failing.Store(victim)
			c.isolate(c.others(l)[1]) // so that both other members are needed for a commit
			a := l.propose("a=1")[0]
			c.settle()
			require.ErrorContains(t, victim.host.Err(), "EIO")
			if role == "Leader" {
				require.ErrorIs(t, a.err, ErrUncertain)
			} else {
				require.Zero(t, a.n, "the follower did not acknowledge")
			}
			c.heal()
			c.tick(40)
			c.put(c.elect(c.others(victim)...), "a=2")
			failing.Store(nil)
			victim.crash()
			victim.start()
			c.tick(40)
			require.Equal(t, c.leader().machine.Log, victim.machine.Log)
		})
	}
}

// TestRestart checks that members that were stopped or crashed continue from their logs, without loss of a proposal.
func TestRestart(t *testing.T) {
	c := startCluster(t, 3, 1)
	var all []string
	for i := range 30 {
		m := c.members[c.ids[i%3]]
		p := fmt.Sprintf("a=%d", i)
		if i%2 == 0 {
			m.crash()
		} else {
			m.stop()
		}
		c.put(c.elect(), p)
		all = append(all, p)
		m.start()
		c.elect()
	}
	c.converge(all...)
	for _, m := range c.members { // all members at the same time
		m.crash()
	}
	for _, id := range c.ids {
		c.members[id].start()
	}
	c.put(c.elect(), "b=1")
	c.converge(append(all, "b=1")...)
}

// TestUnknownEntriesStopHost checks that an entry of an unknown version stops the host. If only some members could
// apply it, their states would differ.
func TestUnknownEntriesStopHost(t *testing.T) {
	change, err := proto.Marshal(&raftpb.ConfChangeV2{Context: []byte{9}, Changes: []*raftpb.ConfChangeSingle{
		{Type: raftpb.ConfChangeAddLearnerNode.Enum(), NodeId: new(uint64(9))},
	}})
	require.NoError(t, err)
	for want, ent := range map[string]*raftpb.Entry{
		"has version 9":       {Data: append([]byte{9}, make([]byte, 16)...)},
		"is malformed":        {Data: []byte{1}},
		"changes the members": {Type: raftpb.EntryConfChangeV2.Enum(), Data: change},
	} {
		c := newCluster(t, 1, 1)
		m := c.members[1]
		m.start()
		c.settle()
		require.NoError(t, m.group.node.Step(&raftpb.Message{Type: raftpb.MsgProp.Enum(), From: &m.id, Entries: []*raftpb.Entry{ent}}))
		m.host.schedule(m.group)
		require.ErrorContains(t, m.host.Process(), want)
	}
}

// TestRaftPanicStopsHost checks that a panic of raft stops the host and returns an error, but does not end the process.
func TestRaftPanicStopsHost(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	f := c.others(l)[0]
	err := f.host.Step(message.Envelope{From: l.id, To: f.id, FromDirID: l.host.dirIDs.own, Kind: message.KindHeartbeats, Heartbeats: []message.Heartbeat{
		{Group: testGroup, Term: l.group.term, Commit: 999},
	}})
	require.ErrorContains(t, err, "tocommit(999) is out of range")
	require.ErrorContains(t, f.host.Process(), "tocommit(999) is out of range")
}

// TestGroupsShareTheLog checks that a write of five groups needs one fsync, and that a proposal is applied in its own
// group only.
func TestGroupsShareTheLog(t *testing.T) {
	c := newCluster(t, 1, 1)
	m := c.members[1]
	var syncs atomic.Int64
	m.disk = errorfs.Wrap(m.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if strings.HasSuffix(op.Path, ".log") && (op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData) {
			syncs.Add(1)
		}
		return nil
	}))
	m.start()
	var machines []*testMachine
	for id := range uint64(5) {
		machine, err := openTestMachine(m.fs, fmt.Sprintf("/state%d", id))
		require.NoError(t, err)
		_, err = m.host.AddGroup(GroupOptions{ID: 20 - id, Machine: machine})
		require.NoError(t, err)
		machines = append(machines, machine)
	}
	c.settle()
	require.True(t, slices.IsSortedFunc(m.host.groups, func(a, b *Group) int { return int(a.id) - int(b.id) }))
	before := syncs.Load()
	done := 0
	for id := range uint64(5) {
		m.host.Group(20-id).Propose([16]byte{}, []byte(fmt.Sprintf("a=%d", id)), func(_ Result, err error) {
			require.NoError(t, err)
			done++
		})
	}
	c.settle()
	require.Equal(t, 5, done)
	require.Equal(t, before+1, syncs.Load())
	for i, machine := range machines {
		require.Equal(t, []string{fmt.Sprintf("a=%d", i)}, machine.Log)
	}
}

// TestMessagesSentBeforeTheSync checks what a crash would leave on the disk at each sent message. A leader must send
// some appends before its fsync; acknowledgements, votes and vote requests must be sent after it.
func TestMessagesSentBeforeTheSync(t *testing.T) {
	c := newCluster(t, 3, 1)
	kinds := map[raftpb.MessageType]int{}
	early := 0
	check := func(m *member, e message.Envelope) {
		if e.Kind != message.KindRaft || !m.up {
			return
		}
		typ, term := e.Raft.GetType(), e.Raft.GetTerm()
		kinds[typ]++
		_, disk, _ := openTestLogAt(t, m.fs.CrashClone(vfs.CrashCloneCfg{}), "/consensus/log", testGroup)
		switch typ {
		case raftpb.MsgAppResp:
			require.GreaterOrEqual(t, disk.Last().Index, e.Raft.GetIndex())
			require.GreaterOrEqual(t, disk.HardState().GetTerm(), term)
		case raftpb.MsgVote:
			require.GreaterOrEqual(t, disk.HardState().GetTerm(), term)
			require.Equal(t, m.id, disk.HardState().GetVote())
		case raftpb.MsgVoteResp:
			require.GreaterOrEqual(t, disk.HardState().GetTerm(), term)
			if !e.Raft.GetReject() {
				require.Equal(t, e.To, disk.HardState().GetVote())
			}
		case raftpb.MsgApp:
			require.GreaterOrEqual(t, disk.HardState().GetTerm(), term, "a leader's term is synced before it sends entries")
			if n := len(e.Raft.Entries); n > 0 && disk.Last().Index < e.Raft.Entries[n-1].GetIndex() {
				early++
			}
		}
	}
	for _, id := range c.ids {
		c.members[id].onSend = check
		c.members[id].start()
	}
	l := c.elect()
	c.put(l, "a=1")
	l.group.TransferLeader(0, func(error) {})
	c.settle()
	for _, typ := range []raftpb.MessageType{raftpb.MsgAppResp, raftpb.MsgVote, raftpb.MsgVoteResp, raftpb.MsgApp} {
		require.Positive(t, kinds[typ], typ)
	}
	require.Positive(t, early)
}

// TestReplay runs a random schedule twice for each seed. Both runs must send the same bytes, and no acknowledged
// proposal may be lost.
func TestReplay(t *testing.T) {
	run := func(seed byte) (string, []string) {
		var trace bytes.Buffer
		c := newCluster(t, 3, seed)
		c.trace = &trace
		c.limits.TailEntries = 5
		for _, id := range c.ids {
			c.members[id].start()
		}
		rng := mathrand.New(mathrand.NewChaCha8([32]byte{seed, 1}))
		done := 0
		for i := range 150 {
			switch rng.IntN(12) {
			case 0:
				if m := c.members[c.ids[rng.IntN(3)]]; m.up {
					m.crash()
				}
			case 1, 2:
				for _, id := range c.ids {
					if m := c.members[id]; !m.up {
						m.start()
						break
					}
				}
			case 3:
				c.isolate(c.members[c.ids[rng.IntN(3)]])
			case 4, 5:
				c.heal()
			}
			for _, id := range c.ids {
				if m := c.members[id]; m.up {
					m.group.Propose([16]byte{byte(i)}, []byte(fmt.Sprintf("k=%d", i)), func(_ Result, err error) {
						if err == nil {
							done++
						}
					})
					m.group.ReadIndex(func(uint64, error) {})
				}
			}
			c.tick(1 + rng.IntN(4))
		}
		c.heal()
		for _, id := range c.ids {
			if m := c.members[id]; !m.up {
				m.start()
			}
		}
		c.elect()
		c.tick(20)
		for _, id := range c.ids {
			require.Equal(t, c.members[1].machine.Log, c.members[id].machine.Log)
		}
		require.GreaterOrEqual(t, len(c.members[1].machine.Log), done, "an acknowledged proposal is lost")
		require.Greater(t, done, 10)
		return trace.String(), c.members[1].machine.Log
	}
	for seed := range byte(5) {
		trace1, log1 := run(seed)
		trace2, log2 := run(seed)
		require.Equal(t, log1, log2)
		require.True(t, trace1 == trace2, "seed %d: the traces differ", seed)
	}
}

// TestUnreadableLogStopsHost checks that a read error of the log stops the host, but does not end the process.
func TestUnreadableLogStopsHost(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.limits.CacheBytes = 100
	for _, id := range c.ids {
		c.members[id].start()
	}
	l := c.elect()
	slow := c.others(l)[0]
	c.isolate(slow)
	c.put(l, "a=1", "a=2", "a=3", "a=4", "a=5", "a=6")
	b := l.host.engine.NewBatch()
	require.NoError(t, b.Delete(logKey(testGroup, 'l', 3), nil))
	require.NoError(t, l.host.engine.Commit(b))
	c.heal()
	c.tick(5)
	require.ErrorContains(t, l.host.Err(), "entry 3 is missing")
	require.Equal(t, "Leader", l.group.Status().Role, "the stopped host does not change its role")
	c.put(c.elect(c.others(l)...), "b=1")
}

// TestReportUnreachable counts the appends that a leader sends while no follower responds. It must send all of them to
// a follower that it considers reachable, and only one to a follower that was reported as unreachable.
func TestReportUnreachable(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	lost, reachable := c.others(l)[0], c.others(l)[1]
	c.put(l, "a=1")
	require.NoError(t, l.host.ReportUnreachable(lost.id))
	require.NoError(t, l.host.ReportUnreachable(99), "a report about an unknown member is ignored")

	appends := map[uint64]int{}
	l.onSend = func(_ *member, e message.Envelope) {
		if e.Kind == message.KindRaft && e.Raft.GetType() == raftpb.MsgApp && len(e.Raft.GetEntries()) > 0 {
			appends[e.To]++
		}
	}
	c.frozen = true
	for _, p := range []string{"a=2", "a=3", "a=4"} {
		l.propose(p)
		c.settle()
	}
	require.Equal(t, map[uint64]int{lost.id: 1, reachable.id: 3}, appends)
	require.NotEqual(t, lost.id, l.group.mostCurrentVoter(), "leadership is not transferred to an unreachable member")

	c.frozen = false
	c.converge("a=1", "a=2", "a=3", "a=4")
	clear(appends)
	c.frozen = true
	for _, p := range []string{"a=5", "a=6"} {
		l.propose(p)
		c.settle()
	}
	require.Equal(t, map[uint64]int{lost.id: 2, reachable.id: 2}, appends, "after a response, entries are sent to the member without waiting again")
}
