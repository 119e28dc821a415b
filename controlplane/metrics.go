package main

import (
	"context"
	"net/http"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// metrics holds the Prometheus registry of a member and the metrics of its servers.
type metrics struct {
	registry *prometheus.Registry
	grpc     *grpcprom.ServerMetrics
	http     *rest.Metrics
	handler  routedHandler // serves /metrics
}

func newMetrics() *metrics {
	registry := prometheus.NewRegistry()
	m := &metrics{registry: registry, grpc: grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram())}
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), m.grpc)
	m.http, m.handler = rest.NewMetrics(registry), metricsHandler(registry)
	return m
}

// register adds the metrics of the member in the parameter of: its clock, disk space, raft groups, engines, key-value
// store and certificate.
func (m *metrics) register(of *member) {
	m.registry.MustRegister(of.clock, of.space, &collector{runner: of.runner, engines: of.engines},
		&costs{runner: of.runner, engines: of.engines, identities: of.identities}, kv.NewCollector(of.keys))
	if of.tenantTLS.pair != nil {
		m.registry.MustRegister(of.tenantTLS.pair)
	}
}

// collector exports the state of the raft groups and of their storage engines.
type collector struct {
	runner  *consensus.Runner
	engines map[uint64]*mvcc.Engine
}

// gauges lists the metrics of collector. Each has one value per raft group. The function group computes it from raft's
// status, or the function state from the engine's statistics.
var gauges = []struct {
	desc  *prometheus.Desc
	group func(consensus.GroupStatus) float64
	state func(mvcc.Stats) float64
}{
	{desc: gauge("raft_term", "Term of the group."), group: func(g consensus.GroupStatus) float64 { return float64(g.Term) }},
	{desc: gauge("raft_leader", "Member that leads the group, 0 if none is known."), group: func(g consensus.GroupStatus) float64 { return float64(g.Leader) }},
	{desc: gauge("raft_committed_index", "Last committed entry."), group: func(g consensus.GroupStatus) float64 { return float64(g.Commit) }},
	{desc: gauge("raft_applied_index", "Last applied entry."), group: func(g consensus.GroupStatus) float64 { return float64(g.Applied) }},
	{desc: gauge("raft_proposals_waiting", "Proposals under way on this member."), group: func(g consensus.GroupStatus) float64 { return float64(g.Proposals) }},
	{desc: gauge("raft_log_bytes", "Size of the group's log."), group: func(g consensus.GroupStatus) float64 { return float64(g.LogBytes) }},
	{desc: gauge("store_revision", "Newest revision."), state: func(s mvcc.Stats) float64 { return float64(s.Revision) }},
	{desc: gauge("store_compacted_revision", "Oldest revision that can be read."), state: func(s mvcc.Stats) float64 { return float64(s.CompactRevision) }},
	{desc: gauge("store_keys", "Live keys."), state: func(s mvcc.Stats) float64 { return float64(s.Keys) }},
	{desc: gauge("store_disk_bytes", "Size on disk."), state: func(s mvcc.Stats) float64 { return float64(s.DiskBytes) }},
	{desc: gauge("store_unsaved_bytes", "In memory only; the log has it."), state: func(s mvcc.Stats) float64 { return float64(s.UnsavedBytes) }},
	{desc: gauge("store_watchers", "Watchers."), state: func(s mvcc.Stats) float64 { return float64(s.Watchers) }},
	{desc: gauge("store_disk_errors", "Failed background writes since start."), state: func(s mvcc.Stats) float64 { return float64(s.DiskErrors) }},
}

func gauge(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("trivet_"+name, help, []string{"group"}, nil)
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, g := range gauges {
		out <- g.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	status, err := c.runner.Status(ctx)
	names := layout.Names()
	for _, g := range gauges {
		if g.group != nil && err == nil {
			for _, s := range status.Groups {
				out <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.group(s), names[s.ID])
			}
		}
		if g.state != nil {
			for id, e := range c.engines {
				out <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.state(e.Stats()), names[id])
			}
		}
	}
}

// routedHandler is a handler with a list of its routes, like rest.Server. The authorization test calls each of these
// routes.
type routedHandler struct {
	http.Handler
	routes []rest.Route
}

// Routes returns the method and path of every endpoint of the handler.
func (r routedHandler) Routes() []rest.Route { return r.routes }

func metricsHandler(registry *prometheus.Registry) routedHandler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return routedHandler{mux, []rest.Route{{Method: http.MethodGet, Path: "/metrics", Open: "counts, for those who reach a port of the operator's or call from this host"}}}
}

// localMetrics returns a handler that serves /metrics to callers on loopback and passes all other requests to the
// handler other. It refuses requests for /metrics from web pages, including those by DNS rebinding (rest.CheckPage).
func localMetrics(metrics, other http.Handler, hosts []string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" || !rest.FromLoopback(r) {
			other.ServeHTTP(w, r)
			return
		}
		if err := rest.CheckPage(r, hosts); err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		metrics.ServeHTTP(w, r)
	})
}
