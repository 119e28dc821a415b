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

// counters holds the metrics that the Service counts itself.
type counters struct {
	pending atomic.Int64 // proposals in flight
	failed  atomic.Int64 // proposals whose outcome was an error
	expired atomic.Int64 // expired leases that this member has revoked
	leaders atomic.Int64 // changes of leader that this member has noticed
	learner atomic.Bool
	term    atomic.Uint64 // raft term for response headers; 0 until Run has started

	compared      atomic.Int64 // completed comparisons of all members' hashes
	defragmenting atomic.Int64
	hashes        prometheus.Histogram
	defragments   prometheus.Histogram
}

// histograms creates the histograms, with etcd's names and buckets.
func (c *counters) histograms() {
	c.hashes = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "etcd_mvcc_hash_rev_duration_seconds", Help: "Time to hash the keyspace up to a revision, in seconds.",
		Buckets: prometheus.ExponentialBuckets(.01, 2, 15),
	})
	c.defragments = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "etcd_disk_backend_defrag_duration_seconds", Help: "Time of a completed Defragment call on this member, in seconds.",
		Buckets: prometheus.ExponentialBuckets(.1, 2, 13),
	})
}

// learnerInterval is the interval at which the value of IsLearner is updated.
const learnerInterval = time.Second

// track runs until ctx ends. It counts changes of leader, stores the raft term, and polls whether this member is a
// learner.
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

// sample holds the data from which one call of Collect computes the metrics.
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

// NewCollector returns a Collector for the metrics of s. Their values are read only in Collect.
func NewCollector(s *Service) *Collector {
	c := &Collector{s: s}
	add := func(name, help string, kind prometheus.ValueType, value func(*sample) float64) {
		c.table = append(c.table, metric{prometheus.NewDesc(name, help, nil, nil), kind, value})
	}
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	add("etcd_server_has_leader", "1 if this member knows a leader of the raft group kv, otherwise 0.", gauge,
		func(f *sample) float64 { return boolValue(f.group.Leader != 0) })
	add("etcd_server_is_leader", "1 if this member leads the raft group kv, otherwise 0.", gauge,
		func(f *sample) float64 { return boolValue(f.group.Leader == f.s.opts.Self) })
	add("etcd_server_is_learner", "1 if this member is a learner of the raft group kv, otherwise 0.", gauge,
		func(f *sample) float64 { return boolValue(f.s.IsLearner()) })
	add("etcd_server_leader_changes_seen_total", "Leader elections that this member has noticed since its start.", counter,
		func(f *sample) float64 { return float64(f.s.counters.leaders.Load()) })
	add("etcd_server_proposals_committed_total", "Index of the last raft entry that this member knows to be committed.", gauge,
		func(f *sample) float64 { return float64(f.group.Commit) })
	add("etcd_server_proposals_applied_total", "Index of the last raft entry that this member has applied.", gauge,
		func(f *sample) float64 { return float64(f.group.Applied) })
	add("etcd_server_proposals_pending", "Proposals of this member that have no result yet.", gauge,
		func(f *sample) float64 { return float64(f.s.counters.pending.Load()) })
	add("etcd_server_proposals_failed_total", "Proposals of this member that ended with an error since its start.", counter,
		func(f *sample) float64 { return float64(f.s.counters.failed.Load()) })
	add("etcd_server_quota_backend_bytes", "Configured limit of the size of the keyspace, in bytes; 0 means no limit.", gauge,
		func(f *sample) float64 { return float64(max(f.s.opts.Quota, 0)) })
	add("etcd_mvcc_db_total_size_in_bytes", "Size of the keyspace with its history, in bytes.", gauge,
		func(f *sample) float64 { return float64(f.s.opts.Engine.Size()) })
	add("etcd_mvcc_db_total_size_in_use_in_bytes", "Size of the current keys and values without history, in bytes.", gauge,
		func(f *sample) float64 { return float64(f.s.opts.Engine.SizeInUse()) })
	add("etcd_debugging_mvcc_keys_total", "Keys that exist at the current revision.", gauge, func(f *sample) float64 { return float64(f.engine.Keys) })
	add("etcd_debugging_mvcc_current_revision", "Revision of the last change that this member has applied.", gauge,
		func(f *sample) float64 { return float64(f.engine.Revision) })
	add("etcd_debugging_mvcc_compact_revision", "Oldest revision that can be read; 0 if nothing was compacted.", gauge,
		func(f *sample) float64 { return float64(f.engine.CompactRevision) })
	add("etcd_debugging_mvcc_watcher_total", "Watches that clients have open on this member.", gauge, func(f *sample) float64 { return float64(f.engine.Watchers) })
	add("etcd_debugging_server_lease_expired_total", "Expired leases that this member has revoked as the leader.", counter,
		func(f *sample) float64 { return float64(f.s.counters.expired.Load()) })
	add("trivet_kv_leases", "Leases whose expiry this member schedules; 0 unless it is the leader.", gauge,
		func(f *sample) float64 { return float64(f.s.lessor.count()) })
	add("etcd_disk_defrag_inflight", "1 while a Defragment call runs on this member, otherwise 0.", gauge,
		func(f *sample) float64 { return boolValue(f.s.counters.defragmenting.Load() > 0) })
	add("trivet_kv_hash_checks_total",
		"Completed comparisons of the keyspace hashes of all members. Only the leader compares.", counter,
		func(f *sample) float64 { return float64(f.s.counters.compared.Load()) })
	add("trivet_kv_alarms", "Active alarms, of all members.", gauge, func(f *sample) float64 { return float64(len(f.s.Alarms())) })
	add("trivet_kv_auth_enabled", "1 if etcd's Auth is enabled, otherwise 0.", gauge, func(f *sample) float64 { return boolValue(f.s.AuthEnabled()) })
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
	// If Status fails, the group's metrics are those of a group without a leader.
	f.group, _ = c.s.opts.Consensus.Status(ctx)
	for i := range c.table {
		g := &c.table[i]
		out <- prometheus.MustNewConstMetric(g.desc, g.kind, g.value(&f))
	}
	c.s.counters.hashes.Collect(out)
	c.s.counters.defragments.Collect(out)
}
