package sim_test

import (
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/sim"
	"github.com/trivet-cloud/trivet/controlplane/sim/steps"
)

// ringASeeds returns the number of seeds that TestRingA runs by default.
func ringASeeds() uint64 {
	switch {
	case raceEnabled:
		return 50
	case testing.Short():
		return 100
	}
	return 1000
}

// The variable needed lists events each of which must happen in a test run of 300 or more schedules. Without them, the
// checks would have had nothing to find.
var needed = []string{
	"writes acknowledged", "notes acknowledged", "notes that share an entry", "linearizable reads", "orders replayed", "conflicts", "proposals repeated", "retries answered",
	"outcomes unknown", "proposals forwarded", "batches watched", "watches restarted", "tables listed in pages", "compactions", "scrubs",
	"crashes", "crashes of all members", "crashes during work", "orderly restarts", "disks wiped", "wiped members refused",
	"snapshots sent", "snapshots installed", "leaders transferred", "terms with a leader", "packets lost", "packets delayed for long", "crashes while a snapshot is installed", "packets repeated",
	"network cut from all", "network cut one way", "slow disks", "frozen members", "clock jumps",
}

// TestRingA runs ring (a) with one seed after the other and fails at the first violated guarantee. With TRIVET_SIM_SEED
// it runs only that seed, or as many seeds from there on as TRIVET_SIM_SEEDS says.
func TestRingA(t *testing.T) {
	first, one := setting(t, sim.SeedVariable)
	count, given := setting(t, sim.SeedsVariable)
	switch {
	case given:
	case one:
		count = 1
	default:
		count = ringASeeds()
	}
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // less garbage collection: a schedule leaves little in memory
	total := map[string]int{}
	began := time.Now()
	for seed := first; seed < first+count; seed++ {
		out, err := steps.Schedule(seed)
		if err != nil || one && count == 1 {
			save(t, out.Trace)
		}
		if err != nil {
			t.Fatal(err)
		}
		add(total, out.Counts)
	}
	t.Logf("ring (a): %d schedules from seed %d in %s", count, first, time.Since(began).Round(time.Millisecond))
	list(t, total)
	if count >= 300 {
		for _, what := range needed {
			require.NotZero(t, total[what], "no schedule had any %s", what)
		}
	}
}

// TestReplay checks that two runs of ring (a) with the same seed have the same trace and the same events.
func TestReplay(t *testing.T) {
	seeds := uint64(20)
	if raceEnabled || testing.Short() {
		seeds = 5
	}
	for seed := range seeds {
		first, err := steps.Schedule(seed)
		require.NoError(t, err)
		second, err := steps.Schedule(seed)
		require.NoError(t, err)
		if first.Trace != second.Trace {
			a, b := differ(first.Trace, second.Trace)
			t.Fatalf("the traces of two runs with seed %d differ:\n%s\nand\n%s", seed, a, b)
		}
		require.Equal(t, first.Counts, second.Counts)
	}
}

// differ returns, for each of two traces, up to 300 bytes before and after their first difference.
func differ(a, b string) (string, string) {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	from := max(n-300, 0)
	return a[from:min(n+300, len(a))], b[from:min(n+300, len(b))]
}
