package mvcc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// crashLog returns a log in which every entry makes several changes that must be atomic.
func crashLog(t *testing.T) (log []command.Command) {
	add := func(data []byte) {
		log = append(log, command.Command{Index: uint64(len(log)) + 1, Term: 1, Data: data})
	}
	for i := range 40 {
		lease := int64(i) + 1
		steps := []command.Step{
			{Kind: command.StepGrant, Lease: lease, TTL: 10},
			{Kind: command.StepPut, Key: fmt.Appendf(nil, "k%d", i%7), Value: make([]byte, 200*(i%5)), Lease: lease},
			{Kind: command.StepPut, Key: fmt.Appendf(nil, "n%d", i), Value: []byte("v")},
			{Kind: command.StepDelete, Key: fmt.Appendf(nil, "n%d", i-3)},
			{Kind: command.StepSetRecord, Key: []byte("count"), Value: fmt.Append(nil, i)},
		}
		if i > 8 {
			steps = append(steps, command.Step{Kind: command.StepRevoke, Lease: lease - 8})
		}
		data, err := command.EncodeProgram(command.Program{Steps: steps})
		require.NoError(t, err)
		add(data)
		if i%10 == 9 {
			add(command.EncodeCompact(int64(i)))
		}
	}
	return log
}

// summary returns, as text, all state that must be the same on each member at the same applied index, whatever Scrub
// has removed.
func summary(t *testing.T, e *Engine) string {
	s := e.Snapshot()
	defer s.Close()
	h, err := e.HashKV(context.Background(), 0)
	require.NoError(t, err)
	leases, err := s.Leases()
	require.NoError(t, err)
	out := fmt.Sprintf("%s hash %v keys %d use %d epoch %d %s leases", content(t, e), h, e.Stats().Keys, e.SizeInUse(), s.Epoch(), s.Records(nil))
	for _, l := range leases {
		keys, err := s.LeaseKeys(l.ID)
		require.NoError(t, err)
		out += fmt.Sprintf(" %d:%s", l.ID, keys)
	}
	return out
}

// crashed applies log, with a Flush or Scrub after most batches. It returns copies of the file system as a crash at
// each write to the disk would leave it.
func crashed(t *testing.T, log []command.Command) []*vfs.MemFS {
	mem := vfs.NewCrashableMem()
	rng := rand.New(rand.NewPCG(1, 1))
	var mu sync.Mutex
	var found []*vfs.MemFS
	recording := false // false until the engine is open: TestOpenCrash tests the creation of its directory
	fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		mu.Lock()
		defer mu.Unlock()
		if recording && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			for _, percent := range []int{0, 50, 100} {
				found = append(found, mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rng}))
			}
		}
		return nil
	}))
	e := mustOpen(t, fs)
	mu.Lock()
	recording = true
	mu.Unlock()
	for at := 0; at < len(log); at += 4 {
		mustApply(t, e, log[at:min(at+4, len(log))]...)
		switch at / 4 % 3 {
		case 0:
			_, err := e.Flush(context.Background())
			require.NoError(t, err)
		case 1:
			_, err := e.Scrub(context.Background(), 20)
			require.NoError(t, err)
		}
	}
	require.NoError(t, e.Close())
	return found
}

// checkCrashes reports whether each crash leaves exactly the state at the applied index, and the rest of the log then
// leads to the same final state.
func checkCrashes(t *testing.T) bool {
	log := crashLog(t)
	want := make([]string, len(log)+1)
	e := newEngine(t)
	want[0] = summary(t, e)
	for i, c := range log {
		mustApply(t, e, c)
		want[i+1] = summary(t, e)
	}
	at := map[uint64]int{}
	for _, fs := range crashed(t, log) {
		e := mustOpen(t, fs)
		applied := e.Applied().Index
		at[applied]++
		ok := summary(t, e) == want[applied]
		if ok && applied < uint64(len(log)) {
			mustApply(t, e, log[applied:]...)
			ok = summary(t, e) == want[len(log)]
		}
		for done := false; ok && !done; {
			var err error
			done, err = e.Scrub(context.Background(), 7)
			require.NoError(t, err)
			ok = summary(t, e) == want[len(log)]
		}
		require.NoError(t, e.Close())
		if !ok {
			return false
		}
	}
	require.Greater(t, len(at), 3, "%v", at)
	return true
}

func TestCrash(t *testing.T) {
	require.False(t, mutant.On(mutant.SplitAppliedIndex))
	require.True(t, checkCrashes(t))
}
