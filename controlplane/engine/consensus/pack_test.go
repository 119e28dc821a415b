package consensus

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
)

// proposeAny proposes without ids.
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

// What waits at the same time is one entry, and each is answered for itself.
func TestPack(t *testing.T) {
	c := startForwarding(t, 3, 1)
	f := c.follower()
	c.frozen = true
	as := append(f.proposeAny("a=1", "a=2"), f.propose("a=3")...)
	as = append(as, f.proposeAny("a=4")...)
	c.settle()
	sent := c.envelopes(KindForward)
	require.Len(t, sent, 1)
	require.Len(t, sent[0].Payloads, 3, "one with an id is for itself, and order is kept")
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
	// The log gives them back.
	f.crash()
	f.start()
	c.tick(3)
	require.Equal(t, []string{"a=1", "a=2", "a=3", "a=4"}, f.machine.Log)
}

// A pack is bounded, in size and in the time that its proposals may wait.
func TestPackBounds(t *testing.T) {
	c := startForwarding(t, 3, 1)
	l := c.leader()
	big := strings.Repeat("x", packBytes/3)
	c.frozen = true // nothing is committed meanwhile
	before := l.storage().last.index
	l.proposeAny("a="+big, "b="+big, "c="+big, "d=1")
	c.settle()
	require.Equal(t, before+2, l.storage().last.index, "two fit into one, and the other two into the next")
	l.proposeAny("e=" + big + big + big + big)
	c.settle()
	require.Equal(t, before+3, l.storage().last.index, "a large one is alone")
	c.frozen = false
	c.settle()
	require.Len(t, l.machine.Log, 5)

	f := c.follower()
	c.isolate(f)
	c.tick(25) // it knows no leader any more
	early := f.proposeAny("f=1")[0]
	c.tick(5)
	late := f.proposeAny("f=2")[0]
	for early.n == 0 {
		c.tick(1)
	}
	require.ErrorIs(t, early.err, ErrNoLeader)
	require.Zero(t, late.n, "it came later, and waits as long")
	c.heal()
	c.tick(30)
	require.NoError(t, late.err)
}

func (m *member) storage() *groupLog { return m.group.storage }

// A pack that a leader could not commit goes to the next one as it is.
func TestPackSettlesWithTheNextTerm(t *testing.T) {
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
		require.ElementsMatch(t, []string{"a=1", "a=2", "a=3", "a=4", "a=5"}, m.machine.Log, "each once")
	}
}

// packOf is the data of a pack.
func packOf(proposals ...string) []byte {
	b := make([]byte, payloadHeader)
	b[0], b[1] = packVersion, 9
	for _, p := range proposals {
		b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
	}
	return b
}

// dense is the data of a pack that was compressed.
func dense(proposals ...string) []byte {
	p := &proposal{data: packOf(proposals...), parts: make([]asker, len(proposals))}
	p.seal()
	return p.data
}

func TestEntriesOf(t *testing.T) {
	same := strings.Repeat("value", 100)
	single := append([]byte{payloadVersion, 7}, make([]byte, 15)...)
	for _, test := range []struct {
		name string
		data []byte
		want []Entry
		err  error
	}{
		{"one", append(single, "a=1"...), []Entry{{Index: 5, Term: 2, ID: [16]byte{7}, Data: []byte("a=1")}}, nil},
		{"one of nothing", single, []Entry{{Index: 5, Term: 2, ID: [16]byte{7}, Data: []byte{}}}, nil},
		{"a pack", packOf("a=1", "", "b"), []Entry{{Index: 5, Term: 2, Data: []byte("a=1")}, {Index: 5, Term: 2, Data: []byte{}}, {Index: 5, Term: 2, Data: []byte("b")}}, nil},
		{"an empty pack", packOf(), nil, errBroken},
		{"cut", packOf("a=1", "b=1")[:payloadHeader+6], nil, errBroken},
		{"a length without end", append(packOf("a"), 0x80), nil, errBroken},
		{"too long a length", append(packOf("a"), 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1), nil, errBroken},
		{"short", single[:16], nil, errBroken},
		{"compressed", dense("a=1", same, same), []Entry{{Index: 5, Term: 2, Data: []byte("a=1")}, {Index: 5, Term: 2, Data: []byte(same)}, {Index: 5, Term: 2, Data: []byte(same)}}, nil},
		{"compressed and cut", dense("a=1", same, same)[:payloadHeader+20], nil, errBroken},
		{"too large when decompressed", append([]byte{denseVersion}, append(make([]byte, 16), s2.Encode(nil, make([]byte, MaxEnvelopeBytes+1))...)...), nil, errBroken},
		{"another version", append([]byte{4}, make([]byte, 20)...), nil, errVersion},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := entriesOf(nil, &raftpb.Entry{Index: new(uint64(5)), Term: new(uint64(2)), Data: test.data})
			if test.err != nil {
				require.ErrorIs(t, err, test.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.want, got)
		})
	}
}

// What one member lets into the log by forwarding, every member can read.
func FuzzCheckPayload(f *testing.F) {
	f.Add(packOf("a=1", "b=2"))
	f.Add(append([]byte{denseVersion}, append(make([]byte, 16), s2.Encode(nil, packOf("a=1", "a=2")[payloadHeader:])...)...))
	f.Add(append([]byte{payloadVersion}, make([]byte, 20)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		const limit = 10
		if checkPayload(data, limit) != nil {
			return
		}
		list, err := entriesOf(nil, &raftpb.Entry{Index: new(uint64(5)), Term: new(uint64(2)), Data: data})
		require.NoError(t, err)
		require.NotEmpty(t, list)
		for _, e := range list {
			require.LessOrEqual(t, len(e.Data), limit)
		}
	})
}

// What is alike in a pack is in the log once.
func TestPackIsCompressed(t *testing.T) {
	c := startForwarding(t, 3, 1)
	f := c.follower()
	var want []string
	for i := range 50 {
		want = append(want, fmt.Sprintf("%d=%s", i, strings.Repeat("like the others ", 20)))
	}
	f.proposeAny(want...)
	c.converge(want...)
	for _, m := range c.members {
		require.Less(t, m.group.Status().LogBytes, uint64(2000), "of 16,000")
	}
}

// Packs that are small in the log are opened no more at a time than the limit says.
func TestPacksAreOpenedInPieces(t *testing.T) {
	same := strings.Repeat("x", 1000)
	pack := &raftpb.Entry{Index: new(uint64(5)), Term: new(uint64(2)), Data: dense(same, same, same)}
	for limit, want := range map[uint64]int{1: 1, 3000: 1, 3001: 2, 6001: 3} {
		e := &entries{raw: []*raftpb.Entry{pack, pack, pack}, claimed: make([]*proposal, 3)}
		last, err := e.open(0, limit)
		require.NoError(t, err)
		require.Equal(t, want, last, "limit %d", limit)
		require.Len(t, e.list, 3*want)
	}
}
