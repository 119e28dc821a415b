package consensus

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
)

// proposeAny makes a proposal without an ID for each element of data. The answers are filled in when the callbacks are
// called.
func (m *member) proposeAny(data ...string) []*answer {
	var out []*answer
	for _, d := range data {
		a := &answer{}
		out = append(out, a)
		m.group.Propose([16]byte{}, []byte(d), func(r Result, err error) {
			a.n++
			a.result, a.err = r, err
		})
	}
	return out
}

// TestBatch checks that proposals without IDs that wait at the same time share one entry, that each gets its own
// result, and that all are applied again after a crash.
func TestBatch(t *testing.T) {
	c := startForwarding(t, 3, 1)
	f := c.follower()
	c.frozen = true
	as := append(f.proposeAny("a=1", "a=2"), f.propose("a=3")...)
	as = append(as, f.proposeAny("a=4")...)
	c.settle()
	sent := c.envelopes(message.KindForward)
	require.Len(t, sent, 1)
	require.Len(t, sent[0].Payloads, 3, "a proposal with an ID is not put into a batch, and the order is kept")
	require.Equal(t, 3, f.host.Status().Groups[0].Proposals)
	c.frozen = false
	c.settle()
	first := as[0].result.Index
	for i, index := range []uint64{first, first, first + 1, first + 2} {
		was := ""
		if i > 0 {
			was = fmt.Sprint(i)
		}
		require.Equal(t, answer{1, Result{index, f.group.term, fmt.Sprintf("a was %q", was)}, nil}, *as[i])
	}
	require.Zero(t, f.host.Status().Groups[0].Proposals)
	require.Equal(t, 4, f.machine.wanted)
	c.converge("a=1", "a=2", "a=3", "a=4")
	// After a crash the proposals are applied again from the log.
	f.crash()
	f.start()
	c.tick(3)
	require.Equal(t, []string{"a=1", "a=2", "a=3", "a=4"}, f.machine.Log)
}

// TestBatchBounds checks that a batch has at most message.MaxBatchBytes, and that its proposals fail at their own
// deadline and not at that of an earlier batch.
func TestBatchBounds(t *testing.T) {
	c := startForwarding(t, 3, 1)
	l := c.leader()
	big := strings.Repeat("x", message.MaxBatchBytes/3)
	c.frozen = true // so that nothing is committed meanwhile
	before := l.storage().Last().Index
	l.proposeAny("a="+big, "b="+big, "c="+big, "d=1")
	c.settle()
	require.Equal(t, before+2, l.storage().Last().Index, "each entry has two of the four proposals")
	l.proposeAny("e=" + big + big + big + big)
	c.settle()
	require.Equal(t, before+3, l.storage().Last().Index, "a large proposal has its own entry")
	c.frozen = false
	c.settle()
	require.Len(t, l.machine.Log, 5)

	f := c.follower()
	c.isolate(f)
	c.tick(25) // until the follower does not know a leader any more
	early := f.proposeAny("f=1")[0]
	c.tick(5)
	late := f.proposeAny("f=2")[0]
	for early.n == 0 {
		c.tick(1)
	}
	require.ErrorIs(t, early.err, ErrNoLeader)
	require.Zero(t, late.n, "the later proposal has its own, later deadline")
	c.heal()
	c.tick(30)
	require.NoError(t, late.err)
}

func (m *member) storage() *raftlog.Log { return m.group.storage }

// TestBatchIsProposedAgainInTheNextTerm checks that a batch that an isolated leader could not commit is forwarded to
// the next leader and applied once.
func TestBatchIsProposedAgainInTheNextTerm(t *testing.T) {
	c := startForwarding(t, 3, 1)
	l := c.leader()
	f := c.others(l)[0]
	c.isolate(l)
	own, far := l.proposeAny("a=1", "a=2"), f.proposeAny("a=3", "a=4")
	c.settle()
	next := c.elect(c.others(l)...)
	next.proposeAny("a=5")
	c.settle()
	for _, a := range far {
		require.Equal(t, 1, a.n)
		require.NoError(t, a.err)
	}
	c.heal()
	c.tick(5)
	for _, a := range own {
		require.Equal(t, 1, a.n)
		require.NoError(t, a.err)
	}
	for _, m := range c.members {
		require.ElementsMatch(t, []string{"a=1", "a=2", "a=3", "a=4", "a=5"}, m.machine.Log, "each proposal is applied once")
	}
}

// TestBatchIsCompressed checks that a batch of similar proposals takes less space in the log than its data.
func TestBatchIsCompressed(t *testing.T) {
	c := startForwarding(t, 3, 1)
	f := c.follower()
	var want []string
	for i := range 50 {
		want = append(want, fmt.Sprintf("%d=%s", i, strings.Repeat("like the others ", 20)))
	}
	f.proposeAny(want...)
	c.converge(want...)
	for _, m := range c.members {
		require.Less(t, m.group.Status().LogBytes, uint64(2000), "the proposals have 16,000 bytes")
	}
}

// TestBatchesAreDecodedWithinTheLimit checks that entries.open decodes compressed batches one by one until the limit of
// uncompressed bytes is reached.
func TestBatchesAreDecodedWithinTheLimit(t *testing.T) {
	same := strings.Repeat("x", 1000)
	data := message.NewBatch([16]byte{9}, 0)
	for range 3 {
		data = message.AppendToBatch(data, []byte(same))
	}
	data = message.CloseBatch(data)
	require.Less(t, len(data), 1000, "the batch is compressed")
	batch := &raftpb.Entry{Index: new(uint64(5)), Term: new(uint64(2)), Data: data}
	for limit, want := range map[uint64]int{1: 1, 3000: 1, 3001: 2, 6001: 3} {
		e := &entries{raw: []*raftpb.Entry{batch, batch, batch}, claimed: make([]*proposal, 3)}
		last, err := e.open(0, limit)
		require.NoError(t, err)
		require.Equal(t, want, last, "limit %d", limit)
		require.Len(t, e.list, 3*want)
	}
}

// TestDecodeEntries checks that the Entry of a single proposal has the proposal's ID, and that the Entries of a batch
// have none.
func TestDecodeEntries(t *testing.T) {
	id := [16]byte{7}
	ent := &raftpb.Entry{Index: new(uint64(5)), Term: new(uint64(2)), Data: message.NewEntry(id, []byte("a=1"))}
	list, err := decodeEntries(nil, ent)
	require.NoError(t, err)
	require.Equal(t, []Entry{{Index: 5, Term: 2, ID: id, Data: []byte("a=1")}}, list)
	ent.Data = message.AppendToBatch(message.AppendToBatch(message.NewBatch(id, 0), []byte("a=1")), []byte("b"))
	list, err = decodeEntries(list, ent)
	require.NoError(t, err)
	require.Equal(t, []Entry{{Index: 5, Term: 2, Data: []byte("a=1")}, {Index: 5, Term: 2, Data: []byte("b")}}, list[1:])
	ent.Data = ent.Data[:3]
	_, err = decodeEntries(nil, ent)
	require.ErrorIs(t, err, message.ErrMalformed)
}
