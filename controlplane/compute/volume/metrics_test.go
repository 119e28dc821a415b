package volume

import (
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
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
	registry := prometheus.NewRegistry()
	registry.MustRegister(NewCollector(w.Store))
	families, err := registry.Gather()
	require.NoError(t, err)
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			class, status := m.GetLabel()[1], m.GetLabel()[0]
			values[fmt.Sprintf("%s %s %s", f.GetName(), class.GetValue(), status.GetValue())] = m.GetGauge().GetValue()
		}
	}
	const gib = 1 << 30
	require.Equal(t, map[string]float64{
		"trivet_volumes local AVAILABLE": 2, "trivet_volumes local IN_USE": 0, "trivet_volumes local ERROR": 0,
		"trivet_volumes secret AVAILABLE": 0, "trivet_volumes secret IN_USE": 1, "trivet_volumes secret ERROR": 1,
		"trivet_volume_bytes local AVAILABLE": 3 * gib, "trivet_volume_bytes local IN_USE": 0, "trivet_volume_bytes local ERROR": 0,
		"trivet_volume_bytes secret AVAILABLE": 0, "trivet_volume_bytes secret IN_USE": gib, "trivet_volume_bytes secret ERROR": gib,
	}, values)
}
