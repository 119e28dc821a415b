package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/kvbench/load"
)

// compaction loads 2 GB, writing each key twice. Then it measures the highest latency of a put in three periods: before
// Compact, while Compact removes the older half of the revisions, and while the members defragment. The second and the
// third period include the 3 seconds that follow.
func compaction(ctx context.Context, t *turn) error {
	const (
		big       = 4 << 10
		puts      = 100             // the number of puts per second, in an open loop, sent to the members in rotation
		calm      = 3 * time.Second // the time with puts before the first step and after each step
		patience  = 5 * time.Minute
		fillBytes = 2 << 30
	)
	ctx, cancel := context.WithTimeout(ctx, 20*time.Minute)
	defer cancel()
	count := t.scale(fillBytes / big / 2)
	for range 2 {
		// Put few keys per transaction: etcd keeps its last 10,000 log entries in memory, and each transaction is one
		// entry.
		fill := load.Fill{Clients: t.clients, Key: load.Key, To: count, PerTxn: 8, Workers: loaders, ValueBytes: big}
		if err := fill.Run(ctx); err != nil {
			return err
		}
	}
	r, err := t.clients[0].Get(ctx, "k")
	if err != nil {
		return err
	}
	seed := rand.Uint64()
	open := load.StartOpen(ctx, puts, func(ctx context.Context, i int) error {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		_, err := t.clients[i%len(t.clients)].Put(ctx, load.Key(random.IntN(count)), load.Value(random, valueBytes))
		return err
	})
	moments, err := t.compact(ctx, r.Header.Revision, calm, patience)
	all, stopped := open.Stop()
	if err := errors.Join(err, stopped); err != nil {
		return err
	}
	for i, metric := range []string{"before", "compact", "defragment"} {
		longest := figure.Quantile(all.Within(moments[i], moments[i+1]).Latencies(), 1)
		t.add("compact", metric, ms(longest))
		report.Say("longest put, %s, %s: %s", metric, t.kind, longest)
	}
	t.add("compact", "took", (moments[2].Sub(moments[1]) - calm).Seconds())
	t.add("compact", "defragment took", (moments[3].Sub(moments[2]) - calm).Seconds())
	n, first := all.Failed()
	t.add("compact", "failed", float64(n))
	if first != nil {
		report.Say("%d puts failed, the first with: %v", n, first)
	}
	return nil
}

// compact executes three steps: it does nothing, compacts at revision, and defragments the members one by one. Each
// step has the timeout patience and is followed by a pause of the duration calm. moments holds the start of the first
// step and, for each step, the end of its pause.
func (t *turn) compact(ctx context.Context, revision int64, calm, patience time.Duration) (moments [4]time.Time, err error) {
	acts := []struct {
		name string
		do   func(context.Context) error
	}{
		{"wait", func(context.Context) error { return nil }},
		{"compact", func(ctx context.Context) error {
			_, err := t.clients[0].Compact(ctx, revision, clientv3.WithCompactPhysical())
			return err
		}},
		{"defragment", func(ctx context.Context) error {
			for i, endpoint := range t.trio.Endpoints(t.leader) {
				if _, err := t.clients[i].Defragment(ctx, endpoint); err != nil {
					return err
				}
			}
			return nil
		}},
	}
	moments[0] = time.Now()
	for i, a := range acts {
		acting, cancel := context.WithTimeout(ctx, patience)
		err := a.do(acting)
		cancel()
		if err != nil {
			return moments, fmt.Errorf("%s: %w", a.name, err)
		}
		select {
		case <-time.After(calm):
		case <-ctx.Done():
			return moments, ctx.Err()
		}
		moments[i+1] = time.Now()
	}
	return moments, nil
}
