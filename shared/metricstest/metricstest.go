// Package metricstest reads the values of Prometheus collectors, for tests. Its only function is [Values].
package metricstest

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// Values returns the values of the counters and gauges of a collector. A key is the name of the metric, followed by the
// values of its labels in the alphabetical order of their names, all separated by spaces. The collector is registered in
// a pedantic registry, which refuses metrics that the collector does not describe.
func Values(t testing.TB, c prometheus.Collector) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(c))
	families, err := registry.Gather()
	require.NoError(t, err)
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() {
				key += " " + l.GetValue()
			}
			values[key] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return values
}
