package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	apidocs "github.com/trivet-cloud/trivet/docs/api"

	"github.com/trivet-cloud/trivet/controlplane/cluster/jointoken"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/edge/split"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/controlplane/kv/restapi"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

const (
	// stopTime is the maximum time for transferring the leadership to another member when this member stops.
	stopTime = 3 * time.Second
	// drainTime is the maximum time that running requests have to end when the member stops. Streams of tenants do not
	// end by themselves, so they are canceled after this time.
	drainTime = 2 * time.Second
)

// servePeers starts to exchange messages with the other members. Only then can raft elect leaders.
func (m *member) servePeers(context.Context) error {
	m.mesh.Attach(m.runner, m.commands, m.files)
	// Continue to exchange messages until the leadership was transferred. Functions that were passed to onStop later
	// are called earlier, so everything that later builders have started is stopped first.
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { m.mesh.Run(ctx) })
	server, _ := rpc.New(rpc.Options{
		Credentials: m.mesh.Credentials(withClock(m.clock, mtls.Server(m.certificate, m.authority.Certificate(), mtls.OnlyKind(mtls.Member)))),
		Log:         m.log, Metrics: m.metrics.grpc, MaxMessage: message.MaxBytes + 1<<20,
	})
	m.mesh.Register(server)
	m.peers = newListenerSet(m.log, m.opened, make(chan error, 1))
	m.onStop(func() {
		stopping, stopped := context.WithTimeout(context.Background(), stopTime)
		defer stopped()
		if err := m.runner.Stop(stopping); !errors.Is(err, consensus.ErrStopped) {
			m.stopErr = err
		}
		cancel()
		m.peers.close(0)
		work.Wait()
	})
	return m.peers.serve("peers", m.config.Address(m.config.Ports.Peers), server.Server, nil, nil)
}

// serveClients opens the listeners for agents, tenants, operators and etcd's clients.
func (m *member) serveClients(context.Context) error {
	c := &m.config
	m.metrics.register(m)
	agents := m.newAgentServer()
	m.streams = rpc.NewStreams()
	public, creditOnly, networkOnly := m.newTenantServers()
	kvREST := m.newKVREST()
	m.onStop(kvREST.Close)
	m.listeners = newListenerSet(m.log, m.opened, make(chan error, 16))
	m.onStop(func() { m.listeners.close(drainTime) })
	// Stop these listeners without waiting for running requests: agents' streams do not end by themselves, and agents
	// connect to another member at once.
	agentListeners := newListenerSet(m.log, m.opened, m.listeners.failed)
	m.onStop(func() { agentListeners.close(0) })

	if err := agentListeners.serve("agents", c.Address(c.Ports.Agents), agents, nil, nil); err != nil {
		return err
	}
	if err := m.listeners.serve("grpc", c.Address(c.Ports.GRPC), public, nil, nil); err != nil {
		return err
	}
	if err := m.listeners.serve("credit rpc", c.Address(c.Ports.CreditGRPC), creditOnly, nil, nil); err != nil {
		return err
	}
	if err := m.listeners.serveSplit("network rpc", c.Address(c.Ports.NetworkGRPC), networkOnly, m.newPlainHTTP("network rpc"), m.tenantTLS.rest); err != nil {
		return err
	}
	for _, s := range m.services {
		if s.rest == nil {
			continue
		}
		if err := m.listeners.serve(s.rest.name, c.Address(s.rest.port), nil, m.newREST(s.rest), m.tenantTLS.rest); err != nil {
			return err
		}
	}
	for _, host := range restapi.Addresses(c.Listen) {
		if err := m.listeners.serve("kv", net.JoinHostPort(host, strconv.Itoa(int(c.Ports.KV))), nil, kvREST, m.tenantTLS.kvREST); err != nil {
			return err
		}
	}
	for _, address := range c.KV.EtcdListen {
		if err := m.listeners.serveEtcd(address, c.KV, m.etcdPorts, m.keys, m.metrics.grpc, m.metrics.etcdHandler); err != nil {
			return err
		}
	}
	if c.MetricsListen != "" {
		return m.serveMetrics()
	}
	return nil
}

// newAgentServer creates the gRPC server for the agents of hosts. Agents authenticate with client certificates; callers
// without one may call only the two methods for joining.
func (m *member) newAgentServer() *grpc.Server {
	server, _ := rpc.New(rpc.Options{
		Credentials: m.nodes.Credentials(withClock(m.clock, mtls.ServerOptional(withAuthorityCertificate(m.certificate, m.authority),
			m.authority.Certificate(), mtls.OnlyKind(mtls.Node), node.RenewGrace))),
		Log: m.log, Metrics: m.metrics.grpc, MaxMessage: node.MaxMessage,
		Certified: true, Open: []string{node.OpenMethod, jointoken.OpenMethod},
	})
	for _, s := range m.services {
		if s.agentRPC != nil {
			s.agentRPC(server)
		}
	}
	return server.Server
}

// newTenantServers creates three gRPC servers: public has the methods of all services, creditOnly those of the credit
// service, and networkOnly those of the network service. Callers authenticate with tokens. The servers share one limit of
// streams per caller.
func (m *member) newTenantServers() (public, creditOnly, networkOnly *grpc.Server) {
	options := rpc.Options{
		Credentials: m.tenantTLS.grpc(), Verifier: m.identities, Log: m.log, Metrics: m.metrics.grpc, Audit: m.audits, Public: true,
		Streams: m.streams,
	}
	creditServer, creditHealth := rpc.New(options)
	m.credits.Register(creditServer)
	creditHealth.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)

	options.Credentials = split.Credentials()
	networkServer, networkHealth := rpc.New(options)
	m.networks.Register(networkServer)
	networkHealth.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)

	options.Credentials = m.tenantTLS.grpc()
	options.Passthrough = &rpc.Passthrough{
		Prefix: etcdrpc.Prefix, Admit: m.etcd.Admit, MaxMessage: m.config.KV.MaxRequestBytes + etcdOverhead, Unary: m.etcd.Unary, Stream: m.etcd.Stream,
		Streams: m.etcd.Streams(),
	}
	server, health := rpc.New(options)
	for _, s := range m.services {
		if s.rpc != nil {
			s.rpc(server)
		}
	}
	health.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
	return server.Server, creditServer.Server, networkServer.Server
}

// newPlainHTTP returns an HTTP handler with /health and /ready only.
func (m *member) newPlainHTTP(name string) http.Handler {
	return rest.New(rest.Options{Name: name, Service: fault.Network, Verifier: m.identities, Audit: m.audits, Ready: m.ready, Log: m.log, Metrics: m.metrics.http})
}

// newREST returns the HTTP handler of one of the platform's REST APIs.
func (m *member) newREST(api *restAPI) http.Handler {
	options := api.options
	options.Name, options.Ready, options.Log, options.Metrics = api.name, m.ready, m.log, m.metrics.http
	options.Document = apidocs.Document(api.name)
	if options.Verifier != nil {
		options.OpenStream = m.streamOpener(options.Verifier)
	}
	server := rest.New(options)
	api.routes(server)
	if api.metrics {
		handler := localMetrics(m.metrics.handler, server, m.config.CredentialFreeHosts())
		return routedHandler{Handler: handler, routes: slices.Concat(server.Routes(), m.metrics.handler.routes)}
	}
	return server
}

// streamOpener returns a function for streams of servers other than gRPC, such as websockets. The function counts a
// stream against the limits of open streams, and rechecks its token with the given verifier (see rpc.Streams.Open).
func (m *member) streamOpener(verifier auth.Verifier) func(context.Context, string) (context.Context, func(), error) {
	checks := auth.NewRechecker(verifier)
	return func(ctx context.Context, token string) (context.Context, func(), error) {
		return m.streams.Open(ctx, checks, token)
	}
}

// newKVREST returns the REST API of the key-value store. Members forward requests of this API to each other.
func (m *member) newKVREST() *restapi.Server {
	c := &m.config
	return restapi.New(restapi.Options{
		Keys: m.keys, Members: m.memberships, Group: m.kvRaft, GroupID: layout.KVGroup, Self: c.NodeID, Cluster: m.key.ClusterID(),
		Key: m.key.Derive("kv-forwards"), Port: c.Ports.KV, Open: slices.Contains(c.REST.Open, "kv"), ToMember: m.tenantTLS.forwardClient,
		Log: m.log, Audit: m.audits, Metrics: m.metrics.http, Document: apidocs.Document("kv"), Now: m.clock.Now,
	})
}

// ready returns nil if the member can serve requests that need the platform's records. Otherwise it returns an error
// with the reason, which /ready reports.
func (m *member) ready(context.Context) error {
	if leaderID, _ := m.system.Leader(); leaderID == 0 {
		return errors.New("no leader: fewer than a majority of the members can be reached")
	}
	return m.identities.Ready()
}
