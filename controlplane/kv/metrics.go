package kv

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

// counters holds the service's own metrics.
type counters struct {
	pending atomic.Int64 // proposals in flight
	failed  atomic.Int64 // proposals whose outcome was an error
	expired atomic.Int64 // expired leases that this member has revoked
	leaders atomic.Int64 // leader changes seen
	learner atomic.Bool
	term    atomic.Uint64 // for response headers; 0 until Run

	compared      atomic.Int64 // comparisons of members' hashes
	defragmenting atomic.Int64
	hashes        prometheus.Histogram
	defragments   prometheus.Histogram
}

// histograms creates etcd's histograms, with etcd's buckets.
func (c *counters) histograms() {
	c.hashes = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "etcd_mvcc_hash_rev_duration_seconds", Help: "The latency distribution of storage hash by revision operation.",
		Buckets: prometheus.ExponentialBuckets(.01, 2, 15),
	})
	c.defragments = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "etcd_disk_backend_defrag_duration_seconds", Help: "The latency distribution of backend defragmentation.",
		Buckets: prometheus.ExponentialBuckets(.1, 2, 13),
	})
}

// learnerInterval is the interval at which the value of IsLearner is updated.
const learnerInterval = time.Second

// track counts leader changes, and polls whether this member is a learner.
func (c *counters) track(ctx context.Context, a Consensus) {
	tick := time.NewTicker(learnerInterval)
	defer tick.Stop()
	var last uint64
	for {
		changed := a.Changed()
		leader, term := a.Leader()
		c.term.Store(term)
		if leader != 0 && leader != last {
			last = leader
			c.leaders.Add(1)
		}
		if g, err := a.Status(ctx); err == nil {
			c.learner.Store(slices.Contains(g.Learners, a.Self()))
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// IsLearner reports whether this member is a learner; the value may be one second old.
func (s *Service) IsLearner() bool { return s.counters.learner.Load() }

// Collector exports the service's metrics to Prometheus, under etcd's names where etcd has the same metric.
type Collector struct {
	s     *Service
	table []metric
}

// sample holds the values of one collection.
type sample struct {
	group  consensus.GroupStatus
	engine mvcc.Stats
	s      *Service
}

type metric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*sample) float64
}

// NewCollector creates a Collector. Values are read only in Collect.
func NewCollector(s *Service) *Collector {
	c := &Collector{s: s}
	add := func(name, help string, kind prometheus.ValueType, value func(*sample) float64) {
		c.table = append(c.table, metric{prometheus.NewDesc(name, help, nil, nil), kind, value})
	}
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	add("etcd_server_has_leader", "Whether or not a leader exists. 1 is existence, 0 is not.", gauge,
		func(f *sample) float64 { return boolValue(f.group.Leader != 0) })
	add("etcd_server_is_leader", "Whether or not this member is a leader. 1 if is, 0 otherwise.", gauge,
		func(f *sample) float64 { return boolValue(f.group.Leader == f.s.opts.Self) })
	add("etcd_server_is_learner", "Whether or not this member is a learner. 1 if is, 0 otherwise.", gauge,
		func(f *sample) float64 { return boolValue(f.s.IsLearner()) })
	add("etcd_server_leader_changes_seen_total", "The number of leader changes seen.", counter,
		func(f *sample) float64 { return float64(f.s.counters.leaders.Load()) })
	add("etcd_server_proposals_committed_total", "The total number of consensus proposals committed.", gauge,
		func(f *sample) float64 { return float64(f.group.Commit) })
	add("etcd_server_proposals_applied_total", "The total number of consensus proposals applied.", gauge,
		func(f *sample) float64 { return float64(f.group.Applied) })
	add("etcd_server_proposals_pending", "The current number of pending proposals to commit.", gauge,
		func(f *sample) float64 { return float64(f.s.counters.pending.Load()) })
	add("etcd_server_proposals_failed_total", "The total number of failed proposals seen.", counter,
		func(f *sample) float64 { return float64(f.s.counters.failed.Load()) })
	add("etcd_server_quota_backend_bytes", "Current backend storage quota size in bytes.", gauge,
		func(f *sample) float64 { return float64(max(f.s.opts.Quota, 0)) })
	add("etcd_mvcc_db_total_size_in_bytes", "Total size of the keyspace with its history in bytes.", gauge,
		func(f *sample) float64 { return float64(f.s.opts.Engine.Size()) })
	add("etcd_mvcc_db_total_size_in_use_in_bytes", "Size of the keys as they are now in bytes.", gauge,
		func(f *sample) float64 { return float64(f.s.opts.Engine.SizeInUse()) })
	add("etcd_debugging_mvcc_keys_total", "Total number of keys.", gauge, func(f *sample) float64 { return float64(f.engine.Keys) })
	add("etcd_debugging_mvcc_current_revision", "The current revision of store.", gauge,
		func(f *sample) float64 { return float64(f.engine.Revision) })
	add("etcd_debugging_mvcc_compact_revision", "The revision of the last compaction in store.", gauge,
		func(f *sample) float64 { return float64(f.engine.CompactRevision) })
	add("etcd_debugging_mvcc_watcher_total", "Total number of watchers.", gauge, func(f *sample) float64 { return float64(f.engine.Watchers) })
	add("etcd_debugging_server_lease_expired_total", "The total number of expired leases.", counter,
		func(f *sample) float64 { return float64(f.s.counters.expired.Load()) })
	add("trivet_kv_leases", "Leases that this member looks after; 0 unless it leads.", gauge,
		func(f *sample) float64 { return float64(f.s.lessor.count()) })
	add("etcd_disk_defrag_inflight", "Whether or not defrag is active on the member. 1 means active, 0 means not.", gauge,
		func(f *sample) float64 { return boolValue(f.s.counters.defragmenting.Load() > 0) })
	add("trivet_kv_hash_checks_total", "Comparisons of members' hashes that this member has made as the leader.", counter,
		func(f *sample) float64 { return float64(f.s.counters.compared.Load()) })
	add("trivet_kv_alarms", "Active alarms.", gauge, func(f *sample) float64 { return float64(len(f.s.Alarms())) })
	add("trivet_kv_auth_enabled", "Whether etcd's Auth is enabled.", gauge, func(f *sample) float64 { return boolValue(f.s.AuthEnabled()) })
	return c
}

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	for i := range c.table {
		out <- c.table[i].desc
	}
	c.s.counters.hashes.Describe(out)
	c.s.counters.defragments.Describe(out)
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	f := sample{s: c.s, engine: c.s.opts.Engine.Stats()}
	// On an error the group's metrics are those of a group without a leader.
	f.group, _ = c.s.opts.Consensus.Status(ctx)
	for i := range c.table {
		g := &c.table[i]
		out <- prometheus.MustNewConstMetric(g.desc, g.kind, g.value(&f))
	}
	c.s.counters.hashes.Collect(out)
	c.s.counters.defragments.Collect(out)
}
