package consensus

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
)

// crashPoint is a fault injector that copies a disk, as a crash would leave it, just before the nth operation that
// makes data durable.
type crashPoint struct {
	fs       *vfs.MemFS
	after    atomic.Int64 // take the copy before the operation with this number; 0: do not count operations
	ackedNow func() int   // returns the number of proposals acknowledged by then

	mu      sync.Mutex
	n       int64
	picture *vfs.MemFS
	acked   int
}

func (c *crashPoint) String() string { return "camera" }

func (c *crashPoint) MaybeError(op errorfs.Op) error {
	switch op.Kind {
	case errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo, errorfs.OpRename, errorfs.OpRemove:
	default:
		return nil
	}
	at := c.after.Load()
	if at == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n++; c.n == at {
		c.acked = c.ackedNow()
		c.picture = c.fs.CrashClone(vfs.CrashCloneCfg{})
	}
	return nil
}

func (c *crashPoint) image() (*vfs.MemFS, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.picture, c.acked
}

// TestCrashAtEverySync crashes a member before each sync, rename and removal, also while the log is truncated and the
// state is flushed. The acknowledged proposals must be in the recovered state.
func TestCrashAtEverySync(t *testing.T) {
	const proposals = 30
	moments := 0
	for at := int64(1); ; at++ {
		over := false
		synctest.Test(t, func(t *testing.T) {
			var acked atomic.Int64
			fs := vfs.NewCrashableMem()
			cam := &crashPoint{fs: fs, ackedNow: func() int { return int(acked.Load()) }}
			cam.after.Store(at)
			w := &memoryNetwork{ids: []uint64{1}, to: map[uint64]*runnerMember{}, tail: 8, disks: map[uint64]vfs.FS{1: errorfs.Wrap(fs, cam)}}
			w.start(t, 1, fs, RunnerOptions{})
			w.lead(t)
			for i := range proposals {
				_, err := w.to[1].Propose(t.Context(), testGroup, [16]byte{byte(i)}, fmt.Appendf(nil, "a=%d", i))
				require.NoError(t, err)
				acked.Add(1)
			}
			w.stop(t)
			picture, before := cam.image()
			if over = picture == nil; over {
				return
			}
			again := &memoryNetwork{ids: []uint64{1}, to: map[uint64]*runnerMember{}, tail: 8}
			m := again.start(t, 1, picture, RunnerOptions{})
			require.NoError(t, m.ReadIndex(t.Context(), testGroup))
			again.stop(t)
			require.GreaterOrEqual(t, len(m.machine.Log), before, "crash %d: an acknowledged proposal is lost", at)
			for i, line := range m.machine.Log {
				require.Equal(t, fmt.Sprintf("a=%d", i), line, "crash %d: the recovered log has other proposals", at)
			}
		})
		if over || t.Failed() {
			break
		}
		moments++
	}
	require.Greater(t, moments, proposals, "there is at least one crash for each proposal")
}

// TestCrashDuringSnapshots crashes a member at each point while it installs a snapshot and then another one. The
// restarted member must reach the state of the other members.
func TestCrashDuringSnapshots(t *testing.T) {
	moments := 0
	for at := int64(1); ; at++ {
		over := false
		synctest.Test(t, func(t *testing.T) {
			ctx := t.Context()
			w := startSlow(t, 3)
			l := w.lead(t)
			f := w.to[w.ids[l.id%3]]
			n := 0
			put := func(count int) {
				for range count {
					n++
					_, err := l.Propose(ctx, testGroup, [16]byte{1, byte(n), byte(n >> 8)}, fmt.Appendf(nil, "a=%d", n))
					require.NoError(t, err)
				}
			}
			require.NoError(t, f.Stop(ctx))
			put(250)
			crashed := false // guarded by w.mu
			cut := func(off bool) {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.cut[f.id] = off || crashed
			}
			// From the crash on, the member's messages are lost.
			cam := &crashPoint{fs: f.fs, ackedNow: func() int { w.mu.Lock(); crashed = true; w.mu.Unlock(); cut(true); return 0 }}
			start := func(fs *vfs.MemFS, disk vfs.FS) *runnerMember {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.disks = map[uint64]vfs.FS{f.id: disk}
				return w.start(t, f.id, fs, RunnerOptions{})
			}
			back := start(f.fs, errorfs.Wrap(f.fs, cam))
			cam.after.Store(at)
			for range 2 {
				err := back.ReadIndex(ctx, testGroup)
				if picture, _ := cam.image(); picture != nil {
					break
				}
				require.NoError(t, err)
				cut(true)
				put(250)
				cut(false)
			}
			time.Sleep(3 * time.Second) // virtual time
			picture, _ := cam.image()
			over = picture == nil
			if over {
				require.NoError(t, back.ReadIndex(ctx, testGroup))
				require.GreaterOrEqual(t, back.n, 2, "the member has installed at least two snapshots")
			}
			require.NoError(t, back.Stop(ctx))
			cam.after.Store(0)
			if over {
				picture = f.fs
			}
			w.mu.Lock()
			crashed = false
			w.mu.Unlock()
			cut(false)
			back = start(picture, picture)
			require.NoError(t, back.ReadIndex(ctx, testGroup))
			put(1)
			require.NoError(t, back.ReadIndex(ctx, testGroup))
			w.stop(t)
			require.Equal(t, l.machine.Log, back.machine.Log, "crash %d: the member's log differs from the leader's", at)
		})
		if over || t.Failed() {
			break
		}
		moments++
	}
	require.Greater(t, moments, 10)
}
