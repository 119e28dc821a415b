package consensus

import (
	"context"
	"errors"
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

// slowDisk is a fault injector that delays each sync by a duration, which stall sets.
type slowDisk struct{ takes atomic.Int64 }

func (d *slowDisk) String() string { return "slow disk" }

func (d *slowDisk) MaybeError(op errorfs.Op) error {
	switch op.Kind {
	case errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo:
		if t := time.Duration(d.takes.Load()); t > 0 {
			time.Sleep(t) // virtual time
		}
	}
	return nil
}

func (d *slowDisk) stall(t time.Duration) { d.takes.Store(int64(t)) }

// startSlow starts n members that forward proposals, with disks that slowDisk.stall makes slow.
func startSlow(t testing.TB, n int) *memoryNetwork {
	w := &memoryNetwork{to: map[uint64]*runnerMember{}, cut: map[uint64]bool{}, forward: true, slow: map[uint64]*slowDisk{}}
	for id := range uint64(n) {
		w.ids = append(w.ids, id+1)
		w.slow[id+1] = &slowDisk{}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range w.ids {
		w.start(t, id, vfs.NewCrashableMem(), RunnerOptions{})
	}
	return w
}

// TestStalledLeaderTransfersLeadership checks that a leader whose disk stalls transfers leadership, so that the other
// members can commit.
func TestStalledLeaderTransfersLeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w := startSlow(t, 3)
		l := w.lead(t)
		require.NoError(t, l.ReadIndex(t.Context(), testGroup))
		f, third := w.to[w.ids[l.id%3]], w.to[w.ids[(l.id+1)%3]]
		_, err := f.Propose(ctx, testGroup, [16]byte{1}, []byte("a=1"))
		require.NoError(t, err)
		w.slow[l.id].stall(2 * time.Second)
		began := time.Now()
		var wg sync.WaitGroup
		var longest atomic.Int64
		for i := range 4 {
			m := []*runnerMember{f, third}[i%2]
			wg.Go(func() {
				for j := 0; time.Since(began) < 2*time.Second; j++ {
					asked := time.Now()
					_, err := m.Propose(ctx, testGroup, [16]byte{2, byte(i), byte(j), byte(j >> 8)}, fmt.Appendf(nil, "%d=%d", i, j))
					require.NoError(t, err)
					longest.Store(max(longest.Load(), int64(time.Since(asked))))
					time.Sleep(100 * time.Millisecond)
				}
			})
		}
		own := make(chan error, 1)
		go func() {
			_, err := l.Propose(ctx, testGroup, [16]byte{3}, []byte("b=1"))
			own <- err
		}()
		wg.Wait()
		require.Less(t, time.Duration(longest.Load()), 1500*time.Millisecond, "no proposal waits for the slow disk, in virtual time")
		require.NotEqual(t, l.id, f.Leader(testGroup).Leader)
		w.slow[l.id].stall(0)
		require.NoError(t, <-own, "the old leader's own proposal is answered after its disk is fast again")
		require.NoError(t, l.ReadIndex(ctx, testGroup))
		w.stop(t)
		require.Equal(t, f.machine.Log, l.machine.Log)
		seen := map[string]bool{}
		for _, line := range l.machine.Log {
			require.False(t, seen[line], "%s is applied twice", line)
			seen[line] = true
		}
	})
}

// TestSlowLeaderKeepsLeadership checks that a leader with a slow disk stays the leader. During its writes it must send
// heartbeats and appends, and commit what the other members have synced.
func TestSlowLeaderKeepsLeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w := startSlow(t, 3)
		l := w.lead(t)
		require.NoError(t, l.ReadIndex(t.Context(), testGroup))
		f := w.to[w.ids[l.id%3]]
		term := l.Leader(testGroup).Term
		w.slow[l.id].stall(300 * time.Millisecond)
		for i := range 10 {
			began := time.Now()
			_, err := f.Propose(ctx, testGroup, [16]byte{1, byte(i)}, fmt.Appendf(nil, "a=%d", i))
			require.NoError(t, err)
			require.Less(t, time.Since(began), 150*time.Millisecond, "the followers do not wait for the leader's disk, in virtual time")
		}
		time.Sleep(5 * time.Second) // virtual time
		_, err := l.Propose(ctx, testGroup, [16]byte{2}, []byte("b=1"))
		require.NoError(t, err)
		require.Equal(t, term, l.Leader(testGroup).Term, "the leader of the term is unchanged")
		w.slow[l.id].stall(0)
		w.stop(t)
	})
}

// TestStalledOnlyMember checks that the only member of a cluster continues when its disk no longer stalls.
func TestStalledOnlyMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w := startSlow(t, 1)
		l := w.lead(t)
		require.NoError(t, l.ReadIndex(t.Context(), testGroup))
		w.slow[1].stall(20 * time.Second)
		limited, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		_, err := l.Propose(limited, testGroup, [16]byte{1}, []byte("a=1"))
		require.ErrorIs(t, err, ErrUncertain)
		require.NoError(t, l.ReadIndex(ctx, testGroup), "committed data can be read during the stall")
		status, err := l.Status(ctx)
		require.NoError(t, err)
		require.Equal(t, "Leader", status.Groups[0].Role)
		w.slow[1].stall(0)
		_, err = l.Propose(ctx, testGroup, [16]byte{2}, []byte("a=2"))
		require.ErrorIs(t, err, ErrUncertain, "the proposal has exceeded its time limit")
		_, err = l.Propose(ctx, testGroup, [16]byte{3}, []byte("a=3"))
		if err != nil {
			require.ErrorIs(t, err, ErrUncertain)
		}
		time.Sleep(20 * time.Second) // virtual time
		_, err = l.Propose(ctx, testGroup, [16]byte{4}, []byte("a=4"))
		require.NoError(t, err)
		w.stop(t)
	})
}

// TestStalledFollower checks that a follower whose disk stalls does not delay the other members, and applies all
// entries later.
func TestStalledFollower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w := startSlow(t, 3)
		l := w.lead(t)
		require.NoError(t, l.ReadIndex(t.Context(), testGroup))
		f := w.to[w.ids[l.id%3]]
		w.slow[f.id].stall(3 * time.Second)
		for i := range 50 {
			began := time.Now()
			_, err := l.Propose(ctx, testGroup, [16]byte{1, byte(i)}, fmt.Appendf(nil, "a=%d", i))
			require.NoError(t, err)
			require.Less(t, time.Since(began), 100*time.Millisecond, "a slow follower does not delay a proposal, in virtual time")
		}
		w.slow[f.id].stall(0)
		require.NoError(t, f.ReadIndex(ctx, testGroup))
		require.Equal(t, l.id, f.Leader(testGroup).Leader)
		w.stop(t)
		require.Equal(t, l.machine.Log, f.machine.Log)
	})
}

// TestSlowStateMachine checks that a leader whose state machine takes long for a checkpoint sends heartbeats and
// commits proposals meanwhile.
func TestSlowStateMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w := startSlow(t, 3)
		l := w.lead(t)
		require.NoError(t, l.ReadIndex(t.Context(), testGroup))
		f := w.to[w.ids[l.id%3]]
		require.NoError(t, f.Stop(ctx))
		for i := range 300 {
			_, err := l.Propose(ctx, testGroup, [16]byte{1, byte(i), byte(i >> 8)}, fmt.Appendf(nil, "a=%d", i))
			require.NoError(t, err)
		}
		// The restarted member needs a checkpoint, which takes long.
		term := l.Leader(testGroup).Term
		release := make(chan struct{})
		var held atomic.Bool
		require.NoError(t, l.call(func() {
			l.machine.checkpointing = func() {
				if held.CompareAndSwap(false, true) {
					<-release
				}
			}
		}, true))
		w.mu.Lock()
		back := w.start(t, f.id, f.fs, RunnerOptions{})
		w.mu.Unlock()
		synctest.Wait()
		time.Sleep(4 * time.Second) // virtual time: several election timeouts
		require.True(t, held.Load())
		require.Equal(t, term, l.Leader(testGroup).Term)
		status, err := l.Status(ctx)
		require.NoError(t, err)
		require.Equal(t, 1, status.Groups[0].SnapshotsUnder)
		third := w.to[w.ids[(l.id+1)%3]]
		_, err = third.Propose(ctx, testGroup, [16]byte{2}, []byte("b=1"))
		require.NoError(t, err)
		close(release)
		require.NoError(t, back.ReadIndex(ctx, testGroup))
		require.GreaterOrEqual(t, back.n, 1, "the member has installed a snapshot")
		w.stop(t)
		require.Equal(t, l.machine.Log, back.machine.Log)
	})
}

// TestStopAnswersEachCallOnce checks that each call returns when its member is stopped, also while the call's entry is
// being written or applied.
func TestStopAnswersEachCallOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := startSlow(t, 3)
		l := w.lead(t)
		require.NoError(t, l.ReadIndex(t.Context(), testGroup))
		w.slow[l.id].stall(200 * time.Millisecond)
		var wg sync.WaitGroup
		for i := range 100 {
			m := w.to[w.ids[i%3]]
			wg.Go(func() {
				_, err := m.Propose(t.Context(), testGroup, [16]byte{1, byte(i)}, fmt.Appendf(nil, "a=%d", i))
				if err != nil {
					require.True(t, errors.Is(err, ErrUncertain) || errors.Is(err, ErrStopped) || errors.Is(err, ErrNoLeader), "%v", err)
				}
			})
		}
		time.Sleep(50 * time.Millisecond) // virtual time
		for _, id := range w.ids {
			wg.Go(func() { require.NoError(t, w.to[id].Stop(t.Context())) })
		}
		wg.Wait()
	})
}
