package mvcc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// TestModel runs an engine with random transactions, compactions, scrubs, flushes, crashes, checkpoints and restores.
// The results, ranges at all readable revisions and the events of watchers must be those of the model.
func TestModel(t *testing.T) {
	for seed := range uint64(24) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { newModelRun(t, seed).run(250) })
	}
}

// TestQuietReplays checks that two engines with Options.Quiet and the same input leave the same files, except for times
// in Pebble's manifests.
func TestQuietReplays(t *testing.T) {
	for seed := range uint64(3) {
		var files [2]map[string]string
		for i := range files {
			r := newModelRun(t, 2*seed)
			r.run(120)
			files[i] = map[string]string{}
			readFiles(t, r.fs, "", files[i])
		}
		require.Greater(t, len(files[0]), 10)
		require.Equal(t, files[0], files[1], "seed %d", seed)
	}
}

func readFiles(t *testing.T, fs vfs.FS, dir string, into map[string]string) {
	names, err := fs.List(cmp.Or(dir, "/"))
	require.NoError(t, err)
	for _, name := range names {
		path := dir + "/" + name
		info, err := fs.Stat(path)
		require.NoError(t, err)
		if info.IsDir() {
			readFiles(t, fs, path, into)
			continue
		}
		f, err := fs.Open(path)
		require.NoError(t, err)
		b, err := io.ReadAll(f)
		require.NoError(t, errors.Join(err, f.Close()))
		if strings.HasPrefix(name, "MANIFEST") {
			b = fmt.Appendf(nil, "%d bytes", len(b))
		}
		into[path] = string(b)
	}
}

// modelRun is one random test: an engine, the model, and the commands and results so far.
type modelRun struct {
	t       *testing.T
	rng     *rand.Rand
	fs      *vfs.MemFS
	e       *Engine
	opts    Options
	m       *model
	log     []command.Command
	results []command.Result
	watches []*modelWatch
	snaps   []*Snapshot
	copies  int
}

// modelWatch is a watcher and the events it has returned.
type modelWatch struct {
	o        watch.Options
	w        *watch.Watcher
	events   []watch.Event
	complete int64
}

func newModelRun(t *testing.T, seed uint64) *modelRun {
	r := &modelRun{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), fs: vfs.NewCrashableMem(), m: newModel(),
		// Memtables and recent events are so small that memtables are flushed, and events are read from disk.
		opts: Options{Quiet: seed%2 == 0, KeyIndex: seed%3 != 0, ValueCacheBytes: int64(seed%4) << 12, MemTableBytes: 256 << 10, RecentBytes: 2000},
	}
	r.open()
	t.Cleanup(func() { require.NoError(t, r.e.Close()) })
	return r
}

func (r *modelRun) open() {
	e, err := Open(r.fs, "data", r.opts)
	require.NoError(r.t, err)
	r.e = e
}

func (r *modelRun) run(steps int) {
	for range steps {
		switch n := r.rng.IntN(100); {
		case n < 45:
			r.apply()
		case n < 60:
			r.checkRange()
		case n < 70:
			r.drain()
		case n < 75:
			r.watch()
		case n < 82:
			_, err := r.e.Scrub(context.Background(), 1+r.rng.IntN(20))
			require.NoError(r.t, err)
		case n < 88:
			p, err := r.e.Flush(context.Background())
			require.NoError(r.t, err)
			require.Equal(r.t, uint64(len(r.log)), p.Index)
		case n < 91:
			r.snaps = append(r.snaps, r.e.Snapshot())
		case n < 97:
			r.crash()
		default:
			r.restore()
		}
	}
	for _, w := range slices.Clone(r.watches) {
		r.drainOne(w)
	}
	r.checkAll()
	r.closeSnapshots()
	r.checkReplay()
}

var modelKeys = []string{"a", "a\x00", "a\x00\xff", "a\x00\x01", "aa", "ab", "b", "b\x00b", "c", "c\xff", "\xff", "\xff\xff"}

func (r *modelRun) key() []byte { return []byte(modelKeys[r.rng.IntN(len(modelKeys))]) }

// span returns a random range, sometimes an empty one.
func (r *modelRun) span() (key, end []byte) {
	switch r.rng.IntN(4) {
	case 0:
		return r.key(), []byte{0}
	case 1:
		k := r.key()
		return k, command.PrefixEnd(k)
	case 2:
		return []byte{0}, []byte{0}
	}
	return r.key(), r.key()
}

// apply applies up to six random commands in one call, and compares the results with the model's.
func (r *modelRun) apply() {
	cmds := make([]command.Command, 1+r.rng.IntN(6))
	want := make([]command.Result, len(cmds))
	for i := range cmds {
		cmds[i], want[i] = r.command()
		r.log = append(r.log, cmds[i])
	}
	r.results = append(r.results, want...)
	got, err := r.e.Apply(cmds)
	require.NoError(r.t, err)
	require.Equal(r.t, want, got)
	require.Equal(r.t, r.m.revision(), r.e.Revision())
	require.Equal(r.t, r.m.floor, r.e.CompactRevision())
	require.Equal(r.t, r.m.time, r.e.LastTime())
	r.checkBeside()
	require.Equal(r.t, int64(len(r.m.states[r.m.revision()])), r.e.Stats().Keys)
}

func (r *modelRun) command() (command.Command, command.Result) {
	c := command.Command{Index: uint64(len(r.log)) + 1, Term: 1 + uint64(len(r.log)/50)}
	switch n := r.rng.IntN(20); {
	case n == 0:
		return c, command.Result{Revision: r.m.revision(), Time: r.m.time}
	case n == 1 && len(r.log) > 0:
		// A command that is proposed twice.
		c.ID, c.Data = r.log[r.rng.IntN(len(r.log))].ID, r.log[r.rng.IntN(len(r.log))].Data
	case n < 4:
		c.Data = command.EncodeCompact(r.m.revision() - int64(r.rng.IntN(30)) + 2)
	case n < 10:
		var err error
		c.Data, err = command.EncodeTxn(r.txn())
		require.NoError(r.t, err)
	default:
		var err error
		c.Data, err = command.EncodeProgram(r.program())
		require.NoError(r.t, err)
		c.WantSteps = r.rng.IntN(3) > 0
	}
	if c.ID == [16]byte{} && r.rng.IntN(2) == 0 {
		c.ID = [16]byte{byte(len(r.log)), byte(len(r.log) >> 8), 1}
	}
	return c, r.model(c)
}

// model applies c to the model.
func (r *modelRun) model(c command.Command) command.Result {
	if len(c.Data) == 0 {
		return command.Result{Revision: r.m.revision(), Time: r.m.time}
	}
	if res, known := r.m.ids[c.ID]; known {
		return res
	}
	var d command.Decoder
	kind, err := d.Decode(c.Data)
	require.NoError(r.t, err)
	var res command.Result
	switch kind {
	case command.KindCompact:
		res = r.m.compact(d.Compact)
	case command.KindProgram:
		res = r.m.program(d.Program)
	default:
		res = r.m.txn(d.Txn)
	}
	steps := res.Steps
	if res.Steps = nil; c.ID != [16]byte{} {
		r.m.ids[c.ID] = res
	}
	if c.WantSteps {
		res.Steps = steps
	}
	return res
}

func (r *modelRun) txn() command.Txn {
	for {
		t := command.Txn{Time: int64(r.rng.IntN(1000))}
		for range r.rng.IntN(3) {
			t.Guards = append(t.Guards, r.guard())
		}
		for range r.rng.IntN(4) {
			switch r.rng.IntN(8) {
			case 0, 1:
				t.Ops = append(t.Ops, command.Delete(r.key()))
			case 2:
				t.Ops = append(t.Ops, command.DeleteRange(r.span()))
			default:
				t.Ops = append(t.Ops, command.Put(r.key(), []byte(fmt.Sprintf("v%d", r.rng.IntN(1000)))))
			}
		}
		if t.Validate() == nil {
			return t
		}
	}
}

// guard returns a random guard, which holds in most cases.
func (r *modelRun) guard() command.Guard {
	g := command.Guard{Key: r.key()}
	if r.rng.IntN(2) == 0 {
		g.Key, g.End = r.span()
	}
	for _, kv := range r.m.scan(g.Key, g.End, r.m.revision()) {
		g.ModRevision = max(g.ModRevision, kv.ModRevision)
		if g.End != nil {
			g.Count++
		}
	}
	switch r.rng.IntN(6) {
	case 0:
		g.ModRevision = int64(r.rng.IntN(int(r.m.revision()) + 1))
	case 1:
		if g.End != nil {
			g.Count = int64(r.rng.IntN(5))
		}
	}
	return g
}

func (r *modelRun) checkRange() {
	s := r.e.Snapshot()
	if len(r.snaps) > 0 && r.rng.IntN(2) == 0 {
		s.Close()
		s = r.snaps[r.rng.IntN(len(r.snaps))]
	} else {
		defer s.Close()
	}
	o := r.rangeOptions()
	o.Key, o.End = r.span()
	if r.rng.IntN(4) == 0 {
		o.Key, o.End = r.key(), nil
	}
	got, err := s.Range(o)
	var compacted *CompactedError
	switch {
	case o.Revision > s.Revision():
		require.ErrorIs(r.t, err, ErrFutureRevision)
	case o.Revision != 0 && o.Revision < s.CompactRevision():
		require.ErrorAs(r.t, err, &compacted)
		require.Equal(r.t, s.CompactRevision(), compacted.CompactRevision)
	default:
		require.NoError(r.t, err)
		require.Equal(r.t, r.expect(o, cmp.Or(o.Revision, s.Revision())), got)
		if o.End == nil && o.Revision == 0 && !o.KeysOnly && !o.CountOnly {
			kv, ok, err := s.Get(o.Key)
			require.NoError(r.t, err)
			require.Equal(r.t, len(got.KVs) == 1, ok)
			if ok {
				require.Equal(r.t, got.KVs[0], kv)
			}
		}
	}
}

func (r *modelRun) rangeOptions() RangeOptions {
	o := RangeOptions{Limit: r.rng.IntN(6), MaxBytes: r.rng.IntN(2) * r.rng.IntN(20), Reverse: r.rng.IntN(2) == 0,
		KeysOnly: r.rng.IntN(4) == 0, WantCount: r.rng.IntN(2) == 0, CountOnly: r.rng.IntN(8) == 0}
	if r.rng.IntN(2) == 0 {
		o.Revision = r.rng.Int64N(r.m.revision() + 2)
	}
	return o
}

// expect returns the result that the model expects for a range.
func (r *modelRun) expect(o RangeOptions, revision int64) RangeResult {
	return expectRange(o, r.m.scan(o.Key, o.End, revision))
}

// expectRange returns the expected result of a range with the options o, if all are the keys in it.
func expectRange(o RangeOptions, all []KV) RangeResult {
	var res RangeResult
	if o.Reverse {
		slices.Reverse(all)
	}
	size := 0
	for _, kv := range all {
		if o.KeysOnly {
			kv.Value = nil
		}
		switch {
		case o.CountOnly:
		case o.Limit > 0 && len(res.KVs) == o.Limit, o.MaxBytes > 0 && size >= o.MaxBytes:
			res.More = true
			if !o.WantCount {
				return res
			}
		default:
			res.KVs = append(res.KVs, kv)
			size += len(kv.Key) + len(kv.Value)
		}
		res.Count++
		res.MaxModRevision = max(res.MaxModRevision, kv.ModRevision)
	}
	return res
}

// checkAll compares all keys at all readable revisions with the model.
func (r *modelRun) checkAll() {
	s := r.e.Snapshot()
	defer s.Close()
	for revision := max(r.m.floor, 1); revision <= r.m.revision(); revision++ {
		o := RangeOptions{Key: []byte{0}, End: []byte{0}, Revision: revision}
		got, err := s.Range(o)
		require.NoError(r.t, err)
		require.Equal(r.t, r.expect(o, revision), got)
	}
}

// checkReplay applies the same log to a new engine in other batches, with the same results. Once everything is
// scrubbed, both engines must store the same data.
func (r *modelRun) checkReplay() {
	r.opts.KeyIndex = !r.opts.KeyIndex
	e, err := Open(vfs.NewMem(), "data", r.opts)
	require.NoError(r.t, err)
	defer func() { require.NoError(r.t, e.Close()) }()
	for at := 0; at < len(r.log); {
		n := min(1+r.rng.IntN(40), len(r.log)-at)
		got, err := e.Apply(r.log[at : at+n])
		require.NoError(r.t, err)
		require.Equal(r.t, r.results[at:at+n], got)
		at += n
	}
	r.checkHash(e)
	for _, x := range []*Engine{e, r.e} {
		require.NoError(r.t, x.AwaitKeyIndex(context.Background())) // while the index is built, Scrub keeps data for it
		for done := false; !done; {
			done, err = x.Scrub(context.Background(), 10)
			require.NoError(r.t, err)
		}
	}
	require.Equal(r.t, dump(r.t, e), dump(r.t, r.e))
	require.Equal(r.t, e.Size(), r.e.Size())
	require.Equal(r.t, e.published.Load().state, r.e.published.Load().state)
}

func (r *modelRun) watch() {
	o := watch.Options{PrevKV: r.rng.IntN(2) == 0, MaxEvents: 1 + r.rng.IntN(5)}
	o.Key, o.End = r.span()
	if r.rng.IntN(2) == 0 {
		o.Key, o.End = r.key(), nil
	}
	if r.rng.IntN(2) == 0 {
		o.FromRevision = 1 + r.rng.Int64N(r.m.revision()+3)
	}
	w := &modelWatch{o: o, w: r.e.Watch(o)}
	if w.o.FromRevision == 0 {
		w.o.FromRevision = r.m.revision() + 1
	}
	w.complete = w.o.FromRevision - 1
	r.watches = append(r.watches, w)
}

func (r *modelRun) drain() {
	if len(r.watches) > 0 {
		r.drainOne(r.watches[r.rng.IntN(len(r.watches))])
	}
}

// drainOne reads all events that w can return now, and compares them with the model's.
func (r *modelRun) drainOne(w *modelWatch) {
	ready, cancel := context.WithCancel(context.Background())
	cancel()
	for {
		require.LessOrEqual(r.t, w.w.Progress(), r.m.revision())
		b, err := w.w.Next(ready)
		if errors.Is(err, ErrCompacted) {
			require.Less(r.t, w.complete+1, r.m.floor)
			w.w.Close()
			r.watches = slices.DeleteFunc(r.watches, func(o *modelWatch) bool { return o == w })
			return
		}
		if errors.Is(err, context.Canceled) {
			w.complete = max(w.complete, w.w.Progress())
			require.Equal(r.t, r.m.revision(), w.w.Progress(), "a watcher without pending events has seen all revisions")
			break
		}
		require.NoError(r.t, err)
		require.NotEmpty(r.t, b.Events)
		require.LessOrEqual(r.t, len(b.Events), w.o.MaxEvents)
		last := b.Events[len(b.Events)-1].KV.ModRevision
		if b.Partial {
			require.Equal(r.t, last-1, b.Revision)
			require.Equal(r.t, last, b.Events[0].KV.ModRevision)
		} else {
			require.LessOrEqual(r.t, last, b.Revision)
		}
		w.events = append(w.events, b.Events...)
		w.complete = max(w.complete, b.Revision)
	}
	r.checkEvents(w)
}

func (r *modelRun) checkEvents(w *modelWatch) {
	var want []watch.Event
	for revision := w.o.FromRevision; revision <= min(w.complete, r.m.revision()); revision++ {
		for _, e := range r.m.events[revision] {
			if !command.InRange(e.KV.Key, w.o.Key, w.o.End) {
				continue
			}
			if w.o.PrevKV && e.PrevModRevision > 0 {
				prev := r.m.states[revision-1][string(e.KV.Key)]
				e.Prev = &prev
			}
			want = append(want, e)
		}
	}
	require.Equal(r.t, want, w.events)
}

// crash loses some of the unsynced data, opens the engine again, applies the lost commands again, and starts the
// watchers again where they were.
func (r *modelRun) crash() {
	r.closeSnapshots()
	r.fs = r.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: r.rng.IntN(101), RNG: r.rng})
	require.NoError(r.t, r.e.Close())
	for _, w := range slices.Clone(r.watches) {
		_, err := w.w.Next(context.Background())
		require.True(r.t, errors.Is(err, ErrClosed) || errors.Is(err, ErrCompacted), "%v", err)
	}
	r.open()
	r.replay()
	for _, w := range slices.Clone(r.watches) {
		w.events = slices.DeleteFunc(w.events, func(e watch.Event) bool { return e.KV.ModRevision > w.complete })
		o := w.o
		o.FromRevision = w.complete + 1
		w.w = r.e.Watch(o)
	}
}

// replay applies the lost commands again, which must have the same results.
func (r *modelRun) replay() {
	for at := r.e.Applied().Index; at < uint64(len(r.log)); {
		n := min(1+uint64(r.rng.IntN(20)), uint64(len(r.log))-at)
		got, err := r.e.Apply(r.log[at : at+n])
		require.NoError(r.t, err)
		require.Equal(r.t, r.results[at:at+n], got)
		at += n
	}
	require.Equal(r.t, r.m.revision(), r.e.Revision())
}

// restore does what happens to a follower that was disconnected: it moves a checkpoint to another engine, applies more
// commands there, and restores the first engine from a checkpoint of the other one. Watchers must not miss or repeat an
// event.
func (r *modelRun) restore() {
	r.closeSnapshots()
	r.copies++
	first, second := fmt.Sprintf("copy%d", r.copies), fmt.Sprintf("next%d", r.copies)
	p, err := r.e.Checkpoint(context.Background(), first)
	require.NoError(r.t, err)
	require.Equal(r.t, r.e.Applied(), p)

	other, err := Open(r.fs, "other"+first, r.opts)
	require.NoError(r.t, err)
	defer func() { require.NoError(r.t, other.Close()) }()
	require.NoError(r.t, other.Restore(first))
	require.Equal(r.t, p, other.Applied())
	mine := r.e
	r.e = other
	for range r.rng.IntN(5) {
		r.apply()
	}
	_, err = other.Scrub(context.Background(), 1000)
	require.NoError(r.t, err)
	_, err = other.Checkpoint(context.Background(), second)
	require.NoError(r.t, err)

	r.e = mine
	require.NoError(r.t, r.e.Restore(second))
	require.Equal(r.t, uint64(len(r.log)), r.e.Applied().Index)
	require.Equal(r.t, r.m.revision(), r.e.Revision())
}

func (r *modelRun) closeSnapshots() {
	for _, s := range r.snaps {
		s.Close()
	}
	r.snaps = nil
}
