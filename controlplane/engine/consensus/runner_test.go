package consensus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// memoryNetwork delivers envelopes between Runners in memory. cut has the members that are isolated.
type memoryNetwork struct {
	mu  sync.Mutex
	ids []uint64
	to  map[uint64]*runnerMember
	cut map[uint64]bool

	forward bool
	slow    map[uint64]*slowDisk // by member; absent: a disk without delay
	disks   map[uint64]vfs.FS    // by member, instead of the member's own disk
	tail    uint64               // Limits.TailEntries; default 100
}

type runnerMember struct {
	*Runner
	w       *memoryNetwork
	id      uint64
	fs      *vfs.MemFS
	machine *testMachine
	n       int
}

func (m *runnerMember) reachable(id uint64) *runnerMember {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	if m.w.cut[m.id] || m.w.cut[id] {
		return nil
	}
	return m.w.to[id]
}

func (m *runnerMember) Send(e message.Envelope) {
	if to := m.reachable(e.To); to != nil {
		to.Deliver(e)
	}
}

func (m *runnerMember) SendSnapshot(e message.Envelope, dir string) {
	to := m.reachable(e.To)
	ok := false
	if to != nil {
		to.n++
		in := fmt.Sprintf("%s/in-%d", to.SnapshotDir(), to.n)
		ok = vfsCopy(m.fs, dir, to.fs, in) == nil && to.DeliverSnapshot(e, in) == nil
	}
	m.ReportSnapshot(e.Group, e.To, ok)
}

func vfsCopy(from vfs.FS, fromDir string, to vfs.FS, toDir string) error {
	_, err := vfs.Clone(from, to, fromDir, toDir, vfs.CloneSync)
	return err
}

func startRunners(t testing.TB, n int, opts RunnerOptions) *memoryNetwork {
	w := &memoryNetwork{to: map[uint64]*runnerMember{}, cut: map[uint64]bool{}}
	for id := range uint64(n) {
		w.ids = append(w.ids, id+1)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range w.ids {
		w.start(t, id, vfs.NewCrashableMem(), opts)
	}
	return w
}

// start starts a member on fs. The caller must have locked w.mu, unless no other member runs.
func (w *memoryNetwork) start(t testing.TB, id uint64, fs *vfs.MemFS, opts RunnerOptions) *runnerMember {
	m := &runnerMember{w: w, id: id, fs: fs}
	var disk vfs.FS = fs
	if slow := w.slow[id]; slow != nil {
		disk = errorfs.Wrap(fs, slow)
	}
	if other := w.disks[id]; other != nil {
		disk = other
	}
	h, err := Open(Options{
		ID: id, Members: w.ids, Dir: "/consensus", FS: disk, Transport: m, Log: slog.New(slog.DiscardHandler),
		Limits: Limits{TailEntries: cmp.Or(w.tail, 100)},
	})
	require.NoError(t, err)
	m.machine, err = openTestMachine(disk, "/state")
	require.NoError(t, err)
	_, err = h.AddGroup(GroupOptions{ID: testGroup, Name: "test", Machine: m.machine, Forward: w.forward})
	require.NoError(t, err)
	m.Runner = Start(h, opts)
	w.to[id] = m
	return m
}

func (w *memoryNetwork) stop(t testing.TB) {
	for _, id := range w.ids {
		require.NoError(t, w.to[id].Stop(t.Context()))
	}
}

// lead waits until all members, or only those in among, report the same leader, and returns it.
func (w *memoryNetwork) lead(t testing.TB, among ...uint64) *runnerMember {
	if len(among) == 0 {
		among = w.ids
	}
	type news struct{ member, leader uint64 }
	heard, over := make(chan news), make(chan struct{})
	var wg sync.WaitGroup
	for _, id := range among {
		changes, stop := w.to[id].Leads(testGroup)
		defer stop()
		wg.Go(func() {
			for {
				select {
				case l := <-changes:
					select {
					case heard <- news{id, l.Leader}:
					case <-over:
						return
					}
				case <-over:
					return
				}
			}
		})
	}
	defer wg.Wait()
	defer close(over)
	reported := map[uint64]uint64{}
	leader := uint64(0)
	for agree := false; !agree; {
		n := <-heard
		reported[n.member], leader = n.leader, n.leader
		agree = leader != 0 && !w.cut[leader]
		for _, id := range among {
			agree = agree && reported[id] == leader
		}
	}
	require.NotZero(t, leader)
	return w.to[leader]
}

func TestRunners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w := startRunners(t, 3, RunnerOptions{})
		l := w.lead(t)
		got, err := l.Propose(ctx, testGroup, [16]byte{1}, []byte("a=1"))
		require.NoError(t, err)
		require.Equal(t, `a was ""`, got)
		for _, id := range w.ids {
			m := w.to[id]
			require.NoError(t, m.ReadIndex(ctx, testGroup))
			status, err := m.Status(ctx)
			require.NoError(t, err)
			require.Equal(t, l.id, status.Groups[0].Leader)
			require.Equal(t, l.id, m.Leader(testGroup).Leader)
			if m != l {
				_, err = m.Propose(ctx, testGroup, [16]byte{2}, []byte("a=2"))
				var elsewhere *NotLeaderError
				require.ErrorAs(t, err, &elsewhere)
				require.Equal(t, l.id, elsewhere.Leader)
			}
			_, err = m.Propose(ctx, 99, [16]byte{2}, nil)
			require.ErrorIs(t, err, ErrNoGroup)
			require.ErrorIs(t, m.ReadIndex(ctx, 99), ErrNoGroup)
			require.ErrorIs(t, m.TransferLeader(ctx, 99, 0), ErrNoGroup)
		}
		// 500 concurrent proposals and reads.
		var wg sync.WaitGroup
		for i := range 500 {
			wg.Go(func() {
				_, err := l.Propose(ctx, testGroup, [16]byte{3}, fmt.Appendf(nil, "b=%d", i))
				require.NoError(t, err)
				require.NoError(t, w.to[w.ids[i%3]].ReadIndex(ctx, testGroup))
			})
		}
		wg.Wait()
		to := w.ids[l.id%3]
		require.NoError(t, l.TransferLeader(ctx, testGroup, to))
		require.Same(t, w.to[to], w.lead(t))
		w.stop(t)
		for _, id := range w.ids {
			require.Len(t, w.to[id].machine.Log, 501, "member %d", id)
		}
	})
}

// TestStopTransfersLeadership checks that Stop transfers leadership first, so that the other members need not wait for
// an election timeout.
func TestStopTransfersLeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w := startRunners(t, 3, RunnerOptions{})
		l := w.lead(t)
		// A leader that was just elected may have no follower yet that has the entire log.
		for _, at := range w.to {
			for status, err := at.Status(ctx); err == nil && status.Groups[0].Commit < 2; status, err = at.Status(ctx) {
				time.Sleep(10 * time.Millisecond) // virtual time
			}
		}
		start := time.Now()
		require.NoError(t, l.Stop(ctx))
		require.Less(t, time.Since(start), 500*time.Millisecond, "Stop returns before an election timeout, in virtual time")
		require.ErrorIs(t, l.Err(), ErrStopped)
		_, err := l.Propose(ctx, testGroup, [16]byte{}, []byte("a=1"))
		require.ErrorIs(t, err, ErrStopped)
		require.ErrorIs(t, l.ReadIndex(ctx, testGroup), ErrStopped)
		require.False(t, l.Deliver(message.Envelope{}))
		changes, _ := l.Leads(testGroup)
		_, open := <-changes
		require.False(t, open)
		<-l.Done()
		require.NoError(t, l.Stop(ctx), "a second Stop returns nil")
		var rest []uint64
		for _, id := range w.ids {
			if id != l.id {
				rest = append(rest, id)
			}
		}
		for at := w.to[rest[0]]; at.Leader(testGroup).Leader == l.id || at.Leader(testGroup).Leader == 0; {
			time.Sleep(time.Millisecond) // virtual time, until the change of leader arrives
		}
		next := w.to[w.to[rest[0]].Leader(testGroup).Leader]
		_, err = next.Propose(ctx, testGroup, [16]byte{}, []byte("a=1"))
		require.NoError(t, err)
		require.Less(t, time.Since(start), 500*time.Millisecond, "no member waits for an election timeout, in virtual time")
		w.stop(t)
	})
}

func TestCanceledCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := startRunners(t, 3, RunnerOptions{})
		l := w.lead(t)
		w.mu.Lock()
		w.cut[l.id] = true
		w.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := l.Propose(ctx, testGroup, [16]byte{}, []byte("a=1"))
		require.ErrorIs(t, err, ErrUncertain)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, l.ReadIndex(ctx, testGroup), context.DeadlineExceeded)
		require.ErrorIs(t, l.TransferLeader(ctx, testGroup, 0), context.DeadlineExceeded)

		// Calls with a longer deadline get a result, too.
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := l.Propose(t.Context(), testGroup, [16]byte{}, []byte("a=1"))
			var elsewhere *NotLeaderError
			require.True(t, errors.Is(err, ErrUncertain) || errors.As(err, &elsewhere), "%v", err)
		})
		wg.Go(func() { require.ErrorIs(t, l.ReadIndex(t.Context(), testGroup), ErrNoLeader) })
		wg.Wait()
		time.Sleep(20 * time.Second) // virtual time
		status, err := l.Status(t.Context())
		require.NoError(t, err)
		require.Zero(t, status.Groups[0].Reads)
		require.Zero(t, status.Groups[0].Proposals)
		w.mu.Lock()
		w.cut[l.id] = false
		w.mu.Unlock()
		time.Sleep(5 * time.Second) // virtual time
		w.stop(t)
	})
}

func TestRunnerInboxIsBounded(t *testing.T) {
	w := &memoryNetwork{ids: []uint64{1}, to: map[uint64]*runnerMember{}}
	m := w.start(t, 1, vfs.NewCrashableMem(), RunnerOptions{Envelopes: 3, Calls: 2})
	w.lead(t)
	hold, held := make(chan struct{}), make(chan struct{})
	require.NoError(t, m.call(func() { close(held); <-hold }, true))
	<-held
	for i := range 5 {
		require.Equal(t, i < 3, m.Deliver(message.Envelope{}))
	}
	calls := 0 // the Runner's own goroutines may have queued calls, too
	for m.call(func() {}, false) == nil {
		calls++
	}
	require.LessOrEqual(t, calls, 2)
	_, err := m.Propose(t.Context(), testGroup, [16]byte{}, []byte("a=1"))
	require.ErrorIs(t, err, ErrOverloaded)
	require.ErrorIs(t, m.ReadIndex(t.Context(), testGroup), ErrOverloaded)
	close(hold)
	w.stop(t)
}

// TestRunnerStopsWithHost checks that a failed host stops its Runner, and that every call then returns the cause.
func TestRunnerStopsWithHost(t *testing.T) {
	w := &memoryNetwork{ids: []uint64{1}, to: map[uint64]*runnerMember{}}
	m := w.start(t, 1, vfs.NewCrashableMem(), RunnerOptions{})
	w.lead(t)
	require.NoError(t, m.call(func() { m.machine.applyErr = errors.New("disk on fire") }, true))
	_, err := m.Propose(t.Context(), testGroup, [16]byte{}, []byte("a=1"))
	require.ErrorContains(t, err, "disk on fire")
	<-m.Done()
	require.ErrorContains(t, m.Err(), "disk on fire")
	require.ErrorContains(t, m.ReadIndex(t.Context(), testGroup), "disk on fire")
	require.ErrorContains(t, m.Stop(t.Context()), "disk on fire")
}

// TestRunnersSendSnapshots checks that a member recovers by a snapshot after the others have truncated the entries that
// it missed.
func TestRunnersSendSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := startRunners(t, 3, RunnerOptions{})
		l := w.lead(t)
		away := w.to[w.ids[l.id%3]]
		require.NoError(t, away.Stop(t.Context()))
		for i := range 300 {
			_, err := l.Propose(t.Context(), testGroup, [16]byte{}, fmt.Appendf(nil, "a=%d", i))
			require.NoError(t, err)
		}
		w.mu.Lock()
		back := w.start(t, away.id, away.fs, RunnerOptions{})
		w.mu.Unlock()
		require.NoError(t, back.ReadIndex(t.Context(), testGroup))
		require.Equal(t, 1, back.n)
		w.stop(t)
		require.Equal(t, "299", back.machine.Values["a"])
	})
}

func TestOnRealDisk(t *testing.T) {
	dir := t.TempDir()
	for i := range 3 {
		machine, err := openTestMachine(vfs.Default, dir+"/state")
		require.NoError(t, err)
		h, err := Open(Options{ID: 1, Members: []uint64{1}, Dir: dir + "/consensus", Transport: &runnerMember{}, Log: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		_, err = h.AddGroup(GroupOptions{ID: testGroup, Machine: machine})
		require.NoError(t, err)
		r := Start(h, RunnerOptions{})
		require.NoError(t, r.ReadIndex(t.Context(), testGroup))
		require.Len(t, machine.Log, i, "the proposals of earlier runs are recovered from the log")
		_, err = r.Propose(t.Context(), testGroup, [16]byte{}, fmt.Appendf(nil, "a=%d", i))
		require.NoError(t, err)
		require.NoError(t, r.Stop(t.Context()))
	}
}
