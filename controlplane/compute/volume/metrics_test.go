package volume

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

// TestMetrics checks the number and the size of volumes in the metrics, by storage class and status.
func TestMetrics(t *testing.T) {
	w := newEncryptedWorld(t)
	host := w.host("h1", 10)
	w.create("a", 1)
	w.create("b", 2)
	used := w.createSecret("c")
	require.NoError(t, w.attach(used.ID, vmA, host))
	failed := w.createSecret("d")
	require.NoError(t, w.attach(failed.ID, vmA, host))
	w.release(failed.ID, vmA)
	w.report(host, cloud.VolumeObservation{
		Volume: failed.ID, Generation: w.get(failed.ID).Generation, FlushedGeneration: 1, Error: "the storage pool is full",
	})
	const gib = 1 << 30
	require.Equal(t, map[string]float64{
		"trivet_volumes AVAILABLE local": 2, "trivet_volumes IN_USE local": 0, "trivet_volumes ERROR local": 0,
		"trivet_volumes AVAILABLE secret": 0, "trivet_volumes IN_USE secret": 1, "trivet_volumes ERROR secret": 1,
		"trivet_volume_bytes AVAILABLE local": 3 * gib, "trivet_volume_bytes IN_USE local": 0, "trivet_volume_bytes ERROR local": 0,
		"trivet_volume_bytes AVAILABLE secret": 0, "trivet_volume_bytes IN_USE secret": gib, "trivet_volume_bytes ERROR secret": gib,
	}, metricstest.Values(t, NewCollector(w.Store)))
}
