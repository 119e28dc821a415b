package kv

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv/kvtest"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// benchWorld returns a service with an in-memory engine that has the given number of keys.
func benchWorld(b *testing.B, keys int) *Service {
	feed := &LeaseFeed{}
	engine, err := mvcc.Open(vfs.NewMem(), "kv", mvcc.Options{OnLeases: feed.Changed, KeyIndex: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { engine.Close() })
	s := New(Options{
		Engine: engine, Consensus: kvtest.NewSingleMember(engine), Leases: feed, Tokens: users.NewTokens(make([]byte, 32), time.Hour),
		Self: 1, Cluster: 77, Election: time.Second, Log: slog.New(slog.DiscardHandler),
	})
	for i := range keys {
		if _, err := s.Put(b.Context(), &pb.PutRequest{Key: fmt.Appendf(nil, "k%08d", i), Value: make([]byte, 256)}); err != nil {
			b.Fatal(err)
		}
	}
	return s
}

// The benchmarks measure requests to the service without raft and gRPC.

func BenchmarkRangeOfOne(b *testing.B) {
	s := benchWorld(b, 10_000)
	r := &pb.RangeRequest{Key: []byte("k00004242")}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Range(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRangeOfTen(b *testing.B) {
	s := benchWorld(b, 10_000)
	r := &pb.RangeRequest{Key: []byte("k0"), RangeEnd: []byte("l"), Limit: 10}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Range(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPut(b *testing.B) {
	s := benchWorld(b, 0)
	r := &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 256)}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Put(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkTxn(b *testing.B) {
	s := benchWorld(b, 1000)
	r := &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte("k00000001"), Target: pb.Compare_MOD, Result: pb.Compare_GREATER, TargetUnion: &pb.Compare_ModRevision{}}},
		Success: []*pb.RequestOp{op(&pb.PutRequest{Key: []byte("k00000001"), Value: make([]byte, 256)})},
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Txn(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
}
