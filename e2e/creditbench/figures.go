package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

// The kinds of ledgers that are measured: one Trivet member, three Trivet members, and PostgreSQL.
const (
	ours = "trivet"
	trio = "trio"
	peer = "postgres"
)

var kindNames = []string{ours, peer, trio}

// partNames lists the values that the flag -run accepts, in the order in which the parts run.
var partNames = []string{"pairs", "trio", "verify"}

// Names of the metrics of a row, with the unit of each.
const (
	rate = "rate" // successful pairs or verified tokens per second
	p50  = "p50"  // median latency in ms
	p99  = "p99"  // 99th percentile of the latency in ms
	cpu  = "cpu"  // CPU time of the servers in µs per pair
)

// line is a line of a printed table: one metric of a row, with the figures of the ledger kind and of the ledger peer,
// which it is compared with. A row is a measurement that yields several metrics. The field what is the description of
// the line. If it begins with "… ", the rest is printed after the description of the last line without "… ".
type line struct {
	part, row, metric, kind, peer, what, unit string
	target                                    verdict.Target
}

// table holds the lines of one printed table. The field peer is the heading of the column with the figures that
// Trivet's are compared with.
type table struct {
	peer  string
	lines []line
}

// least returns a target with v as a lower bound on Trivet's figure, regardless of the figure that it is compared with.
func least(v float64) verdict.Target {
	return verdict.Target{Must: v, Aim: v, Least: true, Absolute: true}
}

// tables holds all lines. The targets are those of the design: 2,000 pairs per second on one wallet, a p99 of 20 ms at
// 500 pairs per second, and 10,000 tokens per second and core.
var tables = []table{
	{"PostgreSQL", slices.Concat(
		pairs("pairs", "hot", ours, peer, "pairs on one wallet", least(2000)),
		pairs("pairs", "many", ours, peer, "pairs on 10,000 wallets", verdict.Target{}),
		open("pairs", ours, peer, "500 pairs a second on 1,000 wallets", verdict.Within(20, 20)),
		pairs("trio", "hot", trio, "", "three members: pairs on one wallet", verdict.Target{}),
		pairs("trio", "many", trio, "", "three members: pairs on 10,000 wallets", verdict.Target{}),
		open("trio", trio, "", "three members: 500 pairs a second on 1,000 wallets", verdict.Target{}),
	)},
	{"library", []line{
		{"verify", "verify 1", rate, "new", "go-oidc", "tokens not seen before, one core, beside go-oidc", "/s", least(10_000)},
		{"verify", "verify 1", rate, "new", "golang-jwt", "tokens not seen before, one core, beside golang-jwt", "/s", least(10_000)},
		{"verify", "verify 1", rate, "seen", "go-oidc", "tokens seen before, one core, beside go-oidc", "/s", verdict.Target{}},
		{"verify", "verify 2", rate, "new", "go-oidc", "tokens not seen before, two cores, a core, beside go-oidc", "/s", least(10_000)},
		{"verify", "verify 2", rate, "new", "golang-jwt", "tokens not seen before, two cores, a core, beside golang-jwt", "/s", least(10_000)},
		{"verify", "verify 2", rate, "seen", "go-oidc", "tokens seen before, two cores, a core, beside go-oidc", "/s", verdict.Target{}},
	}},
}

// pairs returns the lines of a row that is measured in a closed loop, in which each caller starts its next pair of
// calls when the last pair has ended.
func pairs(part, row, kind, peer, what string, target verdict.Target) []line {
	return []line{
		{part, row, rate, kind, peer, what, "/s", target},
		{part, row, p50, kind, peer, "… p50", "ms", verdict.Target{}},
		{part, row, p99, kind, peer, "… p99", "ms", verdict.Target{}},
		{part, row, cpu, kind, peer, "… servers' CPU a pair", "µs", verdict.Target{}},
	}
}

// open returns the lines of the row "open", which is measured at a fixed rate of pairs.
func open(part, kind, peer, what string, target verdict.Target) []line {
	return []line{
		{part, "open", p99, kind, peer, what + ": p99", "ms", target},
		{part, "open", p50, kind, peer, "… p50", "ms", verdict.Target{}},
		{part, "open", cpu, kind, peer, "… servers' CPU a pair", "µs", verdict.Target{}},
	}
}

// results maps a key made of row, metric and kind (see key) to the figures of the rounds.
type results map[string][]float64

func key(parts ...string) string { return strings.Join(parts, "\x00") }

func (r results) add(row, metric, kind string, v float64) {
	k := key(row, metric, kind)
	r[k] = append(r[k], v)
}

// rows returns the lines of a table that belong to the given parts. It omits lines that were not measured and have no
// target. The note of a line with a rate is the number of concurrent callers.
func (r results) rows(t table, parts []string, callers map[string]int) (rows []verdict.Row) {
	subject := ""
	for _, l := range t.lines {
		what, more := strings.CutPrefix(l.what, "… ")
		if more {
			what = subject + ": " + what
		} else {
			subject = strings.TrimSuffix(what, ": p99")
		}
		if !slices.Contains(parts, l.part) {
			continue
		}
		row := verdict.Row{What: what, Unit: l.unit, Target: l.target, Ours: r[key(l.row, l.metric, l.kind)]}
		if l.peer != "" {
			row.Peer = r[key(l.row, l.metric, l.peer)]
		}
		if n := callers[key(l.row, l.kind)]; n > 0 && l.metric == rate {
			row.Note = fmt.Sprintf("%d callers", n)
			if p := callers[key(l.row, l.peer)]; p > 0 {
				row.Note += fmt.Sprintf(", %s %d", t.peer, p)
			}
		}
		if len(row.Ours) > 0 || len(row.Peer) > 0 || l.target != (verdict.Target{}) {
			rows = append(rows, row)
		}
	}
	return rows
}
