package etcdrpc_test

import (
	"context"
	"log/slog"
	"net"
	"testing"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/controlplane/kv/kvtest"
)

// BenchmarkInterceptors measures the time that the interceptors of a server, and those of the metrics library, add to a
// call.
func BenchmarkInterceptors(b *testing.B) {
	feed := &kv.LeaseFeed{}
	engine, err := mvcc.Open(vfs.NewMem(), "kv", mvcc.Options{OnLeases: feed.Changed})
	if err != nil {
		b.Fatal(err)
	}
	defer engine.Close()
	service := kv.New(kv.Options{Engine: engine, Consensus: kvtest.NewSingleMember(engine), Leases: feed, Log: slog.New(slog.DiscardHandler)})
	s := etcdrpc.New(etcdrpc.Options{Service: service, Log: slog.New(slog.DiscardHandler)})
	ctx := peer.NewContext(context.Background(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}})
	ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("user-agent", "grpc", "client-api-version", "3.7"))
	info := &grpc.UnaryServerInfo{FullMethod: pb.KV_Range_FullMethodName}
	r := &pb.RangeRequest{Key: []byte("a")}
	handler := func(context.Context, any) (any, error) { return r, nil }
	b.Run("server", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := s.Unary(ctx, r, info, handler); err != nil {
				b.Fatal(err)
			}
		}
	})
	for name, m := range map[string]*grpcprom.ServerMetrics{
		"counters": grpcprom.NewServerMetrics(), "histogram": grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram()),
	} {
		count := m.UnaryServerInterceptor()
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := count(ctx, r, info, handler); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
