package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/creditbench/books"
	"github.com/trivet-cloud/trivet/e2e/creditbench/members"
	"github.com/trivet-cloud/trivet/e2e/creditbench/postgres"
	"github.com/trivet-cloud/trivet/e2e/kvbench/load"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// bank is a running ledger that creditbench measures: Trivet members, or PostgreSQL.
type bank interface {
	// Fill creates wallets, each with a first balance of deposit.
	Fill(ctx context.Context, wallets []string, deposit int64) error
	// Connect prepares connections for a number of concurrent callers of Pair.
	Connect(ctx context.Context, callers int) error
	// Pair reserves an amount of credit in a wallet and commits the complete reservation. Callers are numbered from 0.
	Pair(ctx context.Context, caller int, wallet string, amount int64) error
	// Books recomputes and returns the sums of the ledger. It returns an error if the ledger contradicts itself.
	Books(ctx context.Context) (books.Books, error)
	Usage() (usage.Sample, error)
	PIDs() ([]int, error)
	Close() error
}

const (
	deposit = 1_000_000_000_000
	amount  = 10
	// openRate is the number of pairs of calls per second in the row "open". openCallers is the number of callers that
	// Connect prepares for in that row; if more pairs are in flight, some may wait for a connection.
	openRate, openCallers = 500, 64
	startWithin           = time.Minute
	turnWithin            = 5 * time.Minute
	answerWithin          = 20 * time.Second
	// trioRounds is the maximum number of rounds with three members. A few suffice, as there is no comparison.
	trioRounds = 3
)

// size is the amount of work of a run: the numbers of wallets and callers, and the durations.
type size struct {
	wallets, openWallets  int
	warm, probe, length   time.Duration // of a row: its warm-up, its probe of each number of callers, its measurement
	openWarm, openMeasure time.Duration
	callers               []int // the numbers of callers that sweep tries
}

// sizes holds the amounts of work of a normal run (false) and of a run with the flag -quick (true).
var sizes = map[bool]size{
	false: {10_000, 1_000, 500 * time.Millisecond, time.Second, 3 * time.Second, time.Second, 5 * time.Second, []int{2, 4, 16, 64, 256}},
	true:  {1_000, 100, 100 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond, []int{16, 64}},
}

// turn is the measurement of one kind of ledger in one round.
type turn struct {
	*bench
	kind    string
	round   int
	bank    bank
	wallets []string // all wallets; only the row hot uses the first, and no other
	pairs   int64    // the number of successful pairs so far
}

// run runs all rounds of all parts. If a turn fails, run adds the error to b.Failures and continues with the next turn.
// It returns an error only if ctx ends or the wait for an idle machine fails.
func (b *bench) run(ctx context.Context) error {
	for _, part := range []struct {
		name   string
		kinds  []string
		rounds int
	}{{"pairs", []string{ours, peer}, b.rounds}, {"trio", []string{trio}, min(b.rounds, trioRounds)}, {"verify", []string{"verify"}, b.rounds}} {
		if !slices.Contains(b.parts, part.name) {
			continue
		}
		for round := range part.rounds {
			kinds := slices.DeleteFunc(slices.Clone(part.kinds), func(k string) bool { return k != "verify" && !slices.Contains(b.kinds, k) })
			if round%2 == 1 {
				slices.Reverse(kinds)
			}
			for _, kind := range kinds {
				if err := b.Calm.Await(ctx); err != nil {
					return err
				}
				report.Say("%s, round %d of %d, %s; load %s", part.name, round+1, part.rounds, kind, usage.Load())
				err := b.turn(ctx, kind, round)
				if ctx.Err() != nil {
					return errors.Join(ctx.Err(), err)
				}
				if err != nil {
					b.Failures = append(b.Failures, fmt.Sprintf("%s, round %d, %s: %v", part.name, round+1, kind, err))
					report.Say("failed: %v", err)
				}
			}
		}
	}
	return nil
}

// turn starts an empty ledger of the given kind, measures it, and stops it. For the kind "verify", it starts no ledger
// and measures the verification of tokens.
func (b *bench) turn(ctx context.Context, kind string, round int) (err error) {
	ctx, cancel := context.WithTimeout(ctx, turnWithin)
	defer cancel()
	if kind == "verify" {
		return b.verify(ctx)
	}
	dir := filepath.Join(b.dir, kind)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	bank, err := b.start(ctx, kind, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bank.Close()) }()
	return b.measure(ctx, kind, round, bank)
}

func (b *bench) start(ctx context.Context, kind, dir string) (bank, error) {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	switch kind {
	case ours:
		return members.Start(ctx, dir, b.bin, 1, b.extra...)
	case trio:
		return members.Start(ctx, dir, b.bin, 3, b.extra...)
	}
	return postgres.Start(ctx, dir, b.postgres)
}

// measure measures all rows with a running ledger. It adds the figures to b.results only if, after the load, the sums
// of the ledger equal those that follow from it.
func (b *bench) measure(ctx context.Context, kind string, round int, bank bank) error {
	t := &turn{bench: b, kind: kind, round: round, bank: bank, wallets: []string{"hot"}}
	for i := range b.size.wallets {
		t.wallets = append(t.wallets, fmt.Sprintf("w%05d", i))
	}
	mine := *b
	mine.results = results{}
	t.bench = &mine
	if err := bank.Fill(ctx, t.wallets, deposit); err != nil {
		return err
	}
	for _, row := range []struct {
		name    string
		wallets []string
	}{{"hot", t.wallets[:1]}, {"many", t.wallets[1:]}} {
		if err := t.closed(ctx, row.name, row.wallets); err != nil {
			return fmt.Errorf("%s: %w", row.name, err)
		}
	}
	if err := t.open(ctx, t.wallets[1:1+b.size.openWallets]); err != nil {
		return fmt.Errorf("open: %w", err)
	}
	got, err := bank.Books(ctx)
	if err != nil {
		return err
	}
	if err := got.Compare(books.After(int64(len(t.wallets)), deposit, t.pairs, amount)); err != nil {
		return err
	}
	report.Say("%s: the books add up after %d pairs", kind, t.pairs)
	for k, v := range mine.results {
		b.results[k] = append(b.results[k], v...)
	}
	return nil
}

// ask makes pairs in a closed loop for the duration length. Each pair is on a random one of the given wallets. ask
// returns an error if any pair fails, because the sums that the ledger must have are then unknown.
func (t *turn) ask(ctx context.Context, callers int, length time.Duration, wallets []string) (load.Answers, error) {
	all, err := load.For(ctx, callers, length, func(ctx context.Context, caller int) error {
		return t.pair(ctx, caller, wallets)
	})
	return all, errors.Join(err, t.count(all))
}

func (t *turn) pair(ctx context.Context, caller int, wallets []string) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	return t.bank.Pair(ctx, caller, wallets[rand.IntN(len(wallets))], amount)
}

func (t *turn) count(all load.Answers) error {
	n, first := all.Failed()
	if n > 0 {
		return fmt.Errorf("%d of %d pairs failed: %w", n, len(all), first)
	}
	t.pairs += int64(len(all))
	return nil
}

// sweep returns the number of concurrent callers for a row. In the first round it measures the rate with each number in
// t.size.callers and uses the number that best returns. Later rounds use the same number.
func (t *turn) sweep(ctx context.Context, row string, wallets []string) (int, error) {
	if n := t.callers[key(row, t.kind)]; n > 0 {
		return n, nil
	}
	rates := map[int]float64{}
	for _, callers := range t.size.callers {
		if err := t.bank.Connect(ctx, callers); err != nil {
			return 0, err
		}
		if _, err := t.ask(ctx, callers, t.size.probe/4, wallets); err != nil {
			return 0, err
		}
		all, err := t.ask(ctx, callers, t.size.probe, wallets)
		if err != nil {
			return 0, err
		}
		rates[callers] = rateOf(all)
		report.Say("%s, %s, %d callers: %.0f/s", row, t.kind, callers, rates[callers])
	}
	n := best(rates)
	t.callers[key(row, t.kind)] = n
	return n, nil
}

// enough is the fraction of the highest rate that a number of callers must reach to be chosen. More callers than that
// would increase the latency and hardly the rate.
const enough = 0.95

// best returns the smallest number of callers whose rate is at least enough times the highest rate. rates maps numbers
// of callers to rates.
func best(rates map[int]float64) int {
	highest := slices.Max(slices.Collect(maps.Values(rates)))
	for _, callers := range slices.Sorted(maps.Keys(rates)) {
		if rates[callers] >= enough*highest {
			return callers
		}
	}
	return 0
}

// rateOf returns the number of requests per second, over the time from the first request to the last response.
func rateOf(all load.Answers) float64 {
	if len(all) == 0 {
		return 0
	}
	from, to := all[0].Due, all[0].Done
	for _, a := range all {
		if a.Due.Before(from) {
			from = a.Due
		}
		if a.Done.After(to) {
			to = a.Done
		}
	}
	return float64(len(all)) / to.Sub(from).Seconds()
}

// closed measures a row in a closed loop, with the number of callers that sweep returns.
func (t *turn) closed(ctx context.Context, row string, wallets []string) error {
	callers, err := t.sweep(ctx, row, wallets)
	if err != nil {
		return err
	}
	if err := t.bank.Connect(ctx, callers); err != nil {
		return err
	}
	if _, err := t.ask(ctx, callers, t.size.warm, wallets); err != nil {
		return err
	}
	return t.used(ctx, row, func() (load.Answers, int, error) {
		all, err := t.ask(ctx, callers, t.size.length, wallets)
		t.add(row, rate, rateOf(all))
		return all, len(all), err
	})
}

// open measures the row "open": openRate pairs per second, regardless of the responses.
func (t *turn) open(ctx context.Context, wallets []string) error {
	if err := t.bank.Connect(ctx, openCallers); err != nil {
		return err
	}
	return t.used(ctx, "open", func() (load.Answers, int, error) {
		began := time.Now()
		o := load.StartOpen(ctx, openRate, func(ctx context.Context, i int) error { return t.pair(ctx, i, wallets) })
		select {
		case <-time.After(t.size.openWarm + t.size.openMeasure):
		case <-ctx.Done():
		}
		all, err := o.Stop()
		if err := errors.Join(err, ctx.Err(), t.count(all)); err != nil {
			return nil, 0, err
		}
		return all.Within(began.Add(t.size.openWarm), time.Now()), len(all), nil
	})
}

// used runs f, and adds the p50 and p99 of the latencies and the servers' CPU time per pair to the row. f returns the
// results whose latencies count, and the number of all pairs that it made, including those of a warm-up.
func (t *turn) used(ctx context.Context, row string, f func() (load.Answers, int, error)) error {
	stop := t.perf(ctx, row)
	defer stop()
	before, err := t.bank.Usage()
	if err != nil {
		return err
	}
	all, n, err := f()
	if err != nil {
		return err
	}
	after, err := t.bank.Usage()
	if err != nil {
		return err
	}
	if n == 0 || len(all) == 0 {
		return errors.New("no pair was answered")
	}
	used, latencies := after.Since(before), all.Latencies()
	t.add(row, cpu, float64(used.CPU.Microseconds())/float64(n))
	t.add(row, p50, ms(figure.Median(latencies)))
	t.add(row, p99, ms(figure.Quantile(latencies, 0.99)))
	report.Say("%s, %s: %d pairs, %.0f/s, p50 %s, p99 %s, %.0f µs of CPU each", row, t.kind, n, rateOf(all), figure.Median(latencies),
		figure.Quantile(latencies, 0.99), float64(used.CPU.Microseconds())/float64(n))
	return nil
}

func (t *turn) add(row, metric string, v float64) { t.results.add(row, metric, t.kind, v) }

func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

// perf profiles the servers with `perf record` until stop is called. It does so only with the flag -perf and in the
// first round. If perf cannot be started, it prints the reason and returns a stop that does nothing.
func (t *turn) perf(ctx context.Context, row string) (stop func()) {
	if t.profile == "" || t.round > 0 {
		return func() {}
	}
	pids, err := t.bank.PIDs()
	if err == nil {
		stop, err = usage.Profile(ctx, t.profile+"."+row+"."+t.kind, pids...)
	}
	if err != nil {
		report.Say("no profile: %v", err)
		return func() {}
	}
	return stop
}
