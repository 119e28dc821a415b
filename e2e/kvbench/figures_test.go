package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

func TestRowsMatchGroups(t *testing.T) {
	var grouped []string
	for _, g := range groups {
		grouped = append(grouped, g.rows...)
	}
	require.ElementsMatch(t, rowNames(), grouped)
	seen := map[string]bool{}
	for _, l := range table {
		k := key(l.row, l.metric)
		require.False(t, seen[k], "%s %s is listed twice", l.row, l.metric)
		seen[k] = true
	}
}

func whats(rows []verdict.Row) (texts []string) {
	for _, r := range rows {
		texts = append(texts, r.What)
	}
	return texts
}

func TestRowsIncludeUnmeasuredTargets(t *testing.T) {
	r := results{}
	r.add("put", rate, ours, 140)
	r.add("put", rate, etcd, 100)
	r.add("put", rate, ours, 150)
	r.add("put", p50, etcd, 12)
	r.add("range", rate, ours, 7)
	rows := r.rows([]string{"put"})
	const title = "put, 1000 clients, 200k keys, values of 256 bytes"
	require.Equal(t, []string{title, title + ": p50", title + ": server CPU a put", title + ": bytes written a put"}, whats(rows))
	require.Equal(t, []float64{140, 150}, rows[0].Ours)
	require.Equal(t, []float64{100}, rows[0].Peer)
	require.Equal(t, "not measured", rows[2].Verdict(), "a target without a measurement is shown")
}

func TestDescriptionsNameTheirSubject(t *testing.T) {
	r := results{}
	r.add("growth", "10M rss", etcd, 1)
	r.add("stall", "gap", etcd, 1)
	texts := whats(r.rows(rowNames()))
	require.Contains(t, texts, "10 million keys: resident memory of the three")
	require.Contains(t, texts, "fsync stalls for 2 s at the leader: leases of 5 s lost, of 60 that are kept alive")
}

func TestCheck(t *testing.T) {
	good := func() *bench { return &bench{wanted: []string{"put"}, kinds: []string{ours, etcd}, rounds: 1} }
	require.NoError(t, good().check())
	b := good()
	b.wanted = []string{"putt"}
	require.ErrorContains(t, b.check(), `no row "putt"; there are put, put-random,`)
	b = good()
	b.kinds = []string{"consul"}
	require.ErrorContains(t, b.check(), `no kind "consul"`)
	b = good()
	b.rounds = 0
	require.ErrorContains(t, b.check(), "one round at least")
}
