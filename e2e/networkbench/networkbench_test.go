package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/bench/table"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

func small(t *testing.T) *bench {
	t.Helper()
	calm, err := usage.NewCalm(0)
	require.NoError(t, err)
	return &bench{parts: partNames(), rounds: 3, results: table.Figures{}, size: sizes[true], Run: report.Run{Calm: calm}}
}

func TestLinesAreUniqueAndOfAPart(t *testing.T) {
	seen := map[string]bool{}
	for _, table := range tables {
		for _, l := range table.Lines {
			require.True(t, slices.Contains(partNames(), l.Part), l.Part)
			require.False(t, seen[l.ID], "%s is listed twice", l.ID)
			seen[l.ID] = true
		}
	}
}

func TestRowsIncludeUnmeasuredTargets(t *testing.T) {
	b := small(t)
	b.results.Ours("tcp cpu", 0.55)
	b.results.Peer("tcp cpu", 0.5)
	b.results.Ours("tcp rate", 10)
	b.results.Note("tcp rate", "a note")
	text := b.text("")
	require.Contains(t, text, "| CPU per GB of TCP, one host, all filters, against a plain bridge | 0.55 s | 0.50 s | 1.10 × | ≤ 1.1 × | aim met |  |")
	require.Contains(t, text, "against a plain bridge: throughput | 10.0 Gbit/s |  |  |  |  | a note |")
	require.Contains(t, text, "| not measured |", "a target without a measurement is shown")
	b.parts = []string{"streams"}
	require.NotContains(t, b.text(""), "remote group", "lines of other parts are left out")
	b.Failures = []string{"it broke"}
	require.True(t, strings.HasSuffix(b.text(""), "- failed: it broke"))
	text = b.text("other processes used 90 % of a core during the run")
	require.NotRegexp(t, "met|missed|not measured", text)
	require.Contains(t, text, "**No verdict: other processes used 90 % of a core during the run. The figures must not be used.**")
}

func TestParseCounters(t *testing.T) {
	bytes, err := parseCounters(`Chain OUTPUT (policy ACCEPT 7 packets, 588 bytes)
    pkts      bytes target     prot opt in     out     source               destination
      12     3400            6    --  *      *       0.0.0.0/0            0.0.0.0/0            tcp spt:7443
      10      600            6    --  *      *       0.0.0.0/0            0.0.0.0/0            tcp dpt:7443
`)
	require.NoError(t, err)
	require.InDelta(t, 4000, bytes, 0)
	_, err = parseCounters("Chain OUTPUT\n")
	require.ErrorContains(t, err, "0 rules of 2 count bytes")
}

func TestCheck(t *testing.T) {
	require.NoError(t, small(t).check())
	b := small(t)
	b.parts = []string{"rule"}
	require.ErrorContains(t, b.check(), `no part "rule"; there are rules, attach, packets`)
	b = small(t)
	b.rounds = 0
	require.ErrorContains(t, b.check(), "one round at least")
}

// TestRulesAreAsManyAsTheLineNames checks the VPC of the line "apply".
func TestRulesAreAsManyAsTheLineNames(t *testing.T) {
	vpc := manyRules(sizes[false].rules)
	total := 0
	for _, g := range vpc.Groups {
		require.Len(t, g.Rules, rulesPerGroup)
		total += len(g.Rules)
	}
	require.Equal(t, 10_000, total)
	require.Len(t, vpc.Subnets[0].Ports, len(vpc.Groups))
}
