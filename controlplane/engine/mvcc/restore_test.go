package mvcc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// put returns a command at index that sets key to value.
func put(t *testing.T, index uint64, key, value string) command.Command {
	data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Put([]byte(key), []byte(value))}})
	require.NoError(t, err)
	return command.Command{Index: index, Term: 1, Data: data}
}

func mustApply(t *testing.T, e *Engine, cmds ...command.Command) []command.Result {
	r, err := e.Apply(cmds)
	require.NoError(t, err)
	return r
}

func mustOpen(t *testing.T, fs vfs.FS) *Engine {
	e, err := Open(fs, "data", Options{Quiet: true})
	require.NoError(t, err)
	return e
}

// content returns all keys with their values, each as "key=value ".
func content(t *testing.T, e *Engine) string {
	s := e.Snapshot()
	defer s.Close()
	res, err := s.Range(RangeOptions{Key: []byte{0}, End: []byte{0}})
	require.NoError(t, err)
	var b strings.Builder
	for _, kv := range res.KVs {
		fmt.Fprintf(&b, "%s=%s ", kv.Key, kv.Value)
	}
	return b.String()
}

// beforeRestore returns a file system with two directories: data with an engine's flushed state "a=old ", and copy with
// a checkpoint of "a=new b=new ".
func beforeRestore(t *testing.T) *vfs.MemFS {
	fs := vfs.NewCrashableMem()
	other, err := Open(fs, "other", Options{Quiet: true})
	require.NoError(t, err)
	mustApply(t, other, put(t, 7, "a", "new"), put(t, 9, "b", "new"))
	_, err = other.Checkpoint(context.Background(), "copy")
	require.NoError(t, err)
	require.NoError(t, other.Close())
	receive(t, fs, "copy")

	e := mustOpen(t, fs)
	mustApply(t, e, put(t, 1, "a", "old"))
	_, err = e.Flush(context.Background())
	require.NoError(t, err)
	require.NoError(t, e.Close())
	return fs
}

// receive replaces dir by an unsynced copy of its files, like one that was received over the network.
func receive(t *testing.T, fs *vfs.MemFS, dir string) {
	require.NoError(t, fs.Rename(dir, "sent"))
	require.NoError(t, fs.MkdirAll(dir, 0o700))
	names, err := fs.List("sent")
	require.NoError(t, err)
	for _, name := range names {
		from, err := fs.Open(fs.PathJoin("sent", name))
		require.NoError(t, err)
		to, err := fs.Create(fs.PathJoin(dir, name), vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		_, err = io.Copy(to, from)
		require.NoError(t, errors.Join(err, from.Close(), to.Close()))
	}
	require.NoError(t, fs.RemoveAll("sent"))
}

// TestRestoreCrash simulates a crash at each write to the disk during Restore. Afterwards, the old or the new state
// must be complete; after Restore has returned, the new one.
func TestRestoreCrash(t *testing.T) {
	mem := beforeRestore(t)
	rng := rand.New(rand.NewPCG(1, 1))
	var mu sync.Mutex
	var crashed []*vfs.MemFS
	recording := false
	fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		mu.Lock()
		defer mu.Unlock()
		if recording && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			for percent := 0; percent < 100; percent += 12 {
				crashed = append(crashed, mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rng}))
			}
		}
		return nil
	}))
	e := mustOpen(t, fs)
	recording = true
	require.NoError(t, e.Restore("copy"))
	recording = false
	after := mem.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, e.Close())

	found := map[string]int{}
	for _, c := range crashed {
		e := mustOpen(t, c)
		found[fmt.Sprintf("%s at %d", content(t, e), e.Applied().Index)]++
		names, err := c.List("data")
		require.NoError(t, err)
		require.Len(t, names, 3, "the directory has CURRENT, LOCK and one generation: %v", names)
		require.NoError(t, e.Close())
	}
	require.Len(t, found, 2, "%v", found)
	require.Positive(t, found["a=old  at 1"])
	require.Positive(t, found["a=new b=new  at 9"])

	e = mustOpen(t, after)
	require.Equal(t, "a=new b=new ", content(t, e))
	require.NoError(t, e.Close())
}

// TestRestoreFaults lets each write to the disk during Restore fail, one in each run. The engine must continue with the
// old state, or be closed, and open again with one of the two states.
func TestRestoreFaults(t *testing.T) {
	for n := int32(1); ; n++ {
		mem := beforeRestore(t)
		var left atomic.Int32
		e := mustOpen(t, errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			// Errors inside Pebble's directory may end the process. TestRestoreCrash covers them.
			if op.Kind.ReadOrWrite() != errorfs.OpIsWrite || strings.HasPrefix(op.Path, "data/2") {
				return nil
			}
			if left.Add(-1) == 0 {
				return errorfs.ErrInjected
			}
			return nil
		})))
		left.Store(n)
		err := e.Restore("copy")
		reached := left.Swap(0) <= 0
		switch {
		case errors.Is(err, ErrClosed):
			_, err := e.Apply([]command.Command{put(t, 10, "c", "1")})
			require.ErrorIs(t, err, ErrClosed)
		case err != nil:
			require.Equal(t, "a=old ", content(t, e))
			mustApply(t, e, put(t, 2, "a", "older"))
			require.Equal(t, "a=older ", content(t, e))
		default:
			require.Equal(t, "a=new b=new ", content(t, e))
			mustApply(t, e, put(t, 10, "a", "newer"))
		}
		require.NoError(t, e.Close())
		e = mustOpen(t, mem)
		require.Contains(t, []string{"a=old ", "a=new b=new "}, content(t, e), "fault %d: %v", n, err)
		require.NoError(t, e.Close())
		if !reached {
			require.Greater(t, n, int32(10))
			return
		}
	}
}

// TestOpenCrash simulates a crash at each access to the disk while an engine creates its directory. It must be possible
// to open it afterwards, empty or with the first key.
func TestOpenCrash(t *testing.T) {
	mem := vfs.NewCrashableMem()
	var mu sync.Mutex
	var crashed []*vfs.MemFS
	e := mustOpen(t, errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		mu.Lock()
		defer mu.Unlock()
		crashed = append(crashed, mem.CrashClone(vfs.CrashCloneCfg{}))
		return nil
	})))
	mustApply(t, e, put(t, 1, "a", "1"))
	p, err := e.Flush(context.Background())
	require.NoError(t, err)
	require.Equal(t, command.Position{Index: 1, Term: 1}, p)
	after := mem.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, e.Close())
	for _, c := range crashed {
		e := mustOpen(t, c)
		require.Contains(t, []string{"", "a=1 "}, content(t, e))
		require.NoError(t, e.Close())
	}
	e = mustOpen(t, after)
	require.Equal(t, "a=1 ", content(t, e))
	require.NoError(t, e.Close())
}

// TestRefusedDirectories checks that Open and Restore refuse a directory that is not an engine's, is locked, incomplete
// or of an unknown format, and do not change it.
func TestRefusedDirectories(t *testing.T) {
	fs := vfs.NewMem()
	write := func(path, text string) {
		f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		_, err = f.Write([]byte(text))
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	e := mustOpen(t, fs)
	mustApply(t, e, put(t, 1, "a", "1"))

	require.NoError(t, fs.MkdirAll("empty", 0o700))
	require.ErrorContains(t, e.Restore("empty"), "does not exist")
	require.Equal(t, "a=1 ", content(t, e))

	_, err := Open(fs, "data", Options{})
	require.ErrorContains(t, err, "another process may have it")
	require.NoError(t, e.Close())

	write("data/CURRENT", "trivet mvcc format 2 generation 1\n")
	_, err = Open(fs, "data", Options{})
	require.ErrorIs(t, err, command.ErrUnknownFormat)
	require.ErrorContains(t, err, "directory of format 2, this program knows 1")

	write("data/CURRENT", "trivet mvcc format 1 generation 2\n")
	_, err = Open(fs, "data", Options{})
	require.ErrorContains(t, err, "does not exist")
	// Open failed before it could remove generation 1.

	write("data/CURRENT", "?")
	_, err = Open(fs, "data", Options{})
	require.ErrorIs(t, err, ErrCorrupt)

	require.NoError(t, fs.Remove("data/CURRENT"))
	_, err = Open(fs, "data", Options{})
	require.ErrorIs(t, err, ErrCorrupt)
	require.ErrorContains(t, err, "CURRENT is missing, but generation")
}

// TestRefusedState checks that Open and Checkpoint refuse a state that a newer version wrote, and that such a
// checkpoint is removed.
func TestRefusedState(t *testing.T) {
	fs := vfs.NewMem()
	e := mustOpen(t, fs)
	mustApply(t, e, put(t, 1, "a", "1"))
	db := e.published.Load().gen.db
	require.NoError(t, db.Set([]byte{tableState}, []byte{stateFormat + 1}, pebble.NoSync))
	_, err := e.Checkpoint(context.Background(), "copy")
	require.ErrorIs(t, err, command.ErrUnknownFormat)
	_, err = fs.Stat("copy")
	require.Error(t, err)
	require.NoError(t, e.Close())
	_, err = Open(fs, "data", Options{})
	require.ErrorIs(t, err, command.ErrUnknownFormat)
	require.ErrorContains(t, err, "state of format 3, this program knows 2")
}

// TestRestoreReaders checks that Restore ends snapshots, and that a waiting watcher continues in the restored history,
// or ends if that is already compacted beyond what the watcher has seen.
func TestRestoreReaders(t *testing.T) {
	fs := beforeRestore(t)
	other, err := Open(fs, "other", Options{Quiet: true})
	require.NoError(t, err)
	// After a command that it cannot apply, Restore makes the engine usable again.
	_, err = other.Apply([]command.Command{{Index: 100, Data: []byte{2}}})
	require.ErrorIs(t, err, command.ErrUnknownFormat)
	require.NoError(t, other.Restore("copy"))
	for i := range uint64(4) {
		mustApply(t, other, put(t, 10+i, "c", fmt.Sprint(i)))
	}
	_, err = other.Checkpoint(context.Background(), "later")
	require.NoError(t, err)
	mustApply(t, other, command.Command{Index: 20, Term: 1, Data: command.EncodeCompact(6)})
	_, err = other.Checkpoint(context.Background(), "compacted")
	require.NoError(t, err)
	require.NoError(t, other.Close())

	for from, want := range map[string]string{
		"later":     "put c=0 create 4 mod 4 version 1, before 0\n",
		"compacted": "revision 3 has been compacted, the oldest is 6",
	} {
		mem := fs.CrashClone(vfs.CrashCloneCfg{})
		e := mustOpen(t, mem)
		snap := e.Snapshot()
		w := e.Watch(watch.Options{Key: []byte("c")})
		defer w.Close()
		waiting := make(chan string)
		go func() {
			b, err := w.Next(context.Background())
			var compacted *CompactedError
			switch {
			case errors.As(err, &compacted):
				waiting <- compacted.Error()
			case err != nil:
				waiting <- err.Error()
			default:
				waiting <- formatEvent(b.Events[0])
			}
		}()
		require.NoError(t, e.Restore(from))
		require.Equal(t, want, <-waiting)
		_, _, err := snap.Get([]byte("a"))
		require.ErrorIs(t, err, ErrRestored)
		snap.Close()
		require.NoError(t, e.Close())
	}
}
