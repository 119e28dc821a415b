package etcdrpc_test

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/edge/split"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/controlplane/kv/kvtest"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// world is a service that is served on one port for gRPC and HTTP, as etcd serves it.
type world struct {
	service *kv.Service
	raft    *kvtest.SingleMember
	engine  *mvcc.Engine
	server  *etcdrpc.Server
	address string
}

type settings struct {
	kv     kv.Options
	rpc    etcdrpc.Options
	listen string
	tls    *tls.Config
}

func newWorld(t *testing.T, change ...func(*settings)) *world {
	t.Helper()
	feed := &kv.LeaseFeed{}
	engine, err := mvcc.Open(vfs.NewMem(), "kv", mvcc.Options{OnLeases: feed.Changed})
	require.NoError(t, err)
	w := &world{engine: engine, raft: kvtest.NewSingleMember(engine)}
	log := slog.New(slog.DiscardHandler)
	s := settings{listen: "127.0.0.1:0"}
	s.kv = kv.Options{
		Engine: engine, Consensus: w.raft, Leases: feed, Tokens: users.NewTokens(make([]byte, 32), time.Hour),
		Self: 1, Cluster: 77, Election: 100 * time.Millisecond, BcryptCost: users.MinCost, Log: log,
	}
	// Tests call governing methods on loopback. Only TestAdmission tests loopback without TrustLoopback.
	s.rpc = etcdrpc.Options{Dir: t.TempDir(), Log: log, TrustLoopback: true}
	for _, f := range change {
		f(&s)
	}
	w.service = kv.New(s.kv)
	s.rpc.Service = w.service
	server := etcdrpc.New(s.rpc)
	w.server = server
	g := grpc.NewServer(grpc.Creds(server.Streams().Credentials(split.Credentials())), rpc.Codec(), grpc.UnaryInterceptor(server.Unary), grpc.StreamInterceptor(server.Stream))
	server.Register(g)
	web := &http.Server{Handler: etcdrpc.HTTP(w.service, http.NotFoundHandler()), ReadHeaderTimeout: time.Second}
	listener, err := net.Listen("tcp", s.listen)
	require.NoError(t, err)
	w.address = listener.Addr().String()
	ports := split.New(listener, s.tls)
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { w.service.Run(ctx) })
	work.Go(func() { server.Run(ctx) })
	work.Go(func() { ports.Serve() })
	work.Go(func() { g.Serve(ports.GRPC()) })
	work.Go(func() { web.Serve(ports.HTTP()) })
	t.Cleanup(func() {
		ports.Close()
		g.Stop()
		web.Close()
		cancel()
		work.Wait()
		require.NoError(t, engine.Close())
	})
	return w
}

// client returns an etcd client for the service.
func (w *world) client(t *testing.T, change ...func(*clientv3.Config)) *clientv3.Client {
	t.Helper()
	c := clientv3.Config{Endpoints: []string{w.address}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()}
	for _, f := range change {
		f(&c)
	}
	client, err := clientv3.New(c)
	require.NoError(t, err)
	t.Cleanup(func() { client.Close() })
	return client
}
