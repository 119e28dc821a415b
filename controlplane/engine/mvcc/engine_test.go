package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// newEngine returns an empty engine in memory. It is closed at the end of the test.
func newEngine(t testing.TB) *Engine {
	e, err := Open(vfs.NewMem(), "data", Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

func proposalID(n int) (id [16]byte) {
	binary.BigEndian.PutUint64(id[:], uint64(n)+1)
	return id
}

// TestProposalsForgotten checks that exactly the last MaxProposals proposal IDs are remembered, for any size of
// batches, also after reopening and after a restore.
func TestProposalsForgotten(t *testing.T) {
	fs := vfs.NewMem()
	e := mustOpen(t, fs)
	data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Delete([]byte("a"))}})
	require.NoError(t, err)
	const total = MaxProposals + 3*sweepInterval/2
	index := 0
	for index < total {
		var cmds []command.Command
		for range min(1+index%777, total-index) {
			cmds = append(cmds, command.Command{Index: uint64(index) + 1, ID: proposalID(index), Data: data})
			index++
		}
		mustApply(t, e, cmds...)
	}
	check := func(e *Engine) {
		require.Equal(t, uint64(total), e.applier.proposals.next)
		require.Len(t, e.applier.proposals.byID, MaxProposals)
		require.Len(t, e.applier.proposals.ring, MaxProposals)
		for n := range total {
			if _, known := e.applier.proposals.find(proposalID(n)); known != (n >= total-MaxProposals) {
				t.Fatalf("proposal %d is known: %v", n, known)
			}
		}
	}
	check(e)
	_, err = e.Checkpoint(context.Background(), "copy")
	require.NoError(t, err)
	require.NoError(t, e.Close())
	e = mustOpen(t, fs)
	check(e)
	require.NoError(t, e.Close())

	other, err := Open(fs, "other", Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	require.NoError(t, other.Restore("copy"))
	check(other)

	// With the next new ID, the oldest one is forgotten: a command with it is applied again.
	put := func(n int) command.Command {
		index++
		data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Put([]byte("a"), []byte("1"))}})
		require.NoError(t, err)
		return command.Command{Index: uint64(index), ID: proposalID(n), Data: data}
	}
	oldest := total - MaxProposals
	require.Equal(t, int64(1), mustApply(t, other, put(oldest))[0].Revision)
	require.Equal(t, int64(2), mustApply(t, other, put(total))[0].Revision)
	require.Equal(t, int64(3), mustApply(t, other, put(oldest))[0].Revision)
	require.Equal(t, int64(1), mustApply(t, other, put(oldest+2))[0].Revision)
}

// TestLargeRevision deletes 6000 keys in one revision, many times more than a chunk of the change log or a batch of
// events holds. Watchers must get all events in order, and Scrub must remove them in several steps.
func TestLargeRevision(t *testing.T) {
	e := newEngine(t)
	const keys = 6000
	for i := range keys {
		mustApply(t, e, put(t, uint64(i)+1, fmt.Sprintf("key/%05d", i), "v"))
	}
	live := e.Watch(watch.Options{Key: []byte("key/"), End: []byte("key0"), MaxEvents: 999})
	defer live.Close()
	data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.DeleteRange([]byte("key/"), []byte("key0")), command.Put([]byte("z"), nil)}})
	require.NoError(t, err)
	mustApply(t, e, command.Command{Index: keys + 1, Data: data})
	require.Equal(t, int64(1), e.Stats().Keys)
	past := e.Watch(watch.Options{Key: []byte("key/"), End: []byte("key0"), FromRevision: keys + 2, MaxEvents: 999, PrevKV: true})
	defer past.Close()
	for _, w := range []*watch.Watcher{live, past} {
		seen := 0
		for seen < keys {
			b, err := w.Next(context.Background())
			require.NoError(t, err)
			for _, ev := range b.Events {
				require.Equal(t, watch.EventDelete, ev.Type)
				require.Equal(t, fmt.Sprintf("key/%05d", seen), string(ev.KV.Key))
				require.Equal(t, int64(seen)+2, ev.PrevModRevision)
				if w == past {
					require.Equal(t, "v", string(ev.Prev.Value))
				}
				seen++
			}
			require.Equal(t, seen < keys, b.Partial)
		}
		require.Equal(t, int64(keys+2), w.Progress())
	}
	mustApply(t, e, put(t, keys+2, "y", ""), command.Command{Index: keys + 3, Data: command.EncodeCompact(keys + 3)})
	steps := 0
	for done := false; !done; steps++ {
		done, err = e.Scrub(context.Background(), 1000)
		require.NoError(t, err)
	}
	require.Greater(t, steps, 5)
	require.Equal(t, "key y revision 6003: \nkey z revision 6002: \nrevision 6003:\n  put y after 0 releases 0\n", dump(t, e))
}

// TestConcurrent checks that, while one goroutine applies commands, readers see all or nothing of a transaction,
// watchers get all versions in order, and checkpoints have the state of exactly the returned position. Scrub runs
// meanwhile.
func TestConcurrent(t *testing.T) {
	fs := vfs.NewMem()
	e, err := Open(fs, "data", Options{MemTableBytes: 256 << 10, RecentBytes: 4 << 10})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	// Commands are applied until the other goroutines have run often enough.
	const rounds, most = 1500, 1_000_000
	var copies, pairs, scrubs, applied atomic.Uint64
	busy := func() bool { return copies.Load() < 6 || pairs.Load() < 200 || scrubs.Load() < 50 }
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	start := func(f func()) {
		wg.Add(1)
		go func() { defer wg.Done(); f() }()
	}
	// Each transaction writes its index to x and y, so x and y always have the same value.
	start(func() {
		defer stop()
		for i := uint64(1); i <= rounds || i <= most && busy() && !t.Failed(); i += 2 {
			var cmds []command.Command
			for j := i; j < i+2; j++ {
				v := strconv.AppendUint(nil, j, 10)
				data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Put([]byte("x"), v), command.Put([]byte("y"), v)}})
				if err != nil {
					t.Error(err)
					return
				}
				cmds = append(cmds, command.Command{Index: j, Term: 1, Data: data})
			}
			if i%100 == 1 && i > 200 {
				cmds[0].Data = command.EncodeCompact(int64(i) - 150)
			}
			if _, err := e.Apply(cmds); err != nil {
				t.Error(err)
				return
			}
			applied.Store(i + 1)
		}
	})
	pair := func(e *Engine) (string, error) {
		s := e.Snapshot()
		defer s.Close()
		res, err := s.Range(RangeOptions{Key: []byte("x"), End: []byte("z")})
		if err != nil || len(res.KVs) == 0 {
			return "", err
		}
		x, y := res.KVs[0], res.KVs[len(res.KVs)-1]
		if string(x.Value) != string(y.Value) || x.ModRevision != s.Revision() {
			return "", fmt.Errorf("x and y differ at revision %d, or were not written at it: %s", s.Revision(), formatKV(x)+" "+formatKV(y))
		}
		if old, err := s.Range(RangeOptions{Key: []byte("x"), End: []byte("z"), Revision: max(s.CompactRevision(), 2)}); err != nil ||
			string(old.KVs[0].Value) != string(old.KVs[1].Value) {
			return "", fmt.Errorf("x and y differ at the compacted revision %d, with the error %v", s.CompactRevision(), err)
		}
		return string(x.Value), nil
	}
	for range 2 {
		start(func() {
			for ctx.Err() == nil {
				if _, err := pair(e); err != nil {
					t.Error(err)
					return
				}
				pairs.Add(1)
			}
		})
	}
	start(func() {
		for ctx.Err() == nil {
			if _, err := e.Scrub(ctx, 37); err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
				return
			}
			scrubs.Add(1)
		}
	})
	for i, o := range []watch.Options{
		{Key: []byte("x"), PrevKV: true}, {Key: []byte("y"), FromRevision: 1, MaxEvents: 3}, {Key: []byte{0}, End: []byte{0}},
	} {
		w := e.Watch(o)
		start(func() {
			defer w.Close()
			if err := follow(ctx, w); err != nil {
				t.Errorf("watcher %d: %v", i, err)
			}
		})
	}
	start(func() {
		for n := 0; ctx.Err() == nil; n++ {
			dir := fmt.Sprintf("copy%d", n)
			p, err := e.Checkpoint(context.Background(), dir)
			if err != nil {
				t.Error(err)
				return
			}
			c, err := Open(fs, "c"+dir, Options{})
			if err != nil {
				t.Error(err)
				return
			}
			if err = errors.Join(c.Restore(dir), checkApplied(c, p)); err == nil {
				_, err = pair(c)
			}
			if err = errors.Join(err, c.Close()); err != nil {
				t.Error(err)
				return
			}
			copies.Add(1)
		}
	})
	wg.Wait()
	require.False(t, busy())
	require.Equal(t, applied.Load(), e.Applied().Index)
	require.Zero(t, e.Stats().Snapshots)
	require.Zero(t, e.Stats().Watchers)
}

func checkApplied(e *Engine, p command.Position) error {
	if got := e.Applied(); got != p {
		return fmt.Errorf("restored %v, want %v", got, p)
	}
	return nil
}

// follow reads events until ctx ends, and checks that the versions of each key have no gaps.
func follow(ctx context.Context, w *watch.Watcher) error {
	last := map[string]int64{}
	for {
		b, err := w.Next(ctx)
		if errors.Is(err, context.Canceled) || errors.Is(err, ErrCompacted) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, ev := range b.Events {
			before := last[string(ev.KV.Key)]
			if before != 0 && ev.KV.Version != before+1 {
				return fmt.Errorf("version %d of %s follows version %d", ev.KV.Version, ev.KV.Key, before)
			}
			if ev.Prev != nil && ev.Prev.Version != ev.KV.Version-1 {
				return fmt.Errorf("the event has the previous version %d and the version %d", ev.Prev.Version, ev.KV.Version)
			}
			last[string(ev.KV.Key)] = ev.KV.Version
		}
	}
}

// TestClosed checks that, after Close, methods that read or write return ErrClosed and do not block.
func TestClosed(t *testing.T) {
	fs := vfs.NewMem()
	e := mustOpen(t, fs)
	mustApply(t, e, put(t, 1, "a", "1"))
	s, w := e.Snapshot(), e.Watch(watch.Options{Key: []byte("a")})
	waiting := make(chan error)
	go func() {
		_, err := w.Next(context.Background())
		waiting <- err
	}()
	require.NoError(t, e.Close())
	require.NoError(t, e.Close())
	require.ErrorIs(t, <-waiting, ErrClosed)
	ctx := context.Background()
	for name, call := range map[string]func() error{
		"apply":                 func() error { _, err := e.Apply([]command.Command{put(t, 2, "a", "1")}); return err },
		"flush":                 func() error { _, err := e.Flush(ctx); return err },
		"scrub":                 func() error { _, err := e.Scrub(ctx, 1); return err },
		"checkpoint":            func() error { _, err := e.Checkpoint(ctx, "copy"); return err },
		"restore":               func() error { return e.Restore("copy") },
		"get":                   func() error { _, _, err := s.Get([]byte("a")); return err },
		"get of a new snapshot": func() error { _, _, err := e.Snapshot().Get([]byte("a")); return err },
		"range of a new snapshot": func() error {
			_, err := e.Snapshot().Range(RangeOptions{Key: []byte("a"), Revision: 9})
			return err
		},
		"next":                  func() error { _, err := w.Next(ctx); return err },
		"next of a new watcher": func() error { _, err := e.Watch(watch.Options{Key: []byte("a")}).Next(ctx); return err },
	} {
		require.ErrorIs(t, call(), ErrClosed, name)
	}
	s.Close()
	w.Close()
	require.Equal(t, int64(2), e.Stats().Revision)
}

// TestRangeGuard checks that the guard that RangeOptions.Guard makes from the result of a range holds while the keys
// are unchanged.
func TestRangeGuard(t *testing.T) {
	e := newEngine(t)
	for i, k := range []string{"a", "b", "c", "d"} {
		mustApply(t, e, put(t, uint64(i)+1, k, "1"))
	}
	s := e.Snapshot()
	defer s.Close()
	index := uint64(4)
	for _, o := range []RangeOptions{
		{Key: []byte("b")}, {Key: []byte("x")}, {Key: []byte("a"), End: []byte{0}, Limit: 2},
		{Key: []byte("a"), End: []byte{0}, Limit: 2, Reverse: true}, {Key: []byte("a"), End: []byte("c"), Limit: 2},
		{Key: []byte("a"), End: []byte{0}, CountOnly: true},
	} {
		res, err := s.Range(o)
		require.NoError(t, err)
		data, err := command.EncodeTxn(command.Txn{Guards: []command.Guard{o.Guard(res)}})
		require.NoError(t, err)
		index++
		require.False(t, mustApply(t, e, command.Command{Index: index, Data: data})[0].Conflict, "%+v", o)
	}
}

// TestTooManyChanges checks that a DeleteRange of too many keys changes nothing, whether the keys are stored or were
// written by earlier commands of the batch.
func TestTooManyChanges(t *testing.T) {
	e := newEngine(t)
	e.applier.maxChanges = 2
	data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Put([]byte("x"), nil), command.DeleteRange([]byte("a"), []byte("d"))}})
	require.NoError(t, err)
	r := mustApply(t, e, put(t, 1, "a", "1"), put(t, 2, "b", "1"), command.Command{Index: 3, ID: proposalID(0), Data: data})[2]
	require.Equal(t, command.Result{Revision: 3, Refused: command.RefusedTooMany}, r)
	require.ErrorIs(t, r.Err(), command.ErrTooMany)
	require.Equal(t, "a=1 b=1 ", content(t, e))
	mustApply(t, e, command.Command{Index: 4, Data: command.EncodeCompact(3)})

	fits, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.DeleteRange([]byte("a"), []byte("d"))}})
	require.NoError(t, err)
	require.Equal(t, command.Result{Revision: 4}, mustApply(t, e, command.Command{Index: 5, Data: fits})[0])
	require.Equal(t, r, mustApply(t, e, command.Command{Index: 6, ID: proposalID(0), Data: data})[0])
}

// TestDiskRefuses checks that, while the disk refuses to create files, Apply and reads continue and Flush ends with its
// context, and that a later Flush makes the data durable.
func TestDiskRefuses(t *testing.T) {
	mem := vfs.NewCrashableMem()
	var refuse atomic.Bool
	refused := make(chan struct{}, 1)
	fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if !refuse.Load() || op.Kind != errorfs.OpCreate {
			return nil
		}
		select {
		case refused <- struct{}{}:
		default:
		}
		return errorfs.ErrInjected
	}))
	e := mustOpen(t, fs)
	refuse.Store(true)
	mustApply(t, e, put(t, 1, "a", "1"))
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-refused; cancel() }()
	_, err := e.Flush(ctx)
	require.ErrorIs(t, err, context.Canceled)
	mustApply(t, e, put(t, 2, "b", "1"))
	require.Equal(t, "a=1 b=1 ", content(t, e))
	<-refused
	refuse.Store(false)
	p, err := e.Flush(context.Background())
	require.NoError(t, err)
	require.Equal(t, uint64(2), p.Index)
	require.Positive(t, e.Stats().DiskErrors)
	after := mem.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, e.Close())
	e = mustOpen(t, after)
	require.Equal(t, "a=1 b=1 ", content(t, e))
	require.NoError(t, e.Close())
}
