package load

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
)

// ToolKey returns the key with the number i of those that `benchmark put` writes with keys of 8 bytes: a varint padded
// with zeros.
//
// The tool does not clear its buffer between keys, so a short varint may be followed by the last bytes of an earlier,
// longer one. Therefore a few percent of the keys that it writes differ from those of ToolKey.
func ToolKey(i int) string {
	var k [8]byte
	binary.PutVarint(k[:], int64(i))
	return string(k[:])
}

// Key returns a key of 12 bytes for the number i. Keys sort in the order of their numbers.
func Key(i int) string { return fmt.Sprintf("k%011d", i) }

// Fill describes how to load a store with many keys; Run does it.
type Fill struct {
	Clients []*clientv3.Client // the clients to which transactions are given in rotation
	Key     func(i int) string
	// From is the number of the first key; To is one more than the number of the last.
	From, To int
	// PerTxn is the number of puts per transaction; Workers is the number of concurrent transactions.
	PerTxn, Workers int
	// ValueBytes is the size of each value in bytes. Values are random, so they cannot be compressed.
	ValueBytes int
}

// Run puts the keys with the numbers From to To-1, with random values. It stops at the first error.
func (f Fill) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(f.Workers)
	for from := f.From; from < f.To && ctx.Err() == nil; from += f.PerTxn {
		g.Go(func() error {
			random := rand.New(rand.NewPCG(uint64(from), 1))
			var puts []clientv3.Op
			for i := from; i < min(from+f.PerTxn, f.To); i++ {
				puts = append(puts, clientv3.OpPut(f.Key(i), Value(random, f.ValueBytes)))
			}
			c := f.Clients[from/f.PerTxn%len(f.Clients)]
			if _, err := c.Txn(ctx).Then(puts...).Commit(); err != nil {
				return fmt.Errorf("put keys %d to %d: %w", from, from+len(puts)-1, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// Value returns a value of n bytes from random.
func Value(random *rand.Rand, n int) string {
	b := make([]byte, (n+7)/8*8)
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], random.Uint64())
	}
	return string(b[:n])
}
