package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

// costs exports counters of the work that API calls cause on this member, such as log entries and reads. The counts do
// not depend on the speed of the machine. TestCosts compares them with the expected work of each call.
type costs struct {
	runner     *consensus.Runner
	engines    map[uint64]*mvcc.Engine // by raft group
	identities *identity.Service
}

// groupCosts lists the counters that are exported for each raft group: the name of each and the function that returns
// its value.
var groupCosts = []struct {
	desc  *prometheus.Desc
	value func(consensus.Work, mvcc.Stats) int64
}{
	{gauge("raft_proposals_total", "Proposals of this member."), func(w consensus.Work, _ mvcc.Stats) int64 { return w.Proposals }},
	{gauge("raft_proposed_bytes_total", "Bytes of the proposals of this member."), func(w consensus.Work, _ mvcc.Stats) int64 { return w.ProposedBytes }},
	{gauge("raft_read_index_total", "ReadIndex calls of this member."), func(w consensus.Work, _ mvcc.Stats) int64 { return w.ReadIndexes }},
	{gauge("store_gets_total", "Reads of a single key from the disk or from the store's cache."), func(_ consensus.Work, s mvcc.Stats) int64 { return s.Gets }},
	{gauge("store_ranges_total", "Reads of a range of keys."), func(_ consensus.Work, s mvcc.Stats) int64 { return s.Ranges }},
	{gauge("store_keys_read_total", "Keys that reads have returned."), func(_ consensus.Work, s mvcc.Stats) int64 { return s.KeysRead }},
}

var (
	evaluationsDesc = prometheus.NewDesc("trivet_policy_evaluations_total", "Evaluations of the authorization policy.", nil, nil)
	signaturesDesc  = prometheus.NewDesc("trivet_token_signatures_verified_total", "Token signatures verified.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c *costs) Describe(out chan<- *prometheus.Desc) {
	for _, g := range groupCosts {
		out <- g.desc
	}
	out <- evaluationsDesc
	out <- signaturesDesc
}

// Collect implements prometheus.Collector.
func (c *costs) Collect(out chan<- prometheus.Metric) {
	for id, name := range layout.Names() {
		work, stats := c.runner.Work(id), c.engines[id].Stats()
		for _, g := range groupCosts {
			out <- prometheus.MustNewConstMetric(g.desc, prometheus.CounterValue, float64(g.value(work, stats)), name)
		}
	}
	out <- prometheus.MustNewConstMetric(evaluationsDesc, prometheus.CounterValue, float64(auth.Evaluations()))
	out <- prometheus.MustNewConstMetric(signaturesDesc, prometheus.CounterValue, float64(c.identities.SignaturesVerified()))
}
