package raftlog

import (
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

func openTestLog(t testing.TB, fs vfs.FS, cache int) (*Engine, *Log, bool) {
	e, err := OpenEngine(fs, "/log", true, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	l, fresh, err := Open(e, 1, nil, cache)
	require.NoError(t, err)
	return e, l, fresh
}

func entry(index, term uint64, data string) *raftpb.Entry {
	ent := &raftpb.Entry{Type: raftpb.EntryNormal.Enum(), Index: &index, Term: &term}
	if data != "" {
		ent.Data = []byte(data)
	}
	return ent
}

// TestLog runs the commands in testdata/log, and compares the content of the log after each. `crash` loses all unsynced
// data.
func TestLog(t *testing.T) {
	fs := vfs.NewCrashableMem()
	e, l, _ := openTestLog(t, fs, 1000)
	defer func() { require.NoError(t, e.Close()) }()
	batch := e.db.NewBatch()
	show := func() string {
		var b strings.Builder
		fmt.Fprintf(&b, "begin %d/%d last %d/%d", l.begin.Index, l.begin.Term, l.last.Index, l.last.Term)
		if l.stored != nil {
			fmt.Fprintf(&b, " term %d vote %d commit %d", l.stored.GetTerm(), l.stored.GetVote(), l.stored.GetCommit())
		}
		for i := l.begin.Index + 1; i <= l.last.Index; i++ {
			ents, err := l.Entries(i, i+1, 1)
			if err != nil {
				return err.Error()
			}
			fmt.Fprintf(&b, "\n%d/%d %s", i, ents[0].GetTerm(), ents[0].Data)
		}
		return b.String()
	}
	datadriven.RunTest(t, "testdata/log", func(t *testing.T, d *datadriven.TestData) string {
		var err error
		num := func(key string) uint64 {
			var s string
			if !d.HasArg(key) {
				return 0
			}
			d.ScanArgs(t, key, &s)
			n, err := strconv.ParseUint(s, 10, 64)
			require.NoError(t, err)
			return n
		}
		switch d.Cmd {
		case "append": // term=…; input: the data of the entries, from index on
			var ents []*raftpb.Entry
			for i, line := range strings.Fields(d.Input) {
				ents = append(ents, entry(num("index")+uint64(i), num("term"), line))
			}
			err = l.Write(batch, nil, ents)
		case "hard":
			err = l.Write(batch, &raftpb.HardState{Term: new(num("term")), Vote: new(num("vote")), Commit: new(num("commit"))}, nil)
		case "cut":
			term, err := l.Term(num("to"))
			require.NoError(t, err)
			l.cut = raftconf.Position{Index: num("to"), Term: term}
			return "with the next batch"
		case "reset":
			err = l.Reset(batch, raftconf.Position{Index: num("index"), Term: num("term")}, raftconf.Position{Index: num("index"), Term: num("term")}, l.members)
		case "commit":
			if batch.Empty() {
				return "nothing to write"
			}
			err = e.Commit(batch)
			require.NoError(t, batch.Close())
			batch = e.db.NewBatch()
		case "crash", "reopen":
			require.NoError(t, batch.Close())
			clone := fs.CrashClone(vfs.CrashCloneCfg{})
			require.NoError(t, e.Close())
			if d.Cmd == "crash" {
				fs = clone
			}
			e, l, _ = openTestLog(t, fs, 1000)
			batch = e.db.NewBatch()
		case "show":
		default:
			d.Fatalf(t, "unknown command %s", d.Cmd)
		}
		if err != nil {
			return err.Error()
		}
		return show()
	})
	require.NoError(t, batch.Close())
}

// TestLogAgainstModel makes random changes to a log and to raft's MemoryStorage. Both must return the same entries and
// terms.
func TestLogAgainstModel(t *testing.T) {
	for seed := range byte(20) {
		rng := mathrand.New(mathrand.NewChaCha8([32]byte{seed}))
		fs := vfs.NewMem()
		e, l, _ := openTestLog(t, fs, 400)
		model := raft.NewMemoryStorage()
		term := uint64(1)
		for range 60 {
			first, _ := model.FirstIndex()
			last, _ := model.LastIndex()
			b := e.db.NewBatch()
			switch op := rng.IntN(10); {
			case op < 6: // append entries, or replace some
				term += rng.Uint64N(2)
				at := last + 1 - rng.Uint64N(min(last+2-first, 4))
				var ents []*raftpb.Entry
				for i := range 1 + rng.Uint64N(5) {
					ents = append(ents, entry(at+i, term, strings.Repeat("x", rng.IntN(60))))
				}
				hard := &raftpb.HardState{Term: &term, Vote: new(uint64(1)), Commit: new(at - 1)}
				require.NoError(t, l.Write(b, hard, ents))
				require.NoError(t, model.Append(ents))
			case op < 8 && last >= first:
				to := first + rng.Uint64N(last-first+1)
				logTerm, err := l.Term(to)
				require.NoError(t, err)
				require.NoError(t, l.truncate(b, raftconf.Position{Index: to, Term: logTerm}))
				require.NoError(t, model.Compact(to))
			case op < 9:
				p := raftconf.Position{Index: last + 1 + rng.Uint64N(5), Term: term}
				require.NoError(t, l.Reset(b, p, p, l.members))
				require.NoError(t, model.ApplySnapshot(&raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{Index: &p.Index, Term: &p.Term, ConfState: l.members.Conf}}))
			}
			if !b.Empty() {
				require.NoError(t, e.Commit(b))
			}
			require.NoError(t, b.Close())
			if rng.IntN(10) == 0 {
				require.NoError(t, e.Close())
				e, l, _ = openTestLog(t, fs, 400)
			}
			compareLogs(t, rng, model, l)
		}
		require.NoError(t, e.Close())
	}
}

func compareLogs(t *testing.T, rng *mathrand.Rand, model *raft.MemoryStorage, l *Log) {
	first, _ := model.FirstIndex()
	last, _ := model.LastIndex()
	require.Equal(t, first, l.begin.Index+1)
	require.Equal(t, last, l.last.Index)
	bytes := 0
	for i := max(first, 2) - 2; i <= last+1; i++ {
		want, wantErr := model.Term(i)
		got, err := l.Term(i)
		require.Equal(t, want, got, "term of %d", i)
		require.Equal(t, wantErr, err)
	}
	if last >= first {
		lo := first + rng.Uint64N(last-first+1)
		hi := lo + 1 + rng.Uint64N(last-lo+1)
		all, err := model.Entries(lo, hi, ^uint64(0))
		require.NoError(t, err)
		limit := rng.Uint64N(600)
		got, err := l.Entries(lo, hi, limit)
		require.NoError(t, err)
		require.NotEmpty(t, got)
		size := 0
		for i, ent := range got {
			require.True(t, proto.Equal(all[i], ent), "%v %v", all[i], ent)
			size += cost(ent)
		}
		if len(got) > 1 {
			require.LessOrEqual(t, uint64(size), limit)
		}
		if len(got) < len(all) {
			require.Greater(t, uint64(size+cost(all[len(got)])), limit, "Entries has returned fewer entries than the limit permits")
		}
	}
	for i := first; i <= last; i++ {
		ents, err := l.Entries(i, i+1, 0)
		require.NoError(t, err)
		bytes += cost(ents[0])
	}
	_, err := l.Entries(first-1, last+1, 100)
	require.Equal(t, raft.ErrCompacted, err)
	require.InDelta(t, bytes, l.sizes.bytes(), 2*markEvery)
	require.LessOrEqual(t, l.cache.bytes, max(l.cache.limit, 100))
}

func TestSizeMarks(t *testing.T) {
	var s sizeMarks
	for i := range uint64(1000) {
		s.add(i+1, 1000)
	}
	require.Equal(t, uint64(1_000_000), s.bytes())
	require.Zero(t, s.tail(1_000_000))
	require.InDelta(t, 500, s.tail(500_000), markEvery/1000+1)
	require.GreaterOrEqual(t, s.tail(500_000), uint64(500), "the tail has at most the given number of bytes")
	s.truncateTo(s.tail(500_000))
	require.InDelta(t, 500_000, s.bytes(), markEvery+1000)
	s.truncateFrom(800)
	require.InDelta(t, 300_000, s.bytes(), 2*markEvery)
	require.Less(t, len(s.marks), 20)
	for range 100 {
		s.truncateFrom(801)
		for i := range uint64(100) {
			s.add(801+i, 1000)
		}
	}
	require.InDelta(t, 400_000, s.bytes(), 3*markEvery)
}

// TestGapInLog checks that Open returns an error if an entry is missing in the middle of the log.
func TestGapInLog(t *testing.T) {
	fs := vfs.NewMem()
	e, l, _ := openTestLog(t, fs, 1000)
	b := e.db.NewBatch()
	require.NoError(t, l.Write(b, nil, []*raftpb.Entry{entry(1, 1, "a"), entry(2, 1, "b"), entry(3, 1, "c")}))
	require.NoError(t, b.Delete(entryKey(1, 2), nil))
	require.NoError(t, e.Commit(b))
	require.NoError(t, b.Close())
	_, _, err := Open(e, 1, nil, 1000)
	require.ErrorContains(t, err, "entry 2 is missing before 3")
	require.NoError(t, e.Close())
}

func TestLayoutOfAnotherVersion(t *testing.T) {
	fs := vfs.NewMem()
	e, _, _ := openTestLog(t, fs, 1000)
	b := e.db.NewBatch()
	require.NoError(t, b.Set([]byte(keyFormat), []byte{9}, nil))
	require.NoError(t, e.Commit(b))
	require.NoError(t, b.Close())
	require.NoError(t, e.Close())
	_, err := OpenEngine(fs, "/log", true, slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "the log has layout 9, this program knows 2 only")
}
