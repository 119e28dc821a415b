package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/edge/split"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
)

// etcdOverhead is the number of bytes that are added to the maximum size of a request that writes. The sum is the
// maximum size of a gRPC message. etcd has the same value.
const etcdOverhead = 512 << 10

// etcdStreams is the maximum number of concurrent calls on one connection to a port for etcd's clients. etcd has no
// such limit; its clients send all their watches over one stream.
const etcdStreams = 4096

// serveEtcd opens a listener that serves gRPC and HTTP/1 on the same port, as etcd does.
func (l *listenerSet) serveEtcd(address string, c config.KV, etcd *etcdrpc.Server, keys *kv.Service, counted *grpcprom.ServerMetrics, metrics http.Handler) error {
	config, err := etcdTLS(c)
	if err != nil {
		return err
	}
	in := rpc.NewIntake(etcdStreams, etcd.Intake(c.MaxRequestBytes+etcdOverhead))
	g := rpc.NewServer(in, append(in.Settings(etcd.Streams().Credentials(split.Credentials())), rpc.Codec(),
		grpc.ChainUnaryInterceptor(counted.UnaryServerInterceptor(), etcd.Unary),
		grpc.ChainStreamInterceptor(counted.StreamServerInterceptor(), etcd.Stream),
		grpc.MaxRecvMsgSize(c.MaxRequestBytes+etcdOverhead), grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.NumStreamWorkers(rpc.Workers),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 2 * time.Hour, Timeout: 20 * time.Second}),
	)...)
	etcd.Register(g)
	h := health.NewServer()
	healthv1.RegisterHealthServer(g, h)
	pages := etcdrpc.HTTP(keys, metrics)
	return l.serveSplit("etcd", address, g.Server, pages, config)
}

// ignoreClosed returns nil if err only means that the listener was closed. Otherwise it returns err.
func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// etcdTLS returns the TLS configuration of the ports for etcd's clients, or nil if they are plaintext.
func etcdTLS(c config.KV) (*tls.Config, error) {
	if c.EtcdCert == "" {
		return nil, nil
	}
	// Read the files for each connection, so that a renewed certificate takes effect at once.
	load := func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(c.EtcdCert, c.EtcdKey)
		return &pair, err
	}
	if _, err := load(nil); err != nil {
		return nil, fmt.Errorf("kv.etcd_cert: %w", err)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: load}
	if c.EtcdClientCA != "" {
		text, err := os.ReadFile(c.EtcdClientCA)
		if err != nil {
			return nil, fmt.Errorf("kv.etcd_client_ca: %w", err)
		}
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("kv.etcd_client_ca: %s holds no certificate", c.EtcdClientCA)
		}
	}
	return config, nil
}
