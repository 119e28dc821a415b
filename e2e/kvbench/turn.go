package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/kvbench/load"
	"github.com/trivet-cloud/trivet/e2e/kvbench/subject"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// serveWithin is the maximum time in which three started servers must serve reads, regardless of the amount of data.
const serveWithin = 5 * time.Minute

// group is a set of rows of the table that are measured on the same servers. In each round, the servers of a group are
// started with empty directories.
type group struct {
	name string
	rows []string
	// rounds is the maximum number of rounds for this group, in addition to the maximum of the flag -rounds; 0 means
	// that only the flag limits them.
	rounds int
	// prepare, if set, is called after the servers' directories were created and before any server starts. The function
	// undo that it returns is called after all servers were killed.
	prepare func(ctx context.Context, t *turn) (undo func() error, err error)
	run     func(ctx context.Context, t *turn) error
}

// groups lists the groups in the order in which they run.
var groups = []group{
	{name: "keys", rows: []string{"put", "put-random", "put1", "range", "range1", "serializable", "limit", "watch", "watch-sent"}, run: keys},
	{name: "transactions", rows: []string{"txn-mixed"}, run: transactions},
	{name: "stall", rows: []string{"stall"}, prepare: mountImages, run: stall},
	{name: "compaction", rows: []string{"compact"}, rounds: 3, run: compaction},
	{name: "2 GB", rows: []string{"size2"}, rounds: 3, run: func(ctx context.Context, t *turn) error { return size(ctx, t, "size2", 2<<30) }},
	{name: "5 GB", rows: []string{"size5"}, rounds: 1, run: func(ctx context.Context, t *turn) error { return size(ctx, t, "size5", 5<<30) }},
	{name: "watchers", rows: []string{"watchers"}, rounds: 3, run: watchers},
	{name: "growth", rows: []string{"growth"}, rounds: 1, run: growth},
}

func (g group) wanted(b *bench) bool {
	return slices.ContainsFunc(g.rows, func(row string) bool { return slices.Contains(b.wanted, row) })
}

// turn is the measurement of one kind of servers, Trivet or etcd, in one round of a group.
type turn struct {
	*bench
	kind    string
	round   int
	trio    *subject.Trio
	leader  int
	clients []*clientv3.Client // one client per member; the first is that of the leader
}

// runGroup runs all rounds of a group. If a turn fails, runGroup adds the error to b.Failures and continues with the
// next turn. It returns an error only if ctx ends or the wait for an idle machine fails.
func (b *bench) runGroup(ctx context.Context, g group) error {
	rounds := b.rounds
	if g.rounds > 0 {
		rounds = min(rounds, g.rounds)
	}
	for round := range rounds {
		kinds := slices.Clone(b.kinds)
		if round%2 == 1 {
			slices.Reverse(kinds)
		}
		for _, kind := range kinds {
			if err := b.Calm.Await(ctx); err != nil {
				return err
			}
			t := &turn{bench: b, kind: kind, round: round}
			report.Say("%s, round %d of %d, %s; load %s", g.name, round+1, rounds, kind, usage.Load())
			if err := t.run(ctx, g); err != nil {
				if ctx.Err() != nil {
					return err
				}
				b.Failures = append(b.Failures, fmt.Sprintf("%s, round %d, %s: %v", g.name, round+1, kind, err))
				report.Say("failed: %v", err)
			}
		}
	}
	return nil
}

// run starts servers with empty directories, measures the group's rows, kills the servers and removes their files.
func (t *turn) run(ctx context.Context, g group) (err error) {
	dir := filepath.Join(t.dir, t.kind)
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if t.kind == ours {
		t.trio, err = subject.Trivet(dir, t.bin, t.extra...)
	} else {
		t.trio, err = subject.Etcd(dir, t.etcd)
	}
	if err != nil {
		return err
	}
	if g.prepare != nil {
		undo, failed := g.prepare(ctx, t)
		if failed != nil {
			return failed
		}
		defer func() { err = errors.Join(err, undo()) }()
	}
	defer func() { err = errors.Join(err, t.trio.Kill()) }()
	served, err := t.start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.hangUp()) }()
	report.Say("%s: all serve after %s, member %d leads", t.kind, served.Round(time.Millisecond), t.leader)
	return g.run(ctx, t)
}

// start starts the servers, fills t.leader and t.clients, and returns the time from the start until all servers served
// a linearizable read.
func (t *turn) start(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, serveWithin)
	defer cancel()
	began := time.Now()
	if err := t.trio.Start(); err != nil {
		return 0, err
	}
	if err := t.trio.Await(ctx); err != nil {
		return 0, err
	}
	took := time.Since(began)
	var err error
	if t.leader, err = t.trio.Leader(ctx); err != nil {
		return 0, err
	}
	for _, e := range t.trio.Endpoints(t.leader) {
		c, err := subject.Dial(e)
		if err != nil {
			return 0, err
		}
		t.clients = append(t.clients, c)
	}
	return took, nil
}

// hangUp closes t.clients.
func (t *turn) hangUp() error {
	var errs []error
	for _, c := range t.clients {
		errs = append(errs, c.Close())
	}
	t.clients = nil
	return errors.Join(errs...)
}

// wants reports whether the flag -run names a row.
func (t *turn) wants(row string) bool { return slices.Contains(t.wanted, row) }

// scale returns n, or in a quick run a tenth of n but at least 1.
func (t *turn) scale(n int) int {
	if t.Quick {
		return max(n/10, 1)
	}
	return n
}

func (t *turn) add(row, metric string, v float64) { t.results.add(row, metric, t.kind, v) }

// measure runs f, which returns its number of successful requests, and adds to the row the CPU time that the three
// servers used and the bytes that they wrote, both per request.
func (t *turn) measure(ctx context.Context, row string, f func() (int, error)) error {
	pids, err := t.trio.PIDs()
	if err != nil {
		return err
	}
	stop := t.perf(ctx, row, pids)
	defer stop()
	before, err := usage.Of(pids...)
	if err != nil {
		return err
	}
	n, err := f()
	if err != nil {
		return fmt.Errorf("%s: %w", row, err)
	}
	after, err := usage.Of(pids...)
	if err != nil {
		return err
	}
	if n == 0 {
		return fmt.Errorf("%s: no request succeeded", row)
	}
	used := after.Since(before)
	t.add(row, cpu, float64(used.CPU.Microseconds())/float64(n))
	t.add(row, bytes, float64(used.Written)/float64(n))
	report.Say("%s, %s: %d requests, %.1f µs of CPU and %.0f bytes written each", row, t.kind, n, float64(used.CPU.Microseconds())/float64(n),
		float64(used.Written)/float64(n))
	return nil
}

// many returns a load generator with 1000 clients on 100 connections to all members. The function one, in contrast,
// returns a load generator with a single client that is connected to the leader.
func (t *turn) many() load.Tool {
	return load.Tool{Binary: filepath.Join(t.etcd, "benchmark"), Endpoints: t.trio.Endpoints(t.leader), Conns: 100, Clients: 1000}
}

func (t *turn) one() load.Tool {
	return load.Tool{Binary: filepath.Join(t.etcd, "benchmark"), Endpoints: []string{t.trio.Endpoint(t.leader)}}
}

// tool measures a row with a command of etcd's program `benchmark`; args is a command that prints one report.
func (t *turn) tool(ctx context.Context, row string, tool load.Tool, args ...string) error {
	return t.measure(ctx, row, func() (int, error) {
		got, err := tool.Run(ctx, 1, args...)
		if err != nil {
			return 0, err
		}
		t.summary(row, "", got[0])
		t.add(row, rate, got[0].Rate)
		return got[0].Count(), nil
	})
}

// summary adds the p50 and p99 of a report to a row, as the metrics prefix+"p50" and prefix+"p99". If requests failed,
// it adds a line to t.Failures.
func (t *turn) summary(row, prefix string, s load.Summary) {
	t.add(row, prefix+p50, ms(s.Quantile(50)))
	t.add(row, prefix+p99, ms(s.Quantile(99)))
	report.Say("%s, %s%s: %.0f/s, p50 %s, p99 %s", row, prefix, t.kind, s.Rate, s.Quantile(50), s.Quantile(99))
	if s.Failed > 0 {
		t.Failures = append(t.Failures, fmt.Sprintf("%s, %sround %d, %s: %d of %d requests", row, prefix, t.round+1, t.kind, s.Failed, s.Failed+s.Count()))
	}
}

// answers adds the rate, p50 and p99 of requests to a row, and returns the number of successful ones. kvbench itself
// sent these requests, within the duration took. If requests failed, answers adds a line to t.Failures.
func (t *turn) answers(row string, all load.Answers, took time.Duration) int {
	latencies := all.Latencies()
	t.add(row, rate, float64(len(latencies))/took.Seconds())
	t.add(row, p50, ms(figure.Median(latencies)))
	t.add(row, p99, ms(figure.Quantile(latencies, 0.99)))
	report.Say("%s, %s: %.0f/s, p50 %s, p99 %s", row, t.kind, float64(len(latencies))/took.Seconds(), figure.Median(latencies), figure.Quantile(latencies, 0.99))
	if n, first := all.Failed(); n > 0 {
		t.Failures = append(t.Failures, fmt.Sprintf("%s, round %d, %s: %d of %d requests: %v", row, t.round+1, t.kind, n, len(all), first))
	}
	return len(latencies)
}

func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

func itoa(n int) string { return strconv.Itoa(n) }

// perf profiles the servers with `perf record` until stop is called. It does so only with the flag -perf and in the
// first round. If perf cannot be started, it prints the reason and returns a stop that does nothing.
func (t *turn) perf(ctx context.Context, row string, pids []int) (stop func()) {
	if t.profile == "" || t.round > 0 {
		return func() {}
	}
	stop, err := usage.Profile(ctx, t.profile+"."+row+"."+t.kind, pids...)
	if err != nil {
		report.Say("no profile: %v", err)
		return func() {}
	}
	return stop
}
