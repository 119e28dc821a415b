package vm

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

// TestDrainMetrics compares the exported values with the progress of a drain: while VMs move, after a move has failed,
// for a VM that cannot be moved, and after the drain has ended.
func TestDrainMetrics(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1", withFeatures)
	middle, high, fixed := w.runs("middle"), w.runs("high", priority("99")), w.runs("fixed", withTPM)
	w.createInState(cloud.Stopped, "off")
	h2 := w.migrationHost("h2")
	collector := NewDrainCollector(w.vms)
	// exported returns the values that are not 0.
	exported := func() map[string]float64 {
		out := map[string]float64{}
		for name, value := range metricstest.Values(t, collector) {
			if value != 0 {
				out[strings.ReplaceAll(strings.TrimPrefix(name, "trivet_drain_"), string(h1), "h1")] = value
			}
		}
		return out
	}
	require.Empty(t, exported())

	w.drain(h1, false, 600)
	w.stepDrains()
	deadline := float64(w.Node(h1).Drain.Deadline) / 1000
	require.InDelta(t, float64(w.Node(h1).Drain.Began)/1000+600, deadline, 0.001)
	require.Equal(t, map[string]float64{
		"vms h1 MOVING": 2, "vms h1 CANNOT_MOVE": 1, "vms h1 STAYS": 1, "deadline_timestamp_seconds h1": deadline,
	}, exported(), w.progress(h1))
	w.awaitMigrations(2)
	w.tell(w.get(middle), h2, cloud.MigrationFailed)
	w.reportAbsent(h2, middle, w.get(middle).Generation)
	w.arrive(high)
	w.awaitMigrations(0)
	w.stepDrains()
	require.Equal(t, map[string]float64{
		"vms h1 WAITING": 1, "vms h1 MOVED": 1, "vms h1 CANNOT_MOVE": 1, "vms h1 STAYS": 1, "failed_tries h1": 1, "deadline_timestamp_seconds h1": deadline,
	}, exported(), w.progress(h1))
	require.Equal(t, cloud.Running, w.get(fixed).State)

	w.uncordon(h1)
	require.Empty(t, exported())
}
