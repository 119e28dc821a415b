package consensus

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// cluster is a set of members and the network between them. The test drives it: nothing happens except by the test's
// calls, and the same calls have the same effect.
type cluster struct {
	t       testing.TB
	ids     []uint64
	members map[uint64]*member
	net     []packet
	drop    func(message.Envelope) bool // loses the envelopes for which it returns true
	seed    *mathrand.ChaCha8
	limits  Limits
	first   []uint64 // the first configuration; nil means ids
	trace   io.Writer
	forward bool
	groups  int  // number of groups besides testGroup
	frozen  bool // whether packets are not delivered
}

type packet struct {
	b    []byte
	dir  string // the directory with a snapshot's files; "" for other packets
	from *member
}

// member is one host with its disk. It implements the host's Transport.
type member struct {
	c       *cluster
	id      uint64
	fs      *vfs.MemFS
	disk    vfs.FS // fs, or a file system that wraps it
	up      bool
	joins   bool // is not in the first configuration (Options.Join)
	host    *Host
	group   *Group
	machine *testMachine
	leads   []Leadership
	logged  bytes.Buffer
	arrived int
	onSend  func(*member, message.Envelope)
}

const testGroup = 7

// newCluster returns a cluster of members 1 to n with empty disks, not started. seed determines all random numbers.
func newCluster(t testing.TB, n int, seed byte) *cluster {
	c := &cluster{t: t, members: map[uint64]*member{}, seed: mathrand.NewChaCha8([32]byte{seed}), trace: io.Discard}
	old := rand.Reader
	rand.Reader = c.seed // source of raft's election timeouts
	for id := range uint64(n) {
		c.ids = append(c.ids, id+1)
		c.members[id+1] = &member{c: c, id: id + 1, fs: vfs.NewCrashableMem()}
	}
	t.Cleanup(func() {
		for _, m := range c.members {
			m.stop()
		}
		rand.Reader = old
	})
	return c
}

// startCluster returns a running cluster of n members with a leader.
func startCluster(t testing.TB, n int, seed byte) *cluster {
	c := newCluster(t, n, seed)
	for _, id := range c.ids {
		c.members[id].start()
	}
	c.elect()
	return c
}

func (m *member) Send(e message.Envelope) {
	if m.onSend != nil {
		m.onSend(m, e)
	}
	b, err := e.AppendTo(nil)
	require.NoError(m.c.t, err)
	m.c.net = append(m.c.net, packet{b: b, from: m})
}

func (m *member) SendSnapshot(e message.Envelope, dir string) {
	b, err := e.AppendTo(nil)
	require.NoError(m.c.t, err)
	m.c.net = append(m.c.net, packet{b: b, dir: dir, from: m})
}

func (m *member) start() { require.NoError(m.c.t, m.tryStart()) }

func (m *member) tryStart() error {
	if m.disk == nil {
		m.disk = m.fs
	}
	machine, err := openTestMachine(m.disk, "/state")
	if err != nil {
		return err
	}
	h, err := Open(Options{
		ID: m.id, Members: m.members(), Join: m.joins, Dir: "/consensus", FS: m.disk, Transport: m, Rand: m.c.seed, QuietLog: true,
		Log:      slog.New(slog.NewTextHandler(&m.logged, nil)),
		OnLeader: func(l Leadership) { m.leads = append(m.leads, l) },
		Limits:   m.c.limits,
	})
	if err != nil {
		return err
	}
	g, err := h.AddGroup(GroupOptions{ID: testGroup, Name: "test", Machine: machine, Forward: m.c.forward})
	if err != nil {
		_ = h.Close()
		return err
	}
	for i := range m.c.groups {
		if _, err := h.AddGroup(GroupOptions{ID: testGroup + 1 + uint64(i), Name: "more", Machine: &countingMachine{}}); err != nil {
			return errors.Join(err, h.Close())
		}
	}
	m.host, m.group, m.machine, m.up = h, g, machine, true
	return nil
}

// members returns the member's Options.Members: none if it joins, otherwise the first configuration.
func (m *member) members() []uint64 {
	switch {
	case m.joins:
		return nil
	case m.c.first != nil:
		return m.c.first
	}
	return m.c.ids
}

// stop closes the member's host, if it runs.
func (m *member) stop() {
	if m.up {
		m.up = false
		_ = m.host.Close()
	}
}

// crash ends the member. Its disk then has only the synced data.
func (m *member) crash() { m.crashTo(m.fs.CrashClone(vfs.CrashCloneCfg{})) }

func (m *member) crashTo(fs *vfs.MemFS) {
	m.stop()
	m.fs, m.disk = fs, nil
}

// wipe ends the member and replaces its disk by an empty one.
func (m *member) wipe() { m.crashTo(vfs.NewCrashableMem()) }

// settle calls Process on the hosts and delivers packets until there is nothing left to do.
func (c *cluster) settle() {
	for i := 0; ; i++ {
		require.Less(c.t, i, 10_000, "the members still have work to do after 10,000 rounds")
		idle := true
		for _, id := range c.ids {
			m := c.members[id]
			for m.up && !m.host.Idle() {
				idle = false
				if err := m.host.Process(); err != nil {
					fmt.Fprintf(c.trace, "%d: %v\n", id, err)
				}
			}
		}
		if idle && (len(c.net) == 0 || c.frozen) {
			return
		}
		if !c.frozen {
			c.deliver()
		}
	}
}

// deliver delivers all packets that are on the network now.
func (c *cluster) deliver() {
	net := c.net
	c.net = nil
	for _, p := range net {
		c.deliverOne(p)
	}
}

func (c *cluster) deliverOne(p packet) {
	e, err := message.Parse(p.b)
	require.NoError(c.t, err)
	to := c.members[e.To]
	lost := to == nil || !to.up || c.drop != nil && c.drop(e)
	fmt.Fprintf(c.trace, "%d->%d %x %v\n", e.From, e.To, p.b, lost)
	if p.dir == "" {
		if !lost {
			_ = to.host.Step(e) // a test that needs the host to run checks Host.Err
		}
		return
	}
	if !lost {
		to.arrived++
		dir := to.fs.PathJoin(to.host.SnapshotDir(), fmt.Sprintf("in-%d", to.arrived))
		require.NoError(c.t, to.fs.MkdirAll(dir, 0o700))
		c.copyFiles(p.from.fs, p.dir, to.fs, dir)
		_ = to.host.StepSnapshot(e, dir) // a test that needs the host to run checks Host.Err
	}
	if p.from.up {
		_ = p.from.host.ReportSnapshot(e.Group, e.To, !lost) // a test that needs the host to run checks Host.Err
	}
}

func (c *cluster) copyFiles(from vfs.FS, fromDir string, to vfs.FS, toDir string) {
	names, err := from.List(fromDir)
	require.NoError(c.t, err)
	for _, name := range names {
		in, err := from.Open(from.PathJoin(fromDir, name))
		require.NoError(c.t, err)
		out, err := to.Create(to.PathJoin(toDir, name), vfs.WriteCategoryUnspecified)
		require.NoError(c.t, err)
		_, err = io.Copy(out, in)
		require.NoError(c.t, err)
		require.NoError(c.t, in.Close())
		require.NoError(c.t, out.Close())
	}
}

// tick calls Tick on every running host n times, and settles after each time.
func (c *cluster) tick(n int) {
	for range n {
		for _, id := range c.ids {
			if m := c.members[id]; m.up {
				_ = m.host.Tick() // a test that needs the host to run checks Host.Err
			}
		}
		c.settle()
	}
}

// elect ticks until the running members, or only those in among, agree on a leader that has committed an entry of its
// own term, and returns it. The test fails after 200 ticks.
func (c *cluster) elect(among ...*member) *member {
	c.settle()
	for range 200 {
		if m := c.leader(among...); m != nil {
			return m
		}
		c.tick(1)
	}
	require.Fail(c.t, "no leader", "%s", c.state())
	return nil
}

// leader returns the leader that the running members, or only those in among, agree on and that has committed an entry
// of its own term; nil if there is none.
func (c *cluster) leader(among ...*member) *member {
	if len(among) == 0 {
		for _, id := range c.ids {
			if m := c.members[id]; m.up && m.host.Err() == nil && m.host.dirIDs.vouched {
				among = append(among, m)
			}
		}
	}
	var lead *member
	for _, m := range among {
		l := c.members[m.group.leader]
		if l == nil || !slices.Contains(among, l) || lead != nil && l != lead || !l.up || l.group.applied.Term != m.group.term {
			return nil
		}
		lead = l
	}
	return lead
}

// follower returns a running member that does not lead, nil if there is none.
func (c *cluster) follower() *member {
	for _, id := range c.ids {
		if m := c.members[id]; m.up && m != c.leader() {
			return m
		}
	}
	return nil
}

// others returns all members except m.
func (c *cluster) others(m *member) []*member {
	var out []*member
	for _, id := range c.ids {
		if id != m.id {
			out = append(out, c.members[id])
		}
	}
	return out
}

// isolate loses all packets from and to the members until heal is called.
func (c *cluster) isolate(ms ...*member) {
	c.drop = func(e message.Envelope) bool {
		return slices.ContainsFunc(ms, func(m *member) bool { return m.id == e.From || m.id == e.To })
	}
}

func (c *cluster) heal() { c.drop = nil }

// answer has the number of calls of a callback, and the arguments of the last call.
type answer struct {
	n      int
	result Result
	err    error
}

// propose makes a proposal for each element of data, with the first 16 bytes of data as its ID. It does not call
// Process.
func (m *member) propose(data ...string) []*answer {
	var out []*answer
	for _, d := range data {
		a := &answer{}
		out = append(out, a)
		var id [16]byte
		copy(id[:], d)
		m.group.Propose(id, []byte(d), func(r Result, err error) {
			a.n++
			a.result, a.err = r, err
		})
	}
	return out
}

// put makes proposals and requires that each succeeds once.
func (c *cluster) put(m *member, data ...string) {
	as := m.propose(data...)
	c.settle()
	for i, a := range as {
		require.NoError(c.t, a.err, data[i])
		require.Equal(c.t, 1, a.n, data[i])
	}
}

func (m *member) read() (*Read, *answer) {
	a := &answer{}
	return m.group.ReadIndex(func(index uint64, err error) {
		a.n++
		a.result.Index, a.err = index, err
	}), a
}

// converge ticks five times and requires that the state machines of all members have applied the proposals want.
func (c *cluster) converge(want ...string) {
	c.t.Helper()
	c.tick(5)
	for _, id := range c.ids {
		require.Equal(c.t, want, c.members[id].machine.Log, "member %d", id)
	}
}

func (c *cluster) state() string {
	var b strings.Builder
	for _, id := range c.ids {
		if m := c.members[id]; m.up {
			fmt.Fprintf(&b, "%d: %+v\n", id, m.host.Status())
		} else {
			fmt.Fprintf(&b, "%d: down\n", id)
		}
	}
	return b.String()
}

// count returns how many packets with a raft message of a type are on the network.
func (c *cluster) count(typ raftpb.MessageType) int {
	n := 0
	for _, p := range c.net {
		if e, err := message.Parse(p.b); err == nil && e.Kind == message.KindRaft && e.Raft.GetType() == typ {
			n++
		}
	}
	return n
}

func countLines(s, part string) int { return strings.Count(s, part) }

// openTestLogAt opens the log of a group in dir. The third result reports that the log did not exist.
func openTestLogAt(t testing.TB, fs vfs.FS, dir string, group uint64) (*raftlog.Engine, *raftlog.Log, bool) {
	e, err := raftlog.OpenEngine(fs, dir, true, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	l, fresh, err := raftlog.Open(e, group, nil, 1000)
	require.NoError(t, err)
	return e, l, fresh
}
