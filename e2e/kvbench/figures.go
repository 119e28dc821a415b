package main

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

// Names of the metrics that most rows have, with the unit of each.
const (
	rate  = "rate"  // successful requests per second
	p50   = "p50"   // median latency in ms
	p99   = "p99"   // 99th percentile of the latency in ms
	cpu   = "cpu"   // CPU time of the three servers together, in µs per request
	bytes = "bytes" // bytes that the three servers write to disk, per request; shown only for rows with many requests
)

// line is a line of the printed table: one metric of a row, with its description, its unit and perhaps its target. A
// row is a measurement, such as put, that yields several metrics.
type line struct {
	row, metric, what, unit string
	target                  verdict.Target
}

// table lists all lines in the order of printing. A description that begins with "… " is printed after that of the last
// line without "… ", of which only the part before the colon is used. Each target has two bounds, from the design of
// the key-value store, part "Proof": one that must be reached and one that is aimed at.
var table = []line{
	{"put", rate, "put, 1000 clients, 200k keys, values of 256 bytes", "/s", verdict.AtLeast(1.15, 1.4)},
	{"put", p50, "… p50", "ms", verdict.Target{}},
	{"put", p99, "… p99", "ms", verdict.Target{}},
	{"put", cpu, "… server CPU a put", "µs", verdict.AtMost(0.8, 0.65)},
	{"put", bytes, "… bytes written a put", "B", verdict.AtMost(0.55, 0.45)},

	{"put-random", rate, "put, as above, but all values differ", "/s", verdict.Target{}},
	{"put-random", p50, "… p50", "ms", verdict.Target{}},
	{"put-random", p99, "… p99", "ms", verdict.Target{}},
	{"put-random", cpu, "… server CPU a put", "µs", verdict.Target{}},
	{"put-random", bytes, "… bytes written a put", "B", verdict.Target{}},

	{"put1", rate, "put, 1 client, at the leader", "/s", verdict.Target{}},
	{"put1", p50, "… p50", "ms", verdict.AtMost(1.1, 0.9)},
	{"put1", p99, "… p99", "ms", verdict.Target{}},
	{"put1", cpu, "… server CPU a put", "µs", verdict.Target{}},

	{"range", rate, "linearizable range of one key, 1000 clients", "/s", verdict.AtLeast(1.0, 1.2)},
	{"range", p50, "… p50", "ms", verdict.Target{}},
	{"range", p99, "… p99", "ms", verdict.Target{}},
	{"range", cpu, "… server CPU a range", "µs", verdict.AtMost(0.95, 0.8)},

	{"range1", rate, "linearizable range of one key, 1 client", "/s", verdict.AtLeast(1.2, 1.5)},
	{"range1", p50, "… p50", "ms", verdict.Target{}},
	{"range1", p99, "… p99", "ms", verdict.Target{}},
	{"range1", cpu, "… server CPU a range", "µs", verdict.AtMost(0.95, 0.8)},

	{"serializable", rate, "serializable range of one key, 1000 clients", "/s", verdict.AtLeast(1.0, 1.3)},
	{"serializable", p50, "… p50", "ms", verdict.Target{}},
	{"serializable", p99, "… p99", "ms", verdict.Target{}},
	{"serializable", cpu, "… server CPU a range", "µs", verdict.Target{}},

	{"limit", rate, "range of 10 among 200k keys, 1 client", "/s", verdict.AtLeast(50, 100)},
	{"limit", p50, "… p50", "ms", verdict.Target{}},
	{"limit", p99, "… p99", "ms", verdict.Target{}},
	{"limit", cpu, "… server CPU a range", "µs", verdict.Target{}},

	{"txn-mixed", rate, "txn-mixed, 1000 clients, reads of 10 among 10k keys and puts", "/s", verdict.AtLeast(1.5, 3)},
	{"txn-mixed", "read p50", "… p50 of reads", "ms", verdict.Target{}},
	{"txn-mixed", "read p99", "… p99 of reads", "ms", verdict.Target{}},
	{"txn-mixed", "write p50", "… p50 of puts", "ms", verdict.Target{}},
	{"txn-mixed", "write p99", "… p99 of puts", "ms", verdict.Target{}},
	{"txn-mixed", cpu, "… server CPU a transaction", "µs", verdict.Target{}},

	{"watch", p99, "watch-latency, 100 watchers: p99 from the put's answer to the event", "ms", verdict.AtMost(1.0, 0.7)},
	{"watch", "put p50", "… p50 of the puts", "ms", verdict.Target{}},
	{"watch", rate, "… events", "/s", verdict.Target{}},
	{"watch", cpu, "… server CPU a put, all its events included", "µs", verdict.Target{}},
	{"watch-sent", p50, "100 watchers, 200 puts a second: p50 from the put's sending to the event", "ms", verdict.Target{}},
	{"watch-sent", p99, "… p99", "ms", verdict.Target{}},

	{"compact", "compact", "compacting 2 GB, 100 puts a second: longest put while Compact drops the older half", "ms", verdict.Within(100, 30)},
	{"compact", "before", "… longest put before", "ms", verdict.Target{}},
	{"compact", "took", "… how long Compact took, physical at the member that was asked", "s", verdict.Target{}},
	{"compact", "defragment", "… longest put while members defragment, one after the other", "ms", verdict.Within(100, 30)},
	{"compact", "defragment took", "… how long the three took to defragment", "s", verdict.Target{}},
	{"compact", "failed", "… puts that failed, all the while", "", verdict.Target{}},

	{"stall", "gap", "fsync stalls for 2 s at the leader: longest time without a commit", "ms", verdict.Within(1500, 1500)},
	{"stall", "leases", "… leases of 5 s lost, of 60 that are kept alive", "", verdict.Within(0, 0)},
	{"stall", "failed", "… puts failed, of 50 a second", "", verdict.Target{}},

	{"size2", "load", "2 GB of values of 64 KiB: loading", "s", verdict.Target{}},
	{"size2", "restart", "… all three start until all serve", "s", verdict.Target{}},
	{"size2", "rss loaded", "… resident memory of the three, loaded", "MB", verdict.Target{}},
	{"size2", "anon loaded", "… anonymous memory of the three, which is not of files", "MB", verdict.Target{}},
	{"size2", "rss", "… resident memory of the three, started again", "MB", verdict.Target{}},
	{"size2", "anon", "… anonymous memory of the three, which is not of files", "MB", verdict.Target{}},
	{"size2", "disk", "… disk of the three", "MB", verdict.Target{}},
	{"size5", "load", "5 GB of values of 64 KiB: loading", "s", verdict.Target{}},
	{"size5", "restart", "… all three start until all serve", "s", verdict.Target{}},
	{"size5", "rss loaded", "… resident memory of the three, loaded", "MB", verdict.Target{}},
	{"size5", "anon loaded", "… anonymous memory of the three, which is not of files", "MB", verdict.Target{}},
	{"size5", "rss", "… resident memory of the three, started again", "MB", verdict.Target{}},
	{"size5", "anon", "… anonymous memory of the three, which is not of files", "MB", verdict.Target{}},
	{"size5", "disk", "… disk of the three", "MB", verdict.Target{}},

	{"growth", "10k p50", "10 thousand keys: put of 1 client, p50", "ms", verdict.Target{}},
	{"growth", "10k rss", "… resident memory of the three", "MB", verdict.Target{}},
	{"growth", "10k anon", "… anonymous memory of the three, which is not of files", "MB", verdict.Target{}},
	{"growth", "1M load", "1 million keys: loading, in transactions of 128 puts", "s", verdict.Target{}},
	{"growth", "1M p50", "… put of 1 client, p50", "ms", verdict.Target{}},
	{"growth", "1M rss", "… resident memory of the three", "MB", verdict.Target{}},
	{"growth", "1M anon", "… anonymous memory of the three, which is not of files", "MB", verdict.Target{}},
	{"growth", "10M load", "10 million keys: loading what is missing", "s", verdict.Target{}},
	{"growth", "10M p50", "… put of 1 client, p50", "ms", verdict.Target{}},
	{"growth", "10M rss", "… resident memory of the three", "MB", verdict.Target{}},
	{"growth", "10M anon", "… anonymous memory of the three, which is not of files", "MB", verdict.Target{}},
	{"growth", "10M restart", "… all three start until all serve", "s", verdict.Target{}},

	{"watchers", "before p50", "10,000 keys: put of 1 client, p50", "ms", verdict.Target{}},
	{"watchers", p50, "… put p50 with 10,000 watchers, one on each key", "ms", verdict.Target{}},
	{"watchers", "anon", "… anonymous memory of the three for the watchers", "MB", verdict.Target{}},
	{"watchers", "event p50", "… p50 from the put's sending to its event", "ms", verdict.Target{}},
}

// rowNames returns the names of the rows, which are the values that the flag -run accepts.
func rowNames() (names []string) {
	for _, l := range table {
		if !slices.Contains(names, l.row) {
			names = append(names, l.row)
		}
	}
	return names
}

// results maps a key made of row, metric and kind of servers (see key) to the figures of the rounds.
type results map[string][]float64

func key(parts ...string) string { return strings.Join(parts, "\x00") }

func (r results) add(row, metric, kind string, v float64) {
	k := key(row, metric, kind)
	r[k] = append(r[k], v)
}

// rows returns the lines of the wanted rows. It omits lines that were not measured and have no target. A line with a
// target that was not measured has no figures.
func (r results) rows(wanted []string) (rows []verdict.Row) {
	subject := "" // the text that replaces "… "
	for _, l := range table {
		what, more := strings.CutPrefix(l.what, "… ")
		if more {
			what = subject + ": " + what
		} else {
			subject, _, _ = strings.Cut(what, ": ")
		}
		if !slices.Contains(wanted, l.row) {
			continue
		}
		row := verdict.Row{What: what, Unit: l.unit, Target: l.target, Ours: r[key(l.row, l.metric, ours)], Peer: r[key(l.row, l.metric, etcd)]}
		if len(row.Ours) == 0 && len(row.Peer) == 0 && l.target == (verdict.Target{}) {
			continue
		}
		rows = append(rows, row)
	}
	return rows
}
