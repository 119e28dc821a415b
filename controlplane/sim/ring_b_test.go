package sim_test

import (
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/sim"
	"github.com/trivet-cloud/trivet/controlplane/sim/live"
)

// The variable happened lists events each of which must happen in a test run of 30 or more seeds.
var happened = []string{
	"VMs that were migrated", "migrations that were undone", "sources lost before the switchover", "volumes of migrated VMs",
	"drains", "hosts in maintenance", "drains that ended early", "hosts banned", "hosts evicted",
	"members killed", "all members killed", "members cut off", "links between members cut", "hosts cut off",
	"links between hosts and members cut", "agents restarted", "hosts restarted", "guests that crash", "guests that power off",
	"delayed reports", "bursts of creates", "long host outages", "network healed", "VMs created", "VMs deleted", "calls repeated", "calls refused", "lists checked",
	"launches", "commits", "agent sessions", "snapshots",
	"network resources created", "network resources deleted", "NICs attached or detached", "addresses assigned again", "ports ACTIVE",
	"ports with ERROR", "VPC failures reported", "network acknowledgments", "slow network acknowledgments", "network streams replaced",
	"floating IPs moved", "floating IPs served", "route tables changed", "network snapshots compared", "network calls repeated after success",
	"volumes created", "volumes deleted", "volumes attached", "volumes detached", "volumes made", "volumes opened", "volumes deleted on hosts",
	"snapshots created", "snapshots begun", "snapshots complete", "snapshots interrupted", "snapshots deleted", "volumes made from snapshots",
	"volumes moved", "RBD images made", "RBD images opened", "RBD images deleted",
	"shared volumes made", "shared volumes opened", "shared volumes deleted", "shared volumes moved",
	"volumes flattened", "scheduled snapshots",
}

// TestRingB runs ring (b) with one seed after the other, for 20 seconds or for TRIVET_SIM_SECONDS, and fails at the
// first violated guarantee. With TRIVET_SIM_SEED it begins with that seed, and runs only that seed unless
// TRIVET_SIM_SECONDS is set.
func TestRingB(t *testing.T) {
	first, one := setting(t, sim.SeedVariable)
	seconds, given := setting(t, sim.SecondsVariable)
	switch {
	case given:
		one = false
	case testing.Short():
		seconds = 5
	default:
		seconds = 20
	}
	defer debug.SetGCPercent(debug.SetGCPercent(800)) // less garbage collection: a run leaves little in memory
	total := map[string]int{}
	began := time.Now()
	count := uint64(0)
	for ; count == 0 || !one && time.Since(began) < time.Duration(seconds)*time.Second; count++ {
		out, err := live.Run(t, first+count)
		if err != nil || one {
			save(t, out.Trace)
		}
		if err != nil {
			t.Fatal(err)
		}
		add(total, out.Counts)
	}
	t.Logf("ring (b): %d seeds from %d in %s", count, first, time.Since(began).Round(time.Millisecond))
	list(t, total)
	if count >= 30 {
		for _, what := range happened {
			require.NotZero(t, total[what], "no run had any %s", what)
		}
	}
}
