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
	"github.com/trivet-cloud/trivet/shared/version"
)

// metrics holds the Prometheus registries of a member and the metrics of its servers.
type metrics struct {
	registry *prometheus.Registry
	// names is the registry of the metrics that have labels with IDs or names of hosts, orgs, projects and VMs. The
	// ports for etcd's clients, which tenants can reach, do not serve these metrics.
	names *prometheus.Registry
	grpc  *grpcprom.ServerMetrics
	http  *rest.Metrics
	disk  diskMetrics
	// handler serves the metrics of both registries. etcdHandler serves only those of registry.
	handler, etcdHandler routedHandler
}

// diskMetrics are histograms with etcd's names and buckets, so that etcd's alert rules and dashboards can be used.
type diskMetrics struct{ logSync, storeCommit prometheus.Histogram }

func newDiskMetrics(r prometheus.Registerer) diskMetrics {
	buckets := prometheus.ExponentialBuckets(.001, 2, 14)
	m := diskMetrics{
		logSync: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "etcd_disk_wal_fsync_duration_seconds", Buckets: buckets,
			Help: "Duration of a write to the raft log, including fsync. Both raft groups share the log.",
		}),
		storeCommit: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "etcd_disk_backend_commit_duration_seconds", Buckets: buckets,
			Help: "Duration of a commit of applied entries to the store of a raft group. It includes no fsync: " +
				"after a crash, the entries are read from the raft log.",
		}),
	}
	r.MustRegister(m.logSync, m.storeCommit)
	return m
}

func newMetrics() *metrics {
	registry, names := prometheus.NewRegistry(), prometheus.NewRegistry()
	m := &metrics{registry: registry, names: names, grpc: grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram())}
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "trivet_build_info", Help: "Version of the member, as a label. The value is 1.",
	}, []string{"version"})
	build.WithLabelValues(version.Version()).Set(1)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), m.grpc, build)
	m.http, m.disk = rest.NewMetrics(registry), newDiskMetrics(registry)
	m.handler, m.etcdHandler = metricsHandler(registry, names), metricsHandler(registry)
	return m
}

// register adds the metrics of the member in the parameter of: its clock, disk space, raft groups, engines, key-value
// store, certificate, administrator's token and audit.
func (m *metrics) register(of *member) {
	m.registry.MustRegister(of.clock, of.space, &collector{runner: of.runner, engines: of.engines},
		&costs{runner: of.runner, engines: of.engines, identities: of.identities}, kv.NewCollector(of.keys), &loginCollector{of.identities},
		&certificateCollector{of.certificate}, &adminTokenCollector{of.config.DataDir}, of.audits, of.backups, of.tenantTLS.pair)
}

// collector exports the state of the raft groups and of their storage engines.
type collector struct {
	runner  *consensus.Runner
	engines map[uint64]*mvcc.Engine
}

// gauges lists the metrics of collector. Each has one value per raft group. The function group computes it from raft's
// status, or the function state from the engine's statistics.
var gauges = []struct {
	desc    *prometheus.Desc
	counter bool // the metric is a counter, not a gauge
	group   func(consensus.GroupStatus) float64
	state   func(mvcc.Stats) float64
}{
	{desc: gauge("raft_term", "Term of the raft group."), group: func(g consensus.GroupStatus) float64 { return float64(g.Term) }},
	{desc: gauge("raft_leader", "ID of the member that leads the raft group; 0 if none is known."), group: func(g consensus.GroupStatus) float64 { return float64(g.Leader) }},
	{desc: gauge("raft_is_leader", "1 if this member leads the raft group, otherwise 0."), group: func(g consensus.GroupStatus) float64 {
		if g.Role == "Leader" {
			return 1
		}
		return 0
	}},
	{desc: gauge("raft_committed_index", "Index of the last committed entry of the raft group."), group: func(g consensus.GroupStatus) float64 { return float64(g.Commit) }},
	{desc: gauge("raft_applied_index", "Index of the last entry of the raft group that this member has applied."), group: func(g consensus.GroupStatus) float64 { return float64(g.Applied) }},
	{desc: gauge("raft_proposals_waiting", "Proposals of this member that have no result yet."), group: func(g consensus.GroupStatus) float64 { return float64(g.Proposals) }},
	{desc: gauge("raft_log_bytes", "Size of the log of the raft group."), group: func(g consensus.GroupStatus) float64 { return float64(g.LogBytes) }},
	{desc: gauge("store_revision", "Newest revision of the store."), state: func(s mvcc.Stats) float64 { return float64(s.Revision) }},
	{desc: gauge("store_compacted_revision", "Oldest revision of the store that can be read."), state: func(s mvcc.Stats) float64 { return float64(s.CompactRevision) }},
	{desc: gauge("store_keys", "Keys at the newest revision of the store."), state: func(s mvcc.Stats) float64 { return float64(s.Keys) }},
	{desc: gauge("store_disk_bytes", "Size of the store on disk."), state: func(s mvcc.Stats) float64 { return float64(s.DiskBytes) }},
	{desc: gauge("store_unsaved_bytes", "Size of the changes that are in memory and in the log, but not yet in the files of the store."), state: func(s mvcc.Stats) float64 { return float64(s.UnsavedBytes) }},
	{desc: gauge("store_watchers", "Open watches of the store."), state: func(s mvcc.Stats) float64 { return float64(s.Watchers) }},
	{desc: gauge("store_disk_errors_total", "Background writes of the store that have failed since the member started."), counter: true,
		state: func(s mvcc.Stats) float64 { return float64(s.DiskErrors) }},
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
		kind := prometheus.GaugeValue
		if g.counter {
			kind = prometheus.CounterValue
		}
		if g.group != nil && err == nil {
			for _, s := range status.Groups {
				out <- prometheus.MustNewConstMetric(g.desc, kind, g.group(s), names[s.ID])
			}
		}
		if g.state != nil {
			for id, e := range c.engines {
				out <- prometheus.MustNewConstMetric(g.desc, kind, g.state(e.Stats()), names[id])
			}
		}
	}
}

// routedHandler is a handler with a list of its routes, like rest.Server. The authorization test calls each of these
// routes.
type routedHandler struct {
	http.Handler
	routes []rest.Route
	// registries has the registries whose metrics the handler serves. A test compares them with docs/metrics.md.
	registries []*prometheus.Registry
}

// Routes returns the method and path of every endpoint of the handler.
func (r routedHandler) Routes() []rest.Route { return r.routes }

// metricsHandler returns a handler that serves the metrics of registries at /metrics.
func metricsHandler(registries ...*prometheus.Registry) routedHandler {
	var all prometheus.Gatherers
	for _, r := range registries {
		all = append(all, r)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(all, promhttp.HandlerOpts{}))
	routes := []rest.Route{{Method: http.MethodGet, Path: "/metrics",
		Open: "metrics, for callers that can reach a port for operators, and for callers on this host"}}
	return routedHandler{mux, routes, registries}
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
