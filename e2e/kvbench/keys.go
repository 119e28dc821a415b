package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/kvbench/load"
	"github.com/trivet-cloud/trivet/e2e/kvbench/subject"
)

const (
	// keyCount is the number of keys in the store while the rows of the group "keys" are measured.
	keyCount = 200_000
	// putCount is the number of puts in a measurement with many clients. Trivet's store writes puts to its files in
	// batches of some ten thousand; putCount is large enough that the bytes written per put are representative.
	putCount = 250_000
	// valueBytes is the size of values in bytes, unless a measurement says otherwise.
	valueBytes = 256
	// loaders is the number of concurrent transactions with which a load.Fill writes keys.
	loaders = 32
	// manyConns and manyCallers are the numbers of connections and of clients of every row with 1000 clients.
	manyConns, manyCallers = 100, 1000
	// aKey is the key that ranges of one key read. It is none of the keys that `benchmark put` writes, because those
	// contain bytes that cannot be passed as an argument.
	aKey = "a-key"
	// answerWithin is the timeout of a request that kvbench itself sends.
	answerWithin = 10 * time.Second
)

// keys measures puts, ranges and watches in a store of 200,000 keys.
func keys(ctx context.Context, t *turn) error {
	fill := load.Fill{Clients: t.clients, Key: load.ToolKey, To: keyCount, PerTxn: 128, Workers: loaders, ValueBytes: valueBytes}
	if err := fill.Run(ctx); err != nil {
		return err
	}
	if _, err := t.clients[0].Put(ctx, aKey, load.Value(rand.New(rand.NewPCG(1, 1)), valueBytes)); err != nil {
		return err
	}
	put := func(total int) []string {
		return []string{"put", "--key-size", "8", "--val-size", itoa(valueBytes), "--key-space-size", itoa(keyCount), "--total", itoa(total)}
	}
	get := func(consistency string, total int) []string {
		return []string{"range", aKey, "--consistency", consistency, "--total", itoa(total)}
	}
	for _, r := range []struct {
		row string
		run func() error
	}{
		{"put", func() error {
			// A warm-up that is not counted: it lets the servers finish the background writes of the fill and brings
			// the store to a steady state.
			if _, err := t.many().Run(ctx, 1, put(t.scale(100_000))...); err != nil {
				return err
			}
			return t.tool(ctx, "put", t.many(), put(t.scale(putCount))...)
		}},
		{"put-random", func() error { return t.putRandom(ctx, t.scale(putCount)) }},
		{"put1", func() error { return t.tool(ctx, "put1", t.one(), put(t.scale(4_000))...) }},
		{"range", func() error { return t.tool(ctx, "range", t.many(), get("l", t.scale(60_000))...) }},
		{"range1", func() error { return t.tool(ctx, "range1", t.one(), get("l", t.scale(10_000))...) }},
		{"serializable", func() error { return t.tool(ctx, "serializable", t.many(), get("s", t.scale(60_000))...) }},
		{"limit", func() error { return t.limit(ctx) }},
		{"watch", func() error { return t.watchLatency(ctx, t.scale(2_000)) }},
		{"watch-sent", func() error { return t.watchSent(ctx, t.scale(1_000)) }},
	} {
		if !t.wants(r.row) {
			continue
		}
		if err := r.run(); err != nil {
			return err
		}
	}
	return nil
}

// dial returns n clients with one connection each, to the members in rotation. hangUp closes them.
func (t *turn) dial(n int) (clients []*clientv3.Client, hangUp func(), err error) {
	hangUp = func() {
		for _, c := range clients {
			_ = c.Close() // its only error is that of the client's own context
		}
	}
	endpoints := t.trio.Endpoints(t.leader)
	for i := range n {
		c, err := subject.Dial(endpoints[i%len(endpoints)])
		if err != nil {
			hangUp()
			return nil, nil, err
		}
		clients = append(clients, c)
	}
	return clients, hangUp, nil
}

// putRandom measures the same load as `benchmark put`, but each put has a different random value. `benchmark` repeats
// one value, which compresses well.
func (t *turn) putRandom(ctx context.Context, total int) error {
	clients, hangUp, err := t.dial(manyConns)
	if err != nil {
		return err
	}
	defer hangUp()
	randoms := make([]*rand.Rand, manyCallers)
	for i := range randoms {
		randoms[i] = rand.New(rand.NewPCG(uint64(i), 2))
	}
	return t.measure(ctx, "put-random", func() (int, error) {
		began := time.Now()
		all, err := load.Closed(ctx, manyCallers, total, func(ctx context.Context, caller, _ int) error {
			ctx, cancel := context.WithTimeout(ctx, answerWithin)
			defer cancel()
			random := randoms[caller]
			_, err := clients[caller%len(clients)].Put(ctx, load.ToolKey(random.IntN(keyCount)), load.Value(random, valueBytes))
			return err
		})
		return t.answers("put-random", all, time.Since(began)), err
	})
}

// limit measures a range that returns the first 10 of all keys. `benchmark` cannot express a range over all of the keys
// that it writes.
func (t *turn) limit(ctx context.Context) error {
	read := func(ctx context.Context, _, _ int) error {
		ctx, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		r, err := t.clients[0].Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithLimit(10))
		if err == nil && (len(r.Kvs) != 10 || r.Count <= keyCount || !r.More) {
			err = errors.New("not 10 of all keys")
		}
		return err
	}
	// Choose a number of requests that takes about 5 seconds: Trivet and etcd differ by a factor of hundreds here.
	few, err := load.Closed(ctx, 1, 10, read)
	if err != nil {
		return err
	}
	if _, first := few.Failed(); first != nil {
		return first
	}
	total := t.scale(min(10_000, max(10, int(5*time.Second/figure.Median(few.Latencies())))))
	return t.measure(ctx, "limit", func() (int, error) {
		began := time.Now()
		all, err := load.Closed(ctx, 1, total, read)
		return t.answers("limit", all, time.Since(began)), err
	})
}

// watchLatency measures with `benchmark watch-latency`, with 10 streams of 10 watchers on one key and 500 puts per
// second.
func (t *turn) watchLatency(ctx context.Context, puts int) error {
	return t.measure(ctx, "watch", func() (int, error) {
		got, err := load.Tool{Binary: t.many().Binary, Endpoints: t.trio.Endpoints(t.leader)}.Run(ctx, 2, "watch-latency", "--key-size", "8",
			"--val-size", itoa(valueBytes), "--put-total", itoa(puts), "--put-rate", "500", "--streams", "10", "--watchers-per-stream", "10")
		if err != nil {
			return 0, err
		}
		t.add("watch", "put p50", ms(got[0].Quantile(50)))
		t.summary("watch", "", got[1])
		t.add("watch", rate, got[1].Rate)
		return got[0].Count(), nil
	})
}

// watchSent measures the time from when a put was sent until a watcher receives its event. `benchmark` measures from
// the put's response instead, which favors servers with slow responses.
func (t *turn) watchSent(ctx context.Context, puts int) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	const streams, perStream, perSecond = 10, 10, 200
	w, err := load.StartWatchers(ctx, t.clients, streams, perStream, func(int) string { return "watched" })
	if err != nil {
		return err
	}
	tick := time.NewTicker(time.Second / perSecond)
	defer tick.Stop()
	all, err := load.Closed(ctx, 1, puts, func(ctx context.Context, _, i int) error {
		<-tick.C
		_, err := t.clients[i%len(t.clients)].Put(ctx, "watched", load.Stamp(time.Now(), valueBytes))
		return err
	})
	if _, first := all.Failed(); err != nil || first != nil {
		return errors.Join(err, first, w.Close())
	}
	delays, err := w.Await(ctx, puts*streams*perStream)
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	t.add("watch-sent", p50, ms(figure.Median(delays)))
	t.add("watch-sent", p99, ms(figure.Quantile(delays, 0.99)))
	return nil
}

// transactions measures with `benchmark txn-mixed`: half of the transactions read 10 of 10,000 keys, the other half put
// one key.
func transactions(ctx context.Context, t *turn) error {
	const count = 10_000
	fill := load.Fill{Clients: t.clients, Key: load.ToolKey, To: count, PerTxn: 128, Workers: loaders, ValueBytes: valueBytes}
	if err := fill.Run(ctx); err != nil {
		return err
	}
	return t.measure(ctx, "txn-mixed", func() (int, error) {
		got, err := t.many().Run(ctx, 2, "txn-mixed", "--key-size", "8", "--val-size", itoa(valueBytes), "--key-space-size", itoa(count),
			"--total", itoa(t.scale(30_000)), "--rw-ratio", "1", "--consistency", "l", "--limit", "10")
		if err != nil {
			return 0, err
		}
		t.summary("txn-mixed", "read ", got[0])
		t.summary("txn-mixed", "write ", got[1])
		// Reads and writes ran concurrently, so the rate of both together is over the longer of their times.
		n := got[0].Count() + got[1].Count()
		t.add("txn-mixed", rate, float64(n)/max(got[0].Took, got[1].Took).Seconds())
		return n, nil
	})
}
