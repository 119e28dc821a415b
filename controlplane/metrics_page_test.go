package main

import (
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/docs/docstest"
)

// TestMetricsPage compares docs/metrics.md with the metrics of a running member. It also checks that the ports for
// etcd's clients serve only a part of these metrics, and none with a label for an org, a project, a VM or a host.
func TestMetricsPage(t *testing.T) {
	h := startMember(t)
	h.createResources()
	served := readMetrics(t, h.config.MetricsListen)
	require.Contains(t, served, "trivet_build_info")
	require.Contains(t, served, "trivet_hosts")
	require.Contains(t, served, "trivet_vm_info")
	require.Contains(t, served, "etcd_disk_wal_fsync_duration_seconds")
	require.Contains(t, served, "etcd_disk_backend_commit_duration_seconds")
	require.Contains(t, served, "trivet_member_certificate_expiry_timestamp_seconds")
	require.Positive(t, served["etcd_disk_wal_fsync_duration_seconds"].GetMetric()[0].GetHistogram().GetSampleCount())
	for name, f := range readMetrics(t, h.config.KV.EtcdListen[0]) {
		require.Contains(t, served, name)
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				require.NotContains(t, []string{"org", "project", "vm", "host"}, l.GetName(), name)
			}
		}
	}
	var all []*dto.MetricFamily
	for _, f := range served {
		all = append(all, f)
	}
	docstest.Metrics(t, "../docs/metrics.md", "Members", h.metricRegistries(), all, *rewrite)
}

// metricRegistries returns the registries of the member's metrics.
func (h *testMember) metricRegistries() []*prometheus.Registry {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.listeners {
		if l.name == "metrics" {
			return l.http.(routedHandler).registries
		}
	}
	return nil
}

// readMetrics returns the metrics that are served at an address, by name.
func readMetrics(t *testing.T, address string) map[string]*dto.MetricFamily {
	t.Helper()
	answer, err := http.Get("http://" + address + "/metrics")
	require.NoError(t, err)
	defer answer.Body.Close()
	require.Equal(t, http.StatusOK, answer.StatusCode)
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	require.NoError(t, err)
	return families
}
