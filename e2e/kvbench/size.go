package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/kvbench/load"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// memory adds the resident and the anonymous memory of the three members in MB to a row, as the metrics
// prefix+"rss"+suffix and prefix+"anon"+suffix.
func (t *turn) memory(row, prefix, suffix string) error {
	pids, err := t.trio.PIDs()
	if err != nil {
		return err
	}
	m, err := usage.MemoryOf(pids...)
	if err != nil {
		return err
	}
	t.add(row, prefix+"rss"+suffix, float64(m.Resident)/1e6)
	t.add(row, prefix+"anon"+suffix, float64(m.Anonymous)/1e6)
	report.Say("%s%s%s, %s: %d MB resident, %d MB of it anonymous", prefix, row, suffix, t.kind, m.Resident/1e6, m.Anonymous/1e6)
	return nil
}

// restart stops all members, starts them again, and returns the time from the start until all serve. Their files are
// still in the page cache, unlike after a power cut.
func (t *turn) restart(ctx context.Context) (time.Duration, error) {
	if err := errors.Join(t.hangUp(), t.trio.Stop()); err != nil {
		return 0, err
	}
	return t.start(ctx)
}

// size loads values of 64 KiB with a total size of total bytes. It measures the time of the load and of a restart, and
// the members' memory and disk space.
func size(ctx context.Context, t *turn, row string, total int) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Minute)
	defer cancel()
	const big = 64 << 10
	count := t.scale(total / big)
	began := time.Now()
	// One put per transaction, because etcd keeps its last 10,000 log entries in memory: with megabytes in each, they
	// would not fit.
	fill := load.Fill{Clients: t.clients, Key: load.Key, To: count, PerTxn: 1, Workers: loaders, ValueBytes: big}
	if err := fill.Run(ctx); err != nil {
		return err
	}
	t.add(row, "load", time.Since(began).Seconds())
	if err := t.memory(row, "", " loaded"); err != nil {
		return err
	}
	took, err := t.restart(ctx)
	if err != nil {
		return err
	}
	t.add(row, "restart", took.Seconds())
	report.Say("%s, %s: served after %s", row, t.kind, took.Round(time.Millisecond))
	for _, i := range []int{0, count / 2, count - 1} {
		if err := t.holds(ctx, load.Key(i), big); err != nil {
			return err
		}
	}
	if err := t.memory(row, "", ""); err != nil {
		return err
	}
	disk, err := usage.DiskOf(t.trio.Dir())
	if err != nil {
		return err
	}
	t.add(row, "disk", float64(disk)/1e6)
	return nil
}

func (t *turn) holds(ctx context.Context, key string, valueBytes int) error {
	r, err := t.clients[0].Get(ctx, key)
	if err != nil {
		return err
	}
	if len(r.Kvs) != 1 || len(r.Kvs[0].Value) != valueBytes {
		return fmt.Errorf("key %q is not what was put", key)
	}
	return nil
}

// puts1 returns the median latency of puts by a single client. It sends the given total of puts to the leader one after
// the other. Each put writes a random one of the keys with the numbers 0 to among-1.
func (t *turn) puts1(ctx context.Context, total, among int) (time.Duration, error) {
	random := rand.New(rand.NewPCG(uint64(among), 3))
	all, err := load.Closed(ctx, 1, total, func(ctx context.Context, _, _ int) error {
		ctx, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		_, err := t.clients[0].Put(ctx, load.Key(random.IntN(among)), load.Stamp(time.Now(), valueBytes))
		return err
	})
	if _, first := all.Failed(); err != nil || first != nil {
		return 0, errors.Join(err, first)
	}
	return figure.Median(all.Latencies()), nil
}

// growth measures the puts of one client, and memory, at 10 thousand, 1 million and 10 million keys.
func growth(ctx context.Context, t *turn) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Hour)
	defer cancel()
	const small = 64 // the size of a value in bytes
	loaded := 0
	for _, step := range []struct {
		name string
		keys int
	}{{"10k", 10_000}, {"1M", 1_000_000}, {"10M", 10_000_000}} {
		began := time.Now()
		to := t.scale(step.keys)
		fill := load.Fill{Clients: t.clients, Key: load.Key, From: loaded, To: to, PerTxn: 128, Workers: loaders, ValueBytes: small}
		if err := fill.Run(ctx); err != nil {
			return err
		}
		loaded = to
		t.add("growth", step.name+" load", time.Since(began).Seconds())
		// Wait, so that the servers can finish the background work of the load.
		if err := sleep(ctx, 5*time.Second); err != nil {
			return err
		}
		median, err := t.puts1(ctx, t.scale(2000), loaded)
		if err != nil {
			return err
		}
		t.add("growth", step.name+" p50", ms(median))
		report.Say("%d keys, %s: loaded after %s, put p50 %s", loaded, t.kind, time.Since(began).Round(time.Second), median)
		if err := t.memory("growth", step.name+" ", ""); err != nil {
			return err
		}
	}
	took, err := t.restart(ctx)
	if err != nil {
		return err
	}
	t.add("growth", "10M restart", took.Seconds())
	report.Say("growth, %s: served after %s", t.kind, took.Round(time.Millisecond))
	return nil
}

// watchers measures the latency of puts before and while there are 10,000 watchers, one on each key, and also the delay
// of their events and the memory that they use.
func watchers(ctx context.Context, t *turn) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	const streams = 100
	count := t.scale(10_000)
	fill := load.Fill{Clients: t.clients, Key: load.Key, To: count, PerTxn: 128, Workers: loaders, ValueBytes: valueBytes}
	if err := fill.Run(ctx); err != nil {
		return err
	}
	puts := t.scale(2000)
	before, err := t.puts1(ctx, puts, count)
	if err != nil {
		return err
	}
	pids, err := t.trio.PIDs()
	if err != nil {
		return err
	}
	memory, err := usage.MemoryOf(pids...)
	if err != nil {
		return err
	}
	w, err := load.StartWatchers(ctx, t.clients, streams, count/streams, load.Key)
	if err != nil {
		return err
	}
	after, err := t.puts1(ctx, puts, count)
	if err != nil {
		return errors.Join(err, w.Close())
	}
	delays, err := w.Await(ctx, puts)
	if err != nil {
		return errors.Join(err, w.Close())
	}
	full, err := usage.MemoryOf(pids...)
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	t.add("watchers", "before p50", ms(before))
	t.add("watchers", p50, ms(after))
	t.add("watchers", "anon", (float64(full.Anonymous)-float64(memory.Anonymous))/1e6)
	t.add("watchers", "event p50", ms(figure.Median(delays)))
	report.Say("watchers, %s: put p50 %s, with %d watchers %s", t.kind, before, count, after)
	return nil
}
